"""A CycleGAN on small digits, in one process: `python plain.py`. One optimizer trains both generators."""

from itertools import chain

import common
import torch
from torch.nn.functional import l1_loss
from torch.utils.data import DataLoader


def main() -> None:
    """Train two generators and two discriminators, and save their weights."""
    torch.manual_seed(common.SEED)
    upright = DataLoader(common.Digits(turned=False), batch_size=common.GLOBAL_BATCH)
    turned = DataLoader(common.Digits(turned=True), batch_size=common.GLOBAL_BATCH)
    turn, turn_back = common.Generator(), common.Generator()
    of_generators = torch.optim.Adam(
        chain(turn.parameters(), turn_back.parameters()), lr=2e-3, betas=(0.5, 0.999), fused=True
    )
    judge_a = common.Discriminator()
    of_a = torch.optim.Adam(judge_a.parameters(), lr=2e-3, betas=(0.5, 0.999), fused=True)
    judge_b = common.Discriminator()
    of_b = torch.optim.Adam(judge_b.parameters(), lr=2e-3, betas=(0.5, 0.999), fused=True)
    for _ in range(common.EPOCHS):
        for a, b in zip(upright, turned, strict=True):
            made_b, made_a = turn(a), turn_back(b)
            fooled = common.says(judge_b(made_b), 1.0) + common.says(judge_a(made_a), 1.0)
            cycle = l1_loss(turn_back(made_b), a) + l1_loss(turn(made_a), b)
            of_generators.zero_grad()
            (fooled + 10 * cycle).backward()
            of_generators.step()
            of_a.zero_grad()
            (common.says(judge_a(a), 1.0) + common.says(judge_a(made_a.detach()), 0.0)).backward()
            of_a.step()
            of_b.zero_grad()
            (common.says(judge_b(b), 1.0) + common.says(judge_b(made_b.detach()), 0.0)).backward()
            of_b.step()
    torch.save(torch.nn.ModuleList([turn, turn_back]).state_dict(), "G.pt")
    torch.save(judge_a.state_dict(), "A.pt")
    torch.save(judge_b.state_dict(), "B.pt")


if __name__ == "__main__":
    main()
