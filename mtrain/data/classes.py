"""Choose, merge, rename and drop the classes of a data set, as ``data.classes`` says."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mtrain.errors import DataError, first_few
from mtrain.spec.suggest import closest

LEFT_OUT = -1
"""What becomes of the labels of a class that is left out."""
OTHERS = "*"
"""Key of a mapping that stands for every class which it does not name."""
_SHOWN = 20


@dataclass(frozen=True, slots=True, eq=False)
class ClassChoice:
    """The classes that a job learns, of those that a data set has."""

    names: tuple[str, ...]
    """Their names, in label order."""
    label_of: NDArray[np.int64]
    """(classes of the data set,) the label that each becomes, or ``LEFT_OUT``."""
    key: str = ""
    """Names the choice among all that this job makes, the same on every rank."""
    known: tuple[str, ...] = ()
    """The names that the data set has, in its own order."""

    @property
    def firsts(self) -> list[int]:
        """Return for each of the names the first class of the data set that becomes it."""
        return [int(np.flatnonzero(self.label_of == label)[0]) for label in range(len(self.names))]

    def describe(self, counts: Sequence[int] | None = None, *, unit: str = "") -> str:
        """Return a sentence on what the choice does; ``counts``: how many of ``unit`` each class of the data set had."""
        kept, gone = [], []
        for place, (old, label) in enumerate(zip(self.known, self.label_of.tolist(), strict=True)):
            count = "" if counts is None else f" ({counts[place]} {unit})"
            if label == LEFT_OUT:
                gone.append(f"{old}{count}")
            elif self.names[label] != old:
                kept.append(f"{old} counts as {self.names[label]}{count}")
        parts = [f"{len(self.names)} classes of {len(self.known)}", *_some(kept, ""), *_some(gone, "left out: ")]
        return f"data.classes: {'; '.join(parts)}"


def _some(texts: Sequence[str], start: str) -> list[str]:
    return [start + first_few(texts, _SHOWN)] if texts else []


def choose_classes(
    known: Sequence[str], asked: Sequence[str] | Mapping[str, str | None], *, key: str = ""
) -> ClassChoice:
    """Return the choice that ``data.classes`` describes.

    A list names the classes to learn, in label order; all others are left out. A mapping says what becomes of a class:
    another name, under which several classes become one, or None, which leaves it out. Classes that it does not mention stay,
    unless it says what becomes of ``*``.

    Args:
        known: The classes of the data set, in its own order.
        asked: ``data.classes``.
        key: See ``ClassChoice.key``.

    Raises:
        DataError: A class that is asked for is not in the data set, or none is left.
    """
    is_mapping = isinstance(asked, Mapping)
    _need_known([name for name in asked if not (is_mapping and name == OTHERS)], known)
    if isinstance(asked, Mapping):
        # With {mug: cup, "*": null} cups stay: their name is one that the mapping gives.
        given = {**{name: name for name in asked.values() if name is not None}, **asked}
        becomes = [given.get(name, asked.get(OTHERS, name)) for name in known]
        names = tuple(dict.fromkeys(name for name in becomes if name is not None))
    else:
        becomes = [name if name in asked else None for name in known]
        names = tuple(asked)
    if not names:
        raise DataError(f"data.classes: leaves none of the {len(known)} classes: {', '.join(known[:_SHOWN])}; keep one")
    labels = [LEFT_OUT if name is None else names.index(name) for name in becomes]
    return ClassChoice(names=names, label_of=np.array(labels, np.int64), key=key, known=tuple(known))


def _need_known(asked: Sequence[str], known: Sequence[str]) -> None:
    """Refuse names that the data set does not have.

    Raises:
        DataError: There are such names; each is listed.
    """
    unknown = [name for name in asked if name not in known]
    if unknown:
        near = [(name, closest(name, known)) for name in unknown[:_SHOWN]]
        lines = [f"  no class {name!r}" + (f"; did you mean {best!r}?" if best else "") for name, best in near]
        shown = f"{', '.join(known[:_SHOWN])}{', ...' if len(known) > _SHOWN else ''}"
        raise DataError("\n".join([f"data.classes: the data set has {len(known)} classes: {shown}", *lines]))
