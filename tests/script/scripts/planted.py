"""A script for `mtrain compare` that trains wrongly on some backends, as `--faults FAULT=RUN FOLDER ...` says."""

import argparse

import torch
from points import Plain
from torch import nn

import mtrain


class Altered(Plain):
    def __getitem__(self, index: int):
        inputs, target = super().__getitem__(index)
        return (inputs * 1.5, target) if index == 7 else (inputs, target)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--faults", nargs="*", default=[])
    parser.add_argument("--precision", default=None)
    parser.add_argument("--accumulate", type=int, default=1)
    flags = parser.parse_args()
    faults = {folder: fault for fault, _, folder in (pair.partition("=") for pair in flags.faults)}
    with mtrain.session() as session:
        fault = faults.get(session.run_dir.name, "none")
        if fault == "error":
            raise RuntimeError("this backend is not liked here")
        if fault == "idle":
            return
        model, optimizer = session.prepare(
            lambda: nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 2)),
            optimizer=mtrain.SGD(learning_rate=0.1, momentum=0.9),
            schedule=mtrain.Cosine(),
            clip_norm=0.5,
            accumulate=flags.accumulate,
            ema=0.9,
            precision=flags.precision,
        )
        data = (Altered if fault == "sample" else Plain)(48, 0)
        for number, (inputs, targets) in enumerate(session.batches(data, global_batch=24, epochs=4)):
            update = session.progress.update
            scale = 2.0 if fault == "loss" and update == 1 else 1.0
            optimizer.update(scale * nn.functional.cross_entropy(model(inputs), targets))
            session.log(draw=float(torch.rand(())), elsewhere=float(len(session.run_dir.name)))
            if fault == "weight" and number == 5:
                with torch.no_grad():
                    next(model.parameters()).view(-1)[3] += 1e-6
            if fault == "ends" and number == 2:
                break


if __name__ == "__main__":
    main()
