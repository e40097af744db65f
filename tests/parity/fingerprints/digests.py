"""The fingerprint of a finished run, and what differs between two of them."""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from safetensors.numpy import load_file

from mtrain.core.state.digest import digest
from tests.parity import jobs

FIELDS = {
    **{name: name for name in ("update", "epoch", "position", "losses", "momentum")},
    "gradient_norm": "norm",
    "learning_rates": "rates",
    "skipped_updates": "skipped",
}
"""Fields of the record of an update that follow from the spec -> their names in commits before the field's words; the
others hold times and memory."""
STATE_FIELDS = ("progress", "counters")
"""Fields of a checkpoint's ``state.json`` that the next update depends on."""
SHOWN_ARRAYS = 3
"""Names of arrays that are listed for one part of the checkpoint."""


@dataclass(frozen=True, kw_only=True)
class Fingerprint:
    """Everything that one job has computed, down to the last bit."""

    series: Mapping[str, Sequence[str]]
    """Field of the records -> its value at each update; numbers are exact, as ``float.hex`` writes them."""
    arrays: Mapping[str, Mapping[str, str]]
    """Part of the last checkpoint -> name of an array -> SHA-256 over its name, type, shape and bytes."""
    state: Mapping[str, Any]
    """Progress and counters of the last checkpoint."""
    run: Path | None = field(default=None, compare=False)
    """Its run folder while that still exists."""

    def digests(self) -> dict[str, str]:
        """One SHA-256 for the records and one for each part of the checkpoint."""
        return {"records": _sha256(self.series), **{part: _sha256(names) for part, names in self.arrays.items()}}

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        values = asdict(self)
        del values["run"]
        return {"digests": self.digests(), **values}

    @cached_property
    def checkpoint(self) -> dict[str, dict[str, jobs.Array]]:
        """The arrays themselves, by part; empty once the run folder is gone."""
        return {} if self.run is None else _arrays(self.run)


def fingerprint(run: Path) -> Fingerprint:
    """Read the fingerprint of the finished job in ``run``."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text("utf-8").splitlines()]
    series: dict[str, list[str]] = {}
    for row in rows:
        if row["kind"] == "update":
            for name, value in _leaves(
                {key: row[name] for key, former in FIELDS.items() for name in (key, former) if name in row}
            ):
                series.setdefault(name, []).append(value)
    state = json.loads((_last_checkpoint(run) / "state.json").read_text("utf-8"))
    return Fingerprint(
        series=series,
        arrays={
            part: {name: digest({name: array}) for name, array in sorted(arrays.items())}
            for part, arrays in _arrays(run).items()
        },
        state={key: state[key] for key in STATE_FIELDS if key in state},
        run=run,
    )


def differences(before: Fingerprint, after: Fingerprint) -> list[str]:
    """One line for each thing that differs; none where every bit is the same."""
    lines = [
        line
        for name in _union(before.series, after.series)
        for line in _series_difference(name, before.series.get(name), after.series.get(name))
    ]
    for part in _union(before.arrays, after.arrays):
        lines += _array_differences(part, before, after)
    for key in _union(before.state, after.state):
        if before.state.get(key) != after.state.get(key):
            lines.append(f"{key} of state.json: {before.state.get(key)} before, {after.state.get(key)} after")
    return lines


def _series_difference(name: str, before: Sequence[str] | None, after: Sequence[str] | None) -> Iterator[str]:
    if before is None or after is None:
        yield f"{name}: recorded only {'after' if before is None else 'before'}"
        return
    if len(before) != len(after):
        yield f"{name}: {len(before)} updates before, {len(after)} after"
    pairs = list(zip(before, after, strict=False))
    places = [place for place, (a, b) in enumerate(pairs) if a != b]
    if places:
        a, b = pairs[places[0]]
        largest = max(_relative(*pairs[place]) for place in places)
        yield (
            f"{name}: differs in {len(places)} of {len(pairs)} updates, first in update {places[0] + 1}: "
            f"{_readable(a)} before, {_readable(b)} after; largest relative difference {largest:.1e}"
        )


def _array_differences(part: str, before: Fingerprint, after: Fingerprint) -> Iterator[str]:
    ours, theirs = before.arrays.get(part, {}), after.arrays.get(part, {})
    for when, names in (("before", ours.keys() - theirs.keys()), ("after", theirs.keys() - ours.keys())):
        if names:
            yield f"{part}: {len(names)} arrays only {when}: {_listed(sorted(names))}"
    changed = [name for name, value in ours.items() if theirs.get(name, value) != value]
    if not changed:
        return
    text = f"{part}: {len(changed)} of {len(ours)} arrays differ: {_listed(changed)}"
    if before.run is None or after.run is None:
        yield text
        return
    sizes = {name: _array_relative(before.checkpoint[part][name], after.checkpoint[part][name]) for name in changed}
    worst = max(sizes, key=lambda name: sizes[name])
    yield f"{text}; largest relative difference {sizes[worst]:.1e}, in {worst}"


def _array_relative(before: jobs.Array, after: jobs.Array) -> float:
    return jobs.relative(before, after) if before.shape == after.shape else float("inf")


def _relative(before: str, after: str) -> float:
    try:
        a, b = float.fromhex(before), float.fromhex(after)
    except ValueError:  # one of them is no number
        return float("inf")
    size = abs(a - b) / max(abs(a), 1e-12)
    return float("inf") if size != size else size


def _readable(value: str) -> str:
    try:
        return f"{float.fromhex(value)!r} ({value})"
    except ValueError:
        return value


def _listed(names: Sequence[str]) -> str:
    more = len(names) - SHOWN_ARRAYS
    return ", ".join(names[:SHOWN_ARRAYS]) + (f" and {more} more" if more > 0 else "")


def _union(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    return list(dict.fromkeys([*before, *after]))


def _leaves(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Every number in a record as (dotted name, exact text)."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _leaves(inner, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list):
        for place, inner in enumerate(value):
            yield from _leaves(inner, f"{name}.{place}")
    else:
        yield name, float(value).hex() if isinstance(value, int | float) else str(value)


def _last_checkpoint(run: Path) -> Path:
    return sorted((run / "checkpoints").glob("step-*"))[-1]


def _arrays(run: Path) -> dict[str, dict[str, jobs.Array]]:
    folder = _last_checkpoint(run)
    return {part: load_file(folder / name) for part, name in jobs.PARTS.items() if (folder / name).exists()}


def _sha256(values: Any) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
