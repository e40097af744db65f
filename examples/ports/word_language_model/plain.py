"""The word language model, in one process: `python plain.py`. The hidden state is carried from batch to batch."""

import common
import torch
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader


def main() -> None:
    """Train, and save the weights."""
    torch.manual_seed(common.SEED)
    model = common.Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=common.LEARNING_RATE)
    scheduler = ReduceLROnPlateau(optimizer, factor=0.25, patience=0)
    loader = DataLoader(common.Pieces(common.TRAIN, common.PIECE), batch_size=common.ROWS)
    for epoch in range(common.EPOCHS):
        hidden = None
        for words, targets in loader:
            scores, hidden = model(words, hidden)
            loss = cross_entropy(scores, targets)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), common.CLIP)
            optimizer.step()
            hidden = common.detached(hidden)
        with torch.no_grad():
            error = model.predict((common.VAL[:, :-1], common.VAL[:, 1:]))[0].mean()
        scheduler.step(error)
        print(f"epoch {epoch}: error {error:.6f}")
    torch.save(model.state_dict(), "weights.pt")


if __name__ == "__main__":
    main()
