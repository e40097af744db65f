"""Ranks whose library adds up wrongly are refused before they train."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mtrain.core.ranks.arithmetic import check_arithmetic
from mtrain.errors import LaunchError

SIZE = 3
BACKEND: Any = SimpleNamespace(ops=SimpleNamespace(to_numpy=np.asarray))
Fault = Callable[[str, np.ndarray, np.ndarray], np.ndarray]


def session(*, size: int = SIZE, fault: Fault = lambda op, given, right: right, ranks: list[int] | None = None) -> Any:
    """The session of rank 0, where the others give zeros."""

    def all_reduce(x: np.ndarray, op: str) -> np.ndarray:
        return fault(op, x, x / size if op == "mean" else x.copy())

    collective = SimpleNamespace(
        rank=0, size=size, all_reduce=all_reduce, all_gather=lambda value: list(range(size)) if ranks is None else ranks
    )
    return SimpleNamespace(collective=collective, batches=iter)


def test_ranks_that_add_up_rightly_pass() -> None:
    check_arithmetic(session(), backend=BACKEND, name="any")


@pytest.mark.parametrize(
    ("wrong_op", "wrong"),
    [("mean", lambda x: x), ("sum", lambda x: x / SIZE), ("max", lambda x: x * 0), ("mean", lambda x: x * np.nan)],
)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_wrong_result_of_one_type_is_refused(wrong_op: str, wrong: Callable[[Any], Any], dtype: type) -> None:
    def fault(op: str, given: np.ndarray, right: np.ndarray) -> np.ndarray:
        return wrong(given) if (op, given.dtype) == (wrong_op, dtype) else right

    with pytest.raises(LaunchError, match=rf"backend doubled: the {wrong_op} of {np.dtype(dtype)} on the host"):
        check_arithmetic(session(fault=fault), backend=BACKEND, name="doubled")


def test_a_wrong_result_on_the_device_is_refused() -> None:
    backend: Any = SimpleNamespace(ops=SimpleNamespace(to_numpy=lambda x: 2 * x))
    with pytest.raises(LaunchError, match="sum of float32 on the device"):
        check_arithmetic(session(), backend=backend, name="doubled")


def test_ranks_gathered_in_another_order_are_refused() -> None:
    with pytest.raises(LaunchError, match="list of ranks that was gathered"):
        check_arithmetic(session(ranks=[0, 2, 1]), backend=BACKEND, name="any")


def test_a_single_rank_has_nothing_to_add_up() -> None:
    check_arithmetic(session(size=1, fault=lambda op, given, right: right * np.nan), backend=BACKEND, name="solo")
