"""Number the classes of images whose labels are words or numbers."""

import difflib
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from mtrain.data.reading import listed
from mtrain.errors import DataError


def number_classes(
    labels: Sequence[str], names: Sequence[str] | None, *, origin: Callable[[int], str]
) -> tuple[tuple[str, ...], NDArray[np.int64]]:
    """Return the class names in label order, and the number of each of ``labels``.

    Without ``names`` the classes are all labels that occur, in order. With ``names``, each label is one of them, or
    labels are whole numbers that count the names from 0.

    Args:
        labels: The label of each sample.
        names: ``data.names``.
        origin: Describes the place of a label by its position, for messages.

    Raises:
        DataError: a label is empty or not among ``names``; all of them are listed.
    """
    problems = [f"{origin(place)}: no label" for place, label in enumerate(labels) if not label]
    distinct = set(labels) - {""}
    are_numbers = bool(distinct) and all(label.isascii() and label.isdecimal() for label in distinct)
    if names is None:
        # Numbers by their value: in alphabetical order, 10 would come before 9.
        names = sorted(distinct, key=lambda label: (int(label), label)) if are_numbers else sorted(distinct)
        numbers = {name: number for number, name in enumerate(names)}
    # Unless one of the numbers is itself a name, as where the classes are called 1 to 10: then labels are names.
    elif are_numbers and not distinct & set(names):
        numbers = {label: int(label) for label in distinct if int(label) < len(names)}
    else:
        numbers = {name: number for number, name in enumerate(names)}
    problems += [
        f"{origin(place)}: class {label[:100]!r}{_meant(label, names)}"
        for place, label in enumerate(labels)
        if label and label not in numbers
    ]
    if problems:
        known = f"{', '.join(names[:20])}{', ...' if len(names) > 20 else ''}"
        raise DataError(
            f"{len(problems)} of {len(labels)} labels are not among the {len(names)} classes ({known}); correct them, or "
            f"data.names, or name all of them there and choose with data.classes:\n{listed(problems)}"
        )
    return tuple(names), np.array([numbers[label] for label in labels], dtype=np.int64)


def _meant(label: str, names: Sequence[str]) -> str:
    # difflib compares a label with every name, which takes long
    # where a file of a large set has wrong labels throughout.
    near = difflib.get_close_matches(label[:100], names, n=1, cutoff=0.6) if len(names) <= 1000 else []
    return f"; did you mean {near[0]!r}?" if near else ""
