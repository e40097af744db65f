"""A training script that keeps two checkpoints by name: one in the middle, and one after its loop."""

import torch
from points import Plain

import mtrain


def main() -> None:
    with mtrain.session() as session:
        model, optimizer = session.prepare(
            lambda: torch.nn.Linear(8, 2), optimizer=mtrain.SGD(learning_rate=0.1, momentum=0.9), precision="fp64"
        )
        for inputs, targets in session.batches(Plain(48, 0), global_batch=8, epochs=2):
            optimizer.update(torch.nn.functional.cross_entropy(model(inputs), targets))
            if session.progress.update == 2:
                session.save("warm")
        session.save("the.end")


if __name__ == "__main__":
    main()
