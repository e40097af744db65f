"""The settings of a comparison, and the parser of ``--backends``."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mtrain.errors import UsageError
from mtrain.spec.config import Source
from mtrain.spec.yaml_reader import parse_value
from mtrain.studies.compare.profiles import Profile


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """One entry of ``--backends``."""

    label: str
    name: str
    options: Mapping[str, Any]
    overrides: Sequence[str] = ()
    """``PATH=VALUE`` settings of the spec, for this backend alone."""

    @property
    def folder(self) -> str:
        """Return the label in a form that suits the name of a run folder."""
        return re.sub(r"[^\w.=-]+", "-", self.label)


@dataclass(frozen=True, kw_only=True)
class Order:
    """The settings of a comparison."""

    config: Source
    overrides: Sequence[str]
    variants: Sequence[Variant]
    updates: int
    ranks: int
    profile: Profile
    rounds: int
    """Number of timed trainings of each backend."""
    out: Path
    tell: Callable[[str], None]
    """Receives one line at a time about the progress."""
    script: Path | None = None
    """The user's script that the jobs run; None: they train a spec."""
    arguments: Sequence[str] = ()
    """Arguments of the script."""
    apart: bool = False
    """Whether each timed training is a job of its own; otherwise the traced job of its backend does it first."""


def parse_variants(text: str) -> list[Variant]:
    """Parse the value of ``--backends``, such as
    ``ddp,deepspeed:stage=3,solo:framework=paddle:train.channels_last=false``.

    Raises:
        UsageError: an entry is malformed, or occurs twice.
    """
    variants: list[Variant] = []
    for entry in filter(None, (part.strip() for part in text.split(","))):
        name, *settings = entry.split(":")
        options, overrides = {}, []
        for setting in settings:
            key, sign, value = setting.partition("=")
            if not sign or not key:
                raise UsageError(
                    f"--backends {entry}: {setting!r} given, expected KEY=VALUE, for example deepspeed:stage=3"
                )
            if "." in key:
                overrides.append(setting)
                continue
            try:
                options[key] = parse_value(value)
            except ValueError as error:
                raise UsageError(
                    f"--backends {entry}: {key}: {error}; a value there has no comma and no colon"
                ) from error
        variants.append(Variant(label=entry, name=name, options=options, overrides=overrides))
    labels = [variant.label for variant in variants]
    duplicates = sorted({label for label in labels if labels.count(label) > 1})
    if duplicates or not variants:
        problem = f"{', '.join(duplicates)} is given twice" if duplicates else "names no backend"
        raise UsageError(f"--backends {text}: {problem}; expected for example ddp,horovod,deepspeed:stage=3")
    return variants
