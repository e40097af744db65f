"""A training script that reads a stream of unknown length, whole on every rank or in parts."""

import argparse
import time

import torch
from points import Points
from torch import nn

import mtrain


class Numbered(torch.utils.data.IterableDataset):
    """Points in a shuffled order of their own, drawn from the global generators as augmentation is."""

    def __init__(self, length, *, first=0, step=1):
        self.points, self.first, self.step = Points(length, 0), first, step
        self.opened = 0

    def __iter__(self):
        self.opened += 1
        for index in range(self.first, len(self.points), self.step):
            yield self.points[index]


class Remembering(Numbered):
    """The same stream with a state, which is restored in place of reading once more."""

    def __init__(self, length):
        super().__init__(length)
        self.next, self.start, self.reads = 0, 0, 0

    def __iter__(self):
        self.next, self.start = self.start, 0
        while self.next < len(self.points):
            self.next += 1
            self.reads += 1
            yield self.points[self.next - 1]
        self.next = 0

    def state_dict(self):
        return {"next": self.next}

    def load_state_dict(self, state):
        self.start = state["next"]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kind", choices=("whole", "parts", "state", "items"), default="whole")
    parser.add_argument("--precision", default="fp64")
    parser.add_argument("--delay", type=float, default=0.0)
    flags = parser.parse_args()
    with mtrain.session() as session:
        model, optimizer = session.prepare(
            lambda: nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 2)),
            optimizer=mtrain.AdamW(learning_rate=1e-2),
            schedule=mtrain.Cosine(warmup=3),
            precision=flags.precision,
        )
        shard = None
        data = Remembering(100) if flags.kind == "state" else Numbered(100)
        length = {"updates": 15}
        if flags.kind == "parts":
            # Rank 0 has 56 points and the others 44, so that they end apart.
            shard = lambda rank, size: Numbered(56 if rank == 0 else 44)  # noqa: E731
        if flags.kind == "items":
            data = Points(100, 0)
        order = {"order": lambda epoch: range(100)} if flags.kind == "items" else {}
        for inputs, targets in session.batches(data, global_batch=24, shard=shard, **length, **order):
            time.sleep(flags.delay)
            optimizer.update(nn.functional.cross_entropy(model(inputs), targets))
        place = session.progress
        session.print(f"epoch {place.epoch} position {place.position} reads {getattr(data, 'reads', 0)}")


if __name__ == "__main__":
    main()
