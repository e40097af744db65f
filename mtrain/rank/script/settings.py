"""The spec of a script's job: what the user of ``mtrain run`` has set, joined with what the script says."""

import inspect
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mtrain.core.samples.sampler import Shares
from mtrain.errors import ScriptError, SpecError
from mtrain.rank.script.native import is_native
from mtrain.spec import config

SECTIONS = ("train", "optimizer", "schedule")
"""Sections of a spec that a script may set, too."""
SHARED_SETTINGS = ("train.accumulate", "train.precision", "train.seed")
"""Settings that are equal for all models of a session."""
PLAIN = "_base_/script.yml"
"""The shipped file with the values that neither the user nor the script sets: those of a plain training loop."""


def plain_values() -> tuple[dict[str, Any], set[str | None]]:
    """Return what the config ``PLAIN`` sets, by dotted path of two words, and the file as origins name it."""
    loaded = config.load(PLAIN, environ={})
    paths = sorted({tuple(path.split(".")[:2]) for path in loaded.provenance if "." in path})
    values = {f"{section}.{key}": loaded.values[section][key] for section, key in paths if section in SECTIONS}
    return values, {origin.file for origin in loaded.provenance.values()}


def describe_script(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a spec as files of a script's run hold it: without the model and data set of the defaults, which it does not use."""
    data = {key: value for key, value in (values.get("data") or {}).items() if key != "format"}
    return {**{key: value for key, value in values.items() if key != "model"}, "data": data}


LENGTHS = {"train.epochs": "train.updates", "train.updates": "train.epochs"}
"""The two ways to say how long a job trains; each one takes the place of the other."""


def is_set(path: str, outside_paths: Iterable[str]) -> bool:
    """Return whether one of ``outside_paths`` is the value at ``path``, or a part of it."""
    return any(name == path or name.startswith(f"{path}.") for name in outside_paths)


def change_values(
    spec: Any, changes: Mapping[str, Any], *, outside_paths: Iterable[str] = (), call: str = "mtrain.session"
) -> Any:
    """Return ``spec`` with values replaced by dotted path; ``call`` is named in messages.

    Raises:
        ScriptError: a value is outside its range, or contradicts one at ``outside_paths``, which the user of
            ``mtrain run`` has set; neither silently wins over the other.
    """
    values = spec.model_dump(mode="json")
    for path, value in changes.items():
        *sections, key = path.split(".")
        _at(values, sections)[key] = value
    try:
        result = config.from_json(json.dumps(values), name=f"{call}:")
    except SpecError as error:
        raise ScriptError(str(error)) from error
    # Neither silently wins over the other: the script would train something else than its user has asked for, or than it says.
    # Validated values are compared, because one value may be written in several ways.
    before, after = spec.model_dump(mode="json"), result.model_dump(mode="json")
    for path in changes:
        old, new = _at(before, path.split(".")), _at(after, path.split("."))
        if old != new and is_set(path, outside_paths):
            # A length of the other kind empties this one, and only that is in the script.
            other = LENGTHS.get(path) if new is None else None
            said = f"{other} to {changes[other]!r} in place of {path}" if other else f"{path} to {new!r}"
            keyword = (other or path).rpartition(".")[2]
            raise ScriptError(
                f"{call} sets {said}, but this job was started with {path} {old!r}; start it without {path}, or leave "
                f"{keyword}= out of the script"
            )
    return result


def _at(values: Any, keys: Sequence[str]) -> Any:
    for key in keys:
        values = values[key]
    return values


def changes_of(request: Any) -> dict[str, Any]:
    """Return the values of the spec, by dotted path, that a ``ModelRequest`` sets, the arguments of ``Session.prepare``.

    Raises:
        ScriptError: an argument is of another type than expected.
    """
    changes: dict[str, Any] = {}
    if (rule := request.optimizer) is not None:
        if is_native(rule):
            # One group with the factor 1: the native optimizer has groups of its own.
            changes["optimizer.groups"] = [{"match": ""}]
        elif hasattr(rule, "section"):
            changes |= {f"optimizer.{key}": value for key, value in rule.section().items()}
        else:
            raise ScriptError(
                f"session.prepare: optimizer is a {rule.__name__ if inspect.isclass(rule) else type(rule).__name__}; expected a "
                "rule such as mtrain.AdamW(learning_rate=1e-3), whose arithmetic is the same on every backend, or a function from the "
                "model to an optimizer, lambda model: torch.optim.SGD(model.parameters(), lr=0.1)"
            )
    if (curve := request.schedule) is not None:
        if hasattr(curve, "section"):
            changes |= {f"schedule.{key}": value for key, value in curve.section().items()}
        elif not callable(curve) or inspect.isclass(curve):
            raise ScriptError(
                f"session.prepare: schedule is a {type(curve).__name__}; expected a curve such as mtrain.Cosine(), or a function "
                "from the number of the update to the learning rate"
            )
    simple = ("clip_norm", "accumulate", "precision", "sync_batchnorm", "seed")
    changes |= {f"train.{name}": value for name in simple if (value := getattr(request, name)) is not None}
    if request.freeze is not None:
        changes["train.freeze"] = list(request.freeze)
    if request.ema is not None:
        given = request.ema if isinstance(request.ema, Mapping) else {"decay": request.ema}
        changes["train.ema"] = {"ramp": 0.0, "rule": "ramp", **given} if request.ema else None
    return changes


def loop_changes(
    *, global_batch: int | None, epochs: int | None, updates: int | None, outside_paths: frozenset[str]
) -> dict[str, Any]:
    """Return the values of the spec, by dotted path, that the length and batch of ``Session.batches`` set.

    Raises:
        ScriptError: two lengths are given, or nobody has given a batch.
    """
    if epochs is not None and updates is not None:
        raise ScriptError("session.batches: epochs and updates are both given; keep one")
    if global_batch is None and "train.batch_size" not in outside_paths:
        raise ScriptError("session.batches: no global_batch given; say how many samples an update takes over all ranks")
    changes: dict[str, Any] = {}
    if global_batch is not None:
        changes["train.batch_size"] = global_batch
    if epochs is not None:
        changes |= {"train.epochs": epochs, "train.updates": None}
    if updates is not None:
        changes |= {"train.updates": updates, "train.epochs": None}
    return changes


def check_loop(spec: Any, shares: Shares, *, divides: bool) -> None:
    """Refuse a loop without a length, or whose batch does not divide into the shards of its updates.

    ``divides``: it must; else shards differ in length by one sample.

    Raises:
        ScriptError: it is so; the message says what to give.
    """
    train = spec.train
    if train.epochs is None and train.updates is None:
        raise ScriptError("session.batches: no length given; say epochs=10 or updates=1000")
    parts = shares.shards * shares.rounds
    if divides and train.batch_size % parts:
        among = f"{shares.shards} {'ranks' if shares.shards == shares.size else 'shards'}"
        raise ScriptError(
            f"session.batches: global_batch={train.batch_size} does not divide among {among} x {shares.rounds} micro "
            f"batches; use a multiple of {parts}"
        )
