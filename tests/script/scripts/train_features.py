"""A script that freezes its first layer, shares BatchNorm over ranks, joins samples itself and asks for checkpoints."""

import argparse
import time

import numpy as np
from points import Plain, accuracy
from torch import nn

import mtrain


class Net(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 32)
        self.norm = nn.BatchNorm1d(32)
        self.head = nn.Sequential(nn.ReLU(), nn.Dropout(dropout), nn.Linear(32, 2))

    def forward(self, inputs):
        return self.head(self.norm(self.stem(inputs)))


def joined(samples):
    """Return a dict of arrays, and of texts that are no arrays."""
    return {
        "inputs": np.stack([inputs for inputs, _ in samples]),
        "targets": np.stack([target for _, target in samples]),
        "names": [f"point of class {target}" for _, target in samples],
    }


def predicted(model, batch):
    return model(batch["inputs"]), batch["targets"]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--precision", default=None)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--delay", type=float, default=0.0)
    parser.add_argument("--save-at", type=int, default=4)
    flags = parser.parse_args()
    with mtrain.session() as session:
        model, optimizer = session.prepare(
            lambda: Net(flags.dropout),
            optimizer=mtrain.SGD(learning_rate=0.05, momentum=0.9),
            schedule=mtrain.Cosine(warmup=2),
            clip_norm=1.0,
            ema=0.9,
            precision=flags.precision,
            sync_batchnorm=True,
            freeze=["^stem"],
        )
        for batch in session.batches(Plain(240, 0), global_batch=24, epochs=2, collate=joined):
            assert len(batch["names"]) == len(batch["inputs"])
            time.sleep(flags.delay)
            optimizer.update(nn.functional.cross_entropy(model(batch["inputs"]), batch["targets"]))
            if session.progress.update == flags.save_at:
                session.save()
        session.evaluate(model, Plain(101, 1), metric=accuracy, step=predicted, collate=joined, score="accuracy")


if __name__ == "__main__":
    main()
