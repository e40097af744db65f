"""The files of a run folder that hold records, and JSON as mtrain writes it."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mtrain.spec import outputs

METRICS = "metrics.jsonl"
SUMMARY = "summary.json"
RESULTS = "results.png"
IMAGES = "val_batch.jpg"
"""Predictions of the last evaluation beside the truth, drawn when a job is done."""
INPUTS = "inputs.jpg"
"""Some training samples as the network receives them."""
DETAILS = "details.json"
"""Charts and matrices of the last evaluation: see ``core.interfaces.details``."""
LIVE = "live"
"""Folder with the newest metrics of each rank, see ``records/live.py``."""


def live_file(folder: Path, rank: int) -> Path:
    """Return the file with the newest metrics of one rank of the run in ``folder``."""
    return folder / LIVE / f"rank-{rank}.json"


def finite(value: Any) -> Any:
    """Convert ``value`` to what JSON can hold: non-finite numbers become null, numpy values plain ones, paths text."""
    kind = type(value)
    if kind is float:  # asked first, because records are mostly numbers
        return value if math.isfinite(value) else None
    if kind is int or kind is str:
        return value
    if kind is dict or isinstance(value, Mapping):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [finite(item) for item in value]
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if hasattr(value, "tolist"):
        return finite(value.tolist())
    return str(value)


def write_json(path: Path, value: Any) -> None:
    """Write ``value`` as JSON. The file is replaced in one step, so a reader sees either the old content or the new."""
    outputs.write_text(path, json_text(value))


def json_text(value: Any) -> str:
    """Return ``value``, converted by ``finite``, as the text of a JSON file."""
    return json.dumps(finite(value), indent=2, ensure_ascii=False) + "\n"
