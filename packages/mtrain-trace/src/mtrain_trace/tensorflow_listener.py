"""What is noted while a process trains with TensorFlow: digests and sketches of the arrays that its optimizers see."""

from __future__ import annotations

import hashlib
import math
from typing import Any

import numpy as np

from mtrain_trace import mixing, recorder
from mtrain_trace.recorder import Recorder

EPOCHS = "epochs.jsonl"
"""File with the metrics of each epoch, as the callbacks of Keras leave them."""


class TensorflowListener:
    """Receives arrays of numpy from operations that ``tensorflow_hooks`` has put into the training. One per process."""

    def __init__(self, out: Recorder) -> None:
        self._out = out
        self._micro = _empty()
        self._optimizers: list[dict[str, Any]] = []
        self._facts: dict[str, Any] = {}
        self._saves: list[str] = []
        self._updates: dict[int, int] = {}
        self._open: dict[int, dict[str, Any]] = {}
        self._last: dict[int, int] = {}
        self.seeds = ""
        """Seeds of the operations from which dropout draws, where no variables have their states."""

    def see_samples(self, *arrays: Any) -> None:
        """Note the samples of a pass: rows of the first array, and of others with as many."""
        count = len(arrays[0])
        total = sum(mixing.rows(array, place + 1) for place, array in enumerate(arrays) if len(array) == count)
        self._micro["samples"] += map(mixing.as_hex, np.atleast_1d(total))

    def see_targets(self, target: Any) -> None:
        """Note the targets of a loss."""
        self._micro["targets"] += map(mixing.as_hex, mixing.rows(target, 1))

    def see_loss(self, loss: Any) -> None:
        """Note the loss of a pass; the last one before a step counts."""
        self._micro["loss"] = float(loss)

    def describe(self, rule: str, shapes: dict[str, list[int]], dtypes: list[str], facts: dict[str, Any]) -> int:
        """Take another optimizer, and return its number."""
        self._facts = {**recorder.facts_of_process(), **facts}
        described = {"rule": rule, "groups": [list(shapes)], "shapes": shapes, "dtypes": dtypes}
        self._optimizers.append({**described, "sharded": False, "unseen": []})
        return len(self._optimizers) - 1

    def before_step(
        self,
        number: int,
        names: list[str],
        gradients: list[Any],
        weights: list[Any],
        options: dict[str, Any],
        states: list[Any],
    ) -> None:
        """Note the gradients that an optimizer is about to use, and the weights that it finds."""
        self._out.end_after(self._updates.get(number, 0))
        update = self._updates[number] = self._updates.get(number, 0) + 1
        begin = _measure(names, weights)
        if update == 1:
            self._out.describe({**self._facts, "optimizers": self._optimizers, "saves": self._saves})
            self._out.write(recorder.ARRAYS, {"update": 0, "optimizer": number, "weights": begin})
        micro, self._micro = self._micro, _empty()
        steps = options.pop("steps", None)
        self._open[number] = {
            "update": update,
            "optimizer": number,
            "rates": [options],
            "steps": steps,
            "rng": self._random(states) if self._out.is_detailed(update) else None,
            "weights_changed_outside": number in self._last
            and self._last[number] != mixing.digest_of_rows(begin.values()),
            "skipped": False,
            "micro_batches": [micro],
            "clip": None,
            "parts": {"gradients": _measure(names, gradients)} if self._out.is_full(update) else {},
        }

    def _random(self, states: list[Any]) -> str | None:
        if states:
            return _join(states)
        return hashlib.blake2b(self.seeds.encode(), digest_size=6).hexdigest() if self.seeds else None

    def after_step(self, number: int, names: list[str], weights: list[Any], moments: dict[str, Any]) -> None:
        """Write the update with the weights and moments that it has left."""
        record = self._open.pop(number)
        parts = record.pop("parts")
        left = _measure(names, weights)
        self._last[number] = mixing.digest_of_rows(left.values())
        if self._out.is_full(record["update"]):
            parts["weights"] = left
            if moments:
                parts["moments"] = _measure(list(moments), list(moments.values()))
        self._out.write_update(record, parts)

    def see_epoch(self, epoch: int, logs: dict[str, Any]) -> None:
        """Note the metrics of an epoch."""
        values = {name: float(value) for name, value in (logs or {}).items() if np.ndim(value) == 0}
        self._out.write(EPOCHS, {"epoch": epoch, "logs": values})

    def see_save(self, path: Any) -> None:
        """Note that this process writes a model or a checkpoint."""
        if len(self._saves) < 100:
            self._saves.append(str(path))
            if self._updates:
                self._out.describe({"saves": self._saves})


def _join(states: list[Any]) -> str:
    return hashlib.blake2b(b"".join(np.asarray(state).tobytes() for state in states), digest_size=6).hexdigest()


def _empty() -> dict[str, Any]:
    return {"loss": math.nan, "samples": [], "targets": [], "modes": None, "autocast": None}


def _measure(names: list[str], arrays: list[Any]) -> dict[str, Any]:
    """Return (digest, squared length, sketch) of each array, as lines of a trace hold them."""
    found = {}
    for name, array in zip(names, arrays):
        flat = np.asarray(array).reshape(-1).astype(np.float64)
        row = [float(f"{value:.7g}") for value in mixing.sketch(array, name)]
        found[name] = [mixing.as_hex(mixing.digest(array, name)), float(flat @ flat), row]
    return found
