"""Compare runs: their final metrics side by side, and the values of their specs that differ."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mtrain.records.wording import number
from mtrain.spec.schema import leaves
from mtrain_ui.pages.content import Content
from mtrain_ui.pages.folder import RunFiles
from mtrain_ui.pages.timeline import mapping_of, number_of

MAX_KEYS = 200
MAX_VALUE = 200
MAX_METRICS = 40


@dataclass(frozen=True, kw_only=True)
class SideBySide:
    """A table with a column for each run."""

    rows: Sequence[tuple[str, Sequence[str]]]
    left_out: int = 0


def final_metrics(contents: Mapping[str, Content]) -> SideBySide:
    """Return the metrics of the best evaluation of each run, those of single classes left out."""
    metrics = [mapping_of(content.best.get("metrics")) for content in contents.values()]
    numbers = {str(name): None for found in metrics for name, value in found.items() if number_of(value) is not None}
    # Metrics of single classes have a slash, and the score is one of the others again.
    names = [name for name in numbers if "/" not in name and name != "score"]
    rows = [(name[:100], [number(found.get(name)) for found in metrics]) for name in names]
    return SideBySide(rows=rows[:MAX_METRICS], left_out=max(0, len(rows) - MAX_METRICS))


def differing_keys(runs: Mapping[str, RunFiles]) -> SideBySide:
    """Return the values of the specs that are not the same in all runs."""
    specs = [
        {key: json.dumps(value, ensure_ascii=False) for key, value in leaves(run.json("spec.json"))}
        for run in runs.values()
    ]
    keys = sorted({key for spec in specs for key in spec})
    rows = [
        (key[:MAX_VALUE], [spec.get(key, "-")[:MAX_VALUE] for spec in specs])
        for key in keys
        if len({spec.get(key) for spec in specs}) > 1
    ]
    return SideBySide(rows=rows[:MAX_KEYS], left_out=max(0, len(rows) - MAX_KEYS))
