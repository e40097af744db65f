"""Read the records of a job as ``mtrain_trace`` reads those of any training, so that the same code compares both."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from mtrain.core.interfaces import Recipe
from mtrain.core.update.recipe import ema_shares
from mtrain.errors import TrainingError
from mtrain.records.history import History, Record
from mtrain_trace import differences
from mtrain_trace.differences import BUFFERS, GRADIENT, MOMENTS, ORDER, SAMPLES, WEIGHTS
from mtrain_trace.reading import AVERAGE, ArrayRow, RequestedUpdates, Trace, Update

SCRIPT_LOSS = "loss"
"""Name under which a script's job reports the loss that it trains."""
WORDS = {**{what: what for what in ORDER}, GRADIENT: "gradient norm"}
"""Names of quantities for people: of the gradient, a job of mtrain records the length alone."""
DTYPES = {"fp64": "float64", "bf16": "float32, bfloat16"}
"""Formats in which a job computes, by its precision, where it is not float32."""
PARTS = {"weights": WEIGHTS, "buffers": BUFFERS, "ema": AVERAGE}
"""Names of parts by the first word of their names in the records; all others are moments."""


def ordinal(update: int) -> str:
    """Return an update in words, counted from 1 as displays count them; ``update`` counts from 0, as records do."""
    return f"update {update + 1}"


def trace_of(history: History, *, loss: str | None = None) -> Trace:
    """Return the trace of a finished job that was run with ``report.trace: state``.

    ``loss``: name of the trained loss among the values that a script reports, which are otherwise left out because they
    may be anything, such as times. None: all values are losses, and ``total`` is trained.

    Raises:
        TrainingError: the job's records contain no trace.
    """
    if "trace" not in history.start or not history.updates:
        raise TrainingError("the job left no trace: expected records of a job with report.trace: state")
    return read_records(history, loss=loss)


def read_records(history: History, *, loss: str | None = None, folder: Path = Path()) -> Trace:
    """Return what the records of a job hold, with or without the state after each update; ``loss``: see ``trace_of``."""
    first = history.start.get("trace", {})
    models = list(first.get("models", ()))
    records = [history.updates[number] for number in sorted(history.updates)]
    start = _pieces(first, models)
    names = [list(group) for group in first.get("names", ())]
    dtypes = [DTYPES.get(history.start.get("precision", ""), "float32")]
    optimizer = {"rule": "?", "groups": names, "shapes": {}, "dtypes": dtypes, "sharded": False, "unseen": []}
    return Trace(
        folder=folder,
        processes=[{"rank": 0, "ranks": 1, "folder": folder, "optimizers": [optimizer]}],
        updates=[_update(record, loss, models) for record in records],
        start=start.get(WEIGHTS, {}),
        before=start,
        start_agrees=first.get("ranks_agree", True),
        measured=dict.fromkeys((SAMPLES, MOMENTS, BUFFERS, AVERAGE), "mtrain"),
        models=models,
    )


def with_recipe(trace: Trace, recipe: Recipe, *, ranks: int) -> Trace:
    """Return a trace that also holds what was asked of its updates."""
    options = [dict(group) for _, group in recipe.groups]
    process = trace.processes[0]
    held = process["optimizers"][0]["groups"]
    count = len(trace.updates[0].rates) if trace.updates else 0
    groups = [[group_name(place, trace.models), *(held[place] if place < len(held) else [])] for place in range(count)]
    updates = []
    for update in trace.updates:
        asked = [options[place] if place < len(options) else {} for place in range(len(update.rates))]
        rates = [
            {**group, **{key: value for key, value in own.items() if key == "lr" or key in group}}
            for group, own in zip(asked, update.rates, strict=True)
        ]
        for group in rates:
            if "beta1" in group:  # as torch names them, so that they are compared with those of a script
                group["betas"] = [group.pop("beta1"), group.pop("beta2")]
        updates.append(replace(update, rates=rates, rank_rates=[rates], groups=groups, micro_batches=recipe.accumulate))
    keep = [ema_shares(recipe, number + 1)[0] for number in range(len(updates))] if recipe.ema_decay else []
    described = {**process["optimizers"][0], "rule": recipe.rule}
    return replace(
        trace,
        processes=[{**process, "ranks": ranks, "optimizers": [described]}],
        updates=updates,
        asked=RequestedUpdates(recipe.clip_norm, keep),
    )


