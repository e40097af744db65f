"""An actor-critic, in one process: `python plain.py`. A batch is the numbers of the games that are played with the weights of now."""

import common
import torch
from torch.utils.data import DataLoader


def main() -> None:
    """Play and learn, and save the weights."""
    torch.manual_seed(common.SEED)
    games = common.Numbers()
    loader = DataLoader(games, batch_size=common.GLOBAL_BATCH)
    model = common.ActorCritic()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, fused=True)
    for epoch in range(common.EPOCHS):
        games.set_epoch(epoch)
        for numbers in loader:
            logarithms, worths, returns = common.play(model, numbers)
            loss = common.loss_of(logarithms, worths, returns)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            optimizer.step()
    torch.save(model.state_dict(), "weights.pt")


if __name__ == "__main__":
    main()
