"""Find which of several differences between two settings of one script makes its training part.

Settings are words as on a command line: ``NAME=VALUE`` in front are variables of the environment, all further ones are
flags with their values. What differs between the two settings is taken over from the first to the second step by step.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Callable

from mtrain_trace import causes, comparing, reading, running
from mtrain_trace.comparing import Comparison
from mtrain_trace.reading import TraceError

_ASSIGNMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=")
PLACE = "{}"
"""Word of the command that stands for the flags; without it they come last."""


@dataclass(frozen=True)
class Choice:
    """One thing that the settings may differ in: a variable, or a flag with its values."""

    name: str
    words: tuple[str, ...]
    variable: bool

    def __str__(self) -> str:
        return shlex.join(self.words) if not self.variable else f"{self.name}={self.words[0]}"


def parse(text: str) -> dict[str, Choice]:
    """Return the choices of a setting by name, in their order.

    Raises:
        TraceError: a value stands before any flag, or a name occurs twice.
    """
    found: dict[str, Choice] = {}
    for word in shlex.split(text):
        last = next(reversed(found.values()), None)
        if _ASSIGNMENT.match(word) and (last is None or last.variable):
            name, _, value = word.partition("=")
            choice = Choice(name, (value,), variable=True)
        elif word.startswith("-") and not re.fullmatch(r"-[0-9.][0-9.eE+-]*", word):
            choice = Choice(word.partition("=")[0], (word,), variable=False)
        elif last is not None and not last.variable:
            found[last.name] = Choice(last.name, (*last.words, word), variable=False)
            continue
        else:
            raise TraceError(
                f"{text!r}: {word!r} is neither NAME=VALUE nor a flag, such as: --a 'OMP_NUM_THREADS=1 --lr 0.1'"
            )
        if choice.name in found:
            raise TraceError(f"{text!r}: {choice.name} occurs twice; write all its values once")
        found[choice.name] = choice
    return found


@dataclass
class Bisection:
    """What was found: the differences that matter, each with the comparison that shows it."""

    differences: list[str]
    culprits: list[tuple[str, Comparison]] = field(default_factory=list)
    starts: int = 0


class Bisector:
    """Runs a command under mixtures of two settings, and compares each with the first one.

    Args:
        command: the words of the command.
        a: the setting that counts as right.
        b: the setting whose training parts.
        out: folder for the traces and logs.
        settings: what is recorded.
        bits: whether rounding counts as parting.
        tell: receives one line about each start.
    """

    def __init__(
        self,
        command: Sequence[str],
        settings: tuple[str, str],
        *,
        out: Path,
        record: running.RecordingSettings,
        bits: bool,
        tell: Callable[[str], None],
    ) -> None:
        self._command, self._out, self._record, self._bits, self._tell = command, out, record, bits, tell
        self._a, self._b = parse(settings[0]), parse(settings[1])
        self.names = [name for name in {**self._a, **self._b} if self._a.get(name) != self._b.get(name)]
        if not self.names:
            raise TraceError(f"both settings are the same: {settings[0]!r}")
        self._compared: dict[frozenset[str], Comparison | None] = {}
        self._reference: reading.Trace | None = None

    def find(self) -> Bisection:
        """Return the differences by which the trainings part, those first that part them alone.

        Raises:
            TraceError: a start left no trace.
        """
        result = Bisection([self._describe(name) for name in self.names])
        left = list(self.names)
        while left and self._parts(left) is not None:
            name = self._smallest_prefix(left)
            alone = self._parts([name])
            together = [*left[: left.index(name)], name]
            shown = alone if alone is not None else self._parts(together)
            words = self._describe(name)
            if alone is None:
                words += f", together with {', '.join(self._describe(other) for other in together[:-1])}"
            if shown is not None:
                result.culprits.append((words, shown))
            left.remove(name)
        result.starts = len(self._compared) + 1
        return result

    def _smallest_prefix(self, names: list[str]) -> str:
        """Return the last of the fewest first names that part the trainings when they are taken over."""
        low, high = 0, len(names)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self._parts(names[:middle]) is not None else (middle, high)
        return names[high - 1]

    def _parts(self, names: Sequence[str]) -> Comparison | None:
        """Return how the training parts when the named differences are taken over; None where it does not."""
        key = frozenset(names)
        if key not in self._compared:
            if self._reference is None:
                self._reference = self._train("a", frozenset())
            folder = "b" if len(key) == len(self.names) else "-".join(["a", *(name.strip("-") for name in names)])
            result = comparing.compare(self._reference, self._train(folder, key))
            result.sentences = causes.explain(result)
            parted = result.parting is not None or (self._bits and result.verdict != "same bits")
            self._compared[key] = result if parted else None
            taken = ", ".join(self._describe(name) for name in names)
            self._tell(f"{'different' if parted else 'the same'}: {taken}")
        return self._compared[key]

    def _train(self, folder: str, taken: frozenset[str]) -> reading.Trace:
        """Run the command under the first setting, but for the differences that are taken over."""
        chosen = {**self._a, **self._b}
        for name in self.names:
            source = self._b if name in taken else self._a
            if name in source:
                chosen[name] = source[name]
            else:
                del chosen[name]
        flags = [word for choice in chosen.values() if not choice.variable for word in choice.words]
        command = [part for word in self._command for part in (flags if word == PLACE else [word])]
        command += [] if PLACE in self._command else flags
        variables = {choice.name: choice.words[0] for choice in chosen.values() if choice.variable}
        out = self._out / re.sub(r"[^\w.=-]+", "-", folder)
        self._out.mkdir(parents=True, exist_ok=True)
        with (self._out / f"{out.name}.log").open("w") as log:
            status = running.run(command, out, self._record, variables=variables, log=log)
        if not out.is_dir():
            raise TraceError(f"nothing was recorded of {shlex.join(command)} (exit code {status}); see {log.name}")
        return reading.read(out)

    def _describe(self, name: str) -> str:
        a, b = self._a.get(name), self._b.get(name)
        return f"{a or f'no {name}'} -> {b or f'no {name}'}"
