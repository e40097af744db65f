"""The CycleGAN on mtrain: `mtrain run --nproc-per-node 2 --seed 3 port.py`. One optimizer trains both generators."""

import common
from torch.nn import ModuleList
from torch.nn.functional import l1_loss
from torch.utils.data import DataLoader

import mtrain


def main() -> None:
    """Train two generators and two discriminators; the weights are in the run folder."""
    with mtrain.session() as session:
        upright = DataLoader(common.Digits(turned=False), batch_size=common.GLOBAL_BATCH)
        turned = DataLoader(common.Digits(turned=True), batch_size=common.GLOBAL_BATCH)
        adam = mtrain.Adam(learning_rate=2e-3, betas=(0.5, 0.999))
        (turn, turn_back), of_generators = session.prepare(
            lambda: ModuleList([common.Generator(), common.Generator()]), optimizer=adam, name="G"
        )
        judge_a, of_a = session.prepare(common.Discriminator, optimizer=adam, name="A")
        judge_b, of_b = session.prepare(common.Discriminator, optimizer=adam, name="B")
        for a, b in session.batches((upright, turned), epochs=common.EPOCHS):
            made_b, made_a = turn(a), turn_back(b)
            fooled = common.says(judge_b(made_b), 1.0) + common.says(judge_a(made_a), 1.0)
            cycle = l1_loss(turn_back(made_b), a) + l1_loss(turn(made_a), b)
            of_generators.update(fooled + 10 * cycle)
            of_a.update(common.says(judge_a(a), 1.0) + common.says(judge_a(made_a.detach()), 0.0))
            of_b.update(common.says(judge_b(b), 1.0) + common.says(judge_b(made_b.detach()), 0.0))


if __name__ == "__main__":
    main()
