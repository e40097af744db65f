"""The spec of a script's job: what the user of ``mtrain run`` has set, joined with what the script says."""

import inspect
import json
from collections.abc import Mapping
from typing import Any

from mtrain.errors import ScriptError, SpecError
from mtrain.spec import config

SECTIONS = ("train", "optimizer", "schedule")
"""Sections of a spec that a script may set, too."""
PLAIN = "_base_/script.yml"
"""The shipped file with the values that neither the user nor the script sets: those of a plain training loop."""


def plain_values() -> dict[str, Any]:
    """Return what the config ``PLAIN`` sets, by dotted path of two words."""
    loaded = config.load(PLAIN, environ={})
    paths = sorted({tuple(path.split(".")[:2]) for path in loaded.provenance if "." in path})
    return {f"{section}.{key}": loaded.values[section][key] for section, key in paths if section in SECTIONS}


def changed(spec: Any, changes: Mapping[str, Any], *, call: str = "mtrain.session") -> Any:
    """Return ``spec`` with values replaced by dotted path; ``call`` is named in messages.

    Raises:
        ScriptError: a value is outside its range.
    """
    values = spec.model_dump(mode="json")
    for path, value in changes.items():
        *sections, key = path.split(".")
        place = values
        for section in sections:
            place = place[section]
        place[key] = value
    try:
        return config.from_json(json.dumps(values), name=f"{call}:")
    except SpecError as error:
        raise ScriptError(str(error)) from error


def refuse_contradictions(spec: Any, outside_paths: frozenset[str], changes: Mapping[str, Any], *, call: str) -> None:
    """Refuse values of the script that contradict those that the user of ``mtrain run`` has set.

    Raises:
        ScriptError: there is one; neither silently wins over the other.
    """
    former = spec.model_dump(mode="json")
    for path, value in changes.items():
        present = former
        for key in path.split("."):
            present = present[key]
        if any(name == path or name.startswith(f"{path}.") for name in outside_paths) and present != value:
            raise ScriptError(
                f"{call} sets {path} to {value!r}, but this job was started with {path} {present!r}; leave one of them out"
            )


def changes_of(**arguments: Any) -> dict[str, Any]:
    """Return the values of the spec, by dotted path, that the arguments of ``Session.prepare`` set.

    Raises:
        ScriptError: an argument is of another type than expected.
    """
    changes: dict[str, Any] = {}
    if (rule := arguments["optimizer"]) is not None:
        if not hasattr(rule, "section"):
            raise ScriptError(
                f"session.prepare: optimizer is a {type(rule).__name__}; expected a rule such as mtrain.AdamW(rate=1e-3), whose "
                "arithmetic is the same on every backend"
            )
        changes |= {f"optimizer.{key}": value for key, value in rule.section().items()}
    if (curve := arguments["schedule"]) is not None:
        if hasattr(curve, "section"):
            changes |= {f"schedule.{key}": value for key, value in curve.section().items()}
        elif not callable(curve) or inspect.isclass(curve):
            raise ScriptError(
                f"session.prepare: schedule is a {type(curve).__name__}; expected a curve such as mtrain.Cosine(), or a function "
                "from the number of the update to the rate"
            )
    simple = {"clip_norm": "train.clip_norm", "accumulate": "train.accumulate", "precision": "train.precision",
              "sync_batchnorm": "train.sync_batchnorm"}  # fmt: skip
    changes |= {path: arguments[name] for name, path in simple.items() if arguments[name] is not None}
    if arguments["freeze"] is not None:
        changes["train.freeze"] = list(arguments["freeze"])
    if arguments["ema"] is not None:
        changes["train.ema"] = {"decay": arguments["ema"], "ramp": 0.0, "rule": "ramp"} if arguments["ema"] else None
    return changes
