"""Sweeps of the tests: a tiny spec, and jobs that cost nothing."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mtrain
from mtrain_sweep.places import TrialFiles
from mtrain_sweep.request import SweepRequest
from mtrain_sweep.trial_jobs import TrialEnd

TINY = {
    "_BASE_": "vit_digits.yml",
    "model": {"options": {"width": 16, "depth": 1, "heads": 2}},
    "train": {"epochs": None, "updates": 12},
    "evaluate": {"every_epochs": None, "every_updates": 4},
    "checkpoint": {"every_epochs": None, "every_updates": 4},
    "backend": {"name": "solo"},
    "cluster": {"nproc_per_node": 1, "threads": 1},
    "data": {"workers": 0},
    "report": {"plots": False, "tensorboard": False, "reporters": {}},
}
SPACE = {
    "optimizer.learning_rate": {"low": 0.0001, "high": 0.1, "log": True},
    "train.batch_size": {"choices": [16, 32]},
}


def sweep_request(folder: Path, **settings: Any) -> SweepRequest:
    said: dict[str, Any] = {
        "load": lambda: mtrain.load_spec(TINY),
        "named": True,
        "space": SPACE,
        "out": folder,
        "tell": lambda text: None,
        "shares": False,
    }
    return SweepRequest(**{**said, **settings})


class InstantJob:
    """A job that has written the records of its whole run when it is started; each start is noted in a file."""

    metrics: Callable[[TrialFiles], list[float]]
    """The metric after each evaluation; a test may replace it."""

    def __init__(self, place: TrialFiles, *, gpus: Sequence[str] | None = None) -> None:
        self._place = place
        with (place.sweep / "gpus.txt").open("a") as file:
            print(place.number, ",".join(gpus or ()), file=file)
        with (place.sweep / "starts.txt").open("a") as file:
            print(place.number, file=file)
        values = type(self).metrics(place)
        place.run_dir.mkdir(parents=True, exist_ok=True)
        records: list[dict[str, Any]] = [{"kind": "start", "update": 0}]
        records += [
            {"kind": "evaluation", "update": 4 * step, "metrics": {"score": value}}
            for step, value in enumerate(values, start=1)
        ]
        (place.run_dir / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        if values:
            (place.run_dir / "summary.json").write_text('{"reason": "done"}')
        self._ended = TrialEnd(code=0) if values else TrialEnd(code=1, reason="the gradient was not finite")

    def poll(self) -> TrialEnd | None:
        return self._ended

    def stop(self, *, at_once: bool = False) -> None:
        pass


def starts(folder: Path) -> list[int]:
    """Return the numbers of the trials whose jobs were started, in order."""
    return [int(line) for line in (folder / "starts.txt").read_text().split()]