def group_name(place: int, models: Sequence[str]) -> str:
    """Return how sentences name a parameter group, which has a model where there are several."""
    return f"group {place}" + (f" of {models[place]}" if place < len(models) and models[place] else "")


def columns(trace: Trace) -> dict[str, Any]:
    """Return losses, norms, samples and digests of all updates, for ``compare.json``."""
    names = trace.updates[0].loss_parts if trace.updates else {}
    states = [trace.before, *(update.arrays for update in trace.updates)]
    digests: dict[str, list[str]] = {}
    for state in states:
        for part, rows in state.items():
            for name, row in rows.items():
                digests.setdefault(f"{part}/{name}", []).append(f"{row.digest:016x}")
    return {
        "losses": {name: [update.loss_parts.get(name, math.nan) for update in trace.updates] for name in names},
        "norms": [update.norm_before for update in trace.updates],
        "samples": [next(iter(update.samples), "") for update in trace.updates],
        "digests": digests,
    }


def _update(record: Record, loss: str | None, models: Sequence[str]) -> Update:
    whole, parts = _losses(record, loss)
    # Without `report.trace: state` a record has losses, rates and norms alone.
    looked = record.get("trace", {})
    arrays = _pieces(looked, models)
    totals = {part: differences.total(rows) for part, rows in arrays.items()}
    momentum = {} if record.get("momentum") is None else {"momentum": record["momentum"], "beta1": record["momentum"]}
    each = record.get("models", {})
    return Update(
        record["update"] + 1,
        samples=Counter([looked["samples"]] if "samples" in looked else []),
        losses=[whole],
        loss_parts=parts,
        rates=[{"lr": rate, **momentum} for rate in record["learning_rates"]],
        parts={part: row for part, row in totals.items() if row is not None},
        ranks_agree={"weights": looked["ranks_agree"]} if "ranks_agree" in looked else {},
        arrays=arrays,
        told_norm=_number(_norm(record)),
        model_norms={name: _number(facts["gradient_norm"]) for name, facts in each.items()},
        decided=list(looked.get("decided", ())),
        trained=frozenset(name for name, facts in each.items() if facts["updated"]) if each else None,
    )


def _pieces(looked: Mapping[str, Any], models: Sequence[str]) -> dict[str, dict[str, ArrayRow]]:
    """Return the rows of what a job has looked at, by part and name."""
    found: dict[str, dict[str, ArrayRow]] = {}
    for whole, digest in looked.get("digests", {}).items():
        head, _, rest = whole.partition("/")
        part, sketch = PARTS.get(head, MOMENTS), [float(x) for x in looked["sketches"][whole]]
        name = group_name(int(rest), models) if part in (MOMENTS, WEIGHTS) else rest or "all"
        name = f"{head}/{name}" if part == MOMENTS else name
        found.setdefault(part, {})[name] = ArrayRow(int(digest, 16), float(np.linalg.norm(sketch)), sketch)
    return found


def _losses(record: Mapping[str, Any], loss: str | None) -> tuple[float, dict[str, float]]:
    """Return the whole loss and the losses by name; of several models that of each, and their sum as ``total``."""
    losses = {name: _number(value) for name, value in record["losses"].items()}
    if loss is None:
        return losses.get("total", math.nan), losses
    if "models" not in record:
        return losses.get(loss, math.nan), {"total": losses.get(loss, math.nan)}
    # A model that an update leaves out has no loss in its record.
    each = {name: losses.get(name, 0.0) for name in (f"{loss}_{model}" for model in record["models"])}
    whole = sum(each.values())
    return whole, {"total": whole, **each}


def _norm(record: Mapping[str, Any]) -> float | None:
    """Return the norm of an update's gradient, over all models that it has trained."""
    norms = [facts["gradient_norm"] for facts in record.get("models", {}).values() if facts["updated"]]
    # Of one model that of the record, which is there although the model may have no name.
    if len(norms) < 2:
        return record["gradient_norm"]  # type: ignore[no-any-return]
    return None if None in norms else math.hypot(*norms)


def _number(value: float | None) -> float:
    """Convert a value of a record; one that was not finite is NaN."""
    return math.nan if value is None else float(value)
