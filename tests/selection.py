"""Which of many like cases run in `make test`, and which only in `make test-all`.

The tests of models and engines run three times: under torch, under Paddle and under the older Paddle. A case that differs
from its neighbour in size only, or whose code touches no framework, is not worth three runs of every developer.
"""

from collections.abc import Callable, Collection, Iterable
from typing import Any

import pytest

under_torch = pytest.mark.under_torch
"""Mark of a test that `make test` runs under torch alone: `tests/conftest.py` makes it slow elsewhere."""


def quick(
    cases: Iterable[Any],
    everywhere: Collection[str],
    torch: Collection[str] = (),
    *,
    name: Callable[[Any], str] = str,
    unpack: bool = False,
) -> list[Any]:
    """Parameters of which ``everywhere`` run under every framework, ``torch`` under torch alone, the others are slow.

    ``name`` makes the id of a case; ``unpack``: a case holds the values of several arguments.
    """
    chosen = []
    for case in cases:
        marks: Any = () if name(case) in everywhere else under_torch if name(case) in torch else pytest.mark.slow
        chosen.append(pytest.param(*(case if unpack else [case]), marks=marks, id=name(case)))
    unknown = {*everywhere, *torch} - {parameter.id for parameter in chosen}
    assert not unknown, f"no such cases: {sorted(unknown)}"
    return chosen
