"""Mistakes of one rank alone: it makes another batch, or leaves an update out."""

import sys

import numpy as np
import torch

import mtrain


def main() -> None:
    """Train a small model."""
    mistake = sys.argv[1]
    with mtrain.session() as session:
        model, optimizer = session.prepare(
            lambda: torch.nn.Linear(4, 1), optimizer=mtrain.SGD(learning_rate=0.1), overlap=False
        )
        random = np.random.default_rng(session.rank if mistake == "own-batch" else 0)
        for update in session.updates(4, global_batch=8):
            x = session.share(random.normal(size=(8, 4)).astype(np.float32))
            optimizer.backward(model(x).square().mean())
            if mistake == "own-skip" and update == 1 and session.rank == 1:
                optimizer.skip()
            else:
                optimizer.step()


if __name__ == "__main__":
    main()
