"""The request for a comparison, and the parser of ``--backends``."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from mtrain.compare.profiles import PROFILES, Profile
from mtrain.errors import UsageError
from mtrain.spec.config import Source
from mtrain.spec.yaml_reader import parse_value
from mtrain.system import runfolder


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
class CompareRequest:
    """A request to train one spec, or to run one script, on several backends."""

    backends: str
    """The backends with their options, the reference first: ``ddp,deepspeed:stage=3``."""
    config: Source = None
    overrides: Sequence[str] = ()
    """``PATH=VALUE`` settings of the spec."""
    updates: int = 50
    ranks: int = 2
    """Ranks of the backends that can have several."""
    profile: str = "float32"
    """Name of the bounds within which backends agree."""
    rounds: int = 1
    """Number of timed trainings of each backend; 0: the compared jobs are timed."""
    apart: bool = False
    """Whether each timed training is a job of its own; otherwise the traced job of its backend does it first."""
    out: Path | None = None
    """Folder of the jobs and the report; None: the next free ``runs/compare``."""
    script: Path | None = None
    """The user's script to run; None: the spec is trained."""
    arguments: Sequence[str] = ()
    """Arguments of the script."""
    tell: Callable[[str], None] = lambda text: None
    """Receives one line at a time about the progress."""

    @cached_property
    def folder(self) -> Path:
        """Return the folder of the jobs and the report; the name of a new one is chosen once."""
        return self.out or runfolder.next_name(Path("runs"), "compare")

    @cached_property
    def variants(self) -> list[Variant]:
        """Return the entries of ``backends``.

        Raises:
            UsageError: an entry is malformed, or occurs twice, or there is one alone.
        """
        variants = parse_variants(self.backends)
        if len(variants) < 2:
            raise UsageError(
                f"--backends {self.backends}: a comparison needs two backends or more; expected the reference and others, such as "
                "ddp,horovod,deepspeed:stage=3"
            )
        return variants

    @property
    def bounds(self) -> Profile:
        """Return the bounds within which backends agree."""
        return PROFILES[self.profile]


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
            # An option of a backend has a plain name, so a dot makes it a path of the spec.
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
