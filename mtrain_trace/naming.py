"""Names of arrays as every framework is given them, so that digests of the same array agree."""

from __future__ import annotations


def common_front(names: list[str]) -> int:
    """Return the length of what all names begin with: a module that only holds the model, for its loss or its labels.

    Digests and sketches depend on names, so a model and the same model inside such a holder need the same ones.
    """
    cut = 0
    while names and all("." in name[cut:] for name in names) and len({name[cut:].split(".")[0] for name in names}) == 1:
        cut += names[0][cut:].index(".") + 1
    return cut
