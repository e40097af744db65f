"""Ranks whose library adds up wrongly are refused before they train."""

import ast
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mtrain.core.ranks import arithmetic
from mtrain.core.ranks.arithmetic import check_halves, check_ranks
from mtrain.errors import LaunchError, PluginError
from tests.sources import nodes, source_files

SIZE = 3
BACKEND: Any = SimpleNamespace(ops=SimpleNamespace(to_numpy=np.asarray))
Reduce = Callable[[str, Sequence[np.ndarray]], np.ndarray]


def reduce_rightly(op: str, parts: Sequence[np.ndarray]) -> np.ndarray:
    return {"sum": np.sum, "mean": np.mean, "max": np.max}[op](np.stack(parts), axis=0)


@pytest.fixture(autouse=True)
def complete(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arithmetic, "check_session", lambda session, **_: None)


def session(*, size: int = SIZE, reduce: Reduce = reduce_rightly, ranks: list[int] | None = None) -> Any:
    """The session of rank 0; what the other ranks give follows from what this one gives."""

    def all_reduce(x: np.ndarray, op: str) -> np.ndarray:
        return reduce(op, [x * (1 + rank % 2) for rank in range(size)]).astype(x.dtype)

    collective = SimpleNamespace(
        rank=0, size=size, all_reduce=all_reduce, all_gather=lambda value: list(range(size)) if ranks is None else ranks
    )
    return SimpleNamespace(collective=collective, batches=iter)


@pytest.mark.parametrize("size", [2, 3, 7, 49, 3000])
def test_ranks_that_add_up_rightly_pass(size: int) -> None:
    check_ranks(session(size=size), backend=BACKEND, name="any")
    rounded = session(
        size=size, reduce=lambda op, x: np.sum(x, axis=0) * (1 / size) if op == "mean" else reduce_rightly(op, x)
    )
    check_ranks(rounded, backend=BACKEND, name="any")


@pytest.mark.parametrize(
    ("wrong_op", "wrong"),
    [
        pytest.param("mean", lambda parts: np.sum(parts, axis=0), id="the sum for the mean"),
        pytest.param("sum", lambda parts: np.mean(parts, axis=0), id="the mean for the sum"),
        pytest.param("max", lambda parts: np.min(parts, axis=0), id="the minimum for the maximum"),
        pytest.param("sum", lambda parts: np.sum(parts[:-1], axis=0), id="the last rank is left out"),
        pytest.param("sum", lambda parts: np.sum([parts[0], *parts[2:]], axis=0), id="a rank is left out"),
        pytest.param("sum", lambda parts: parts[0], id="rank 0 alone"),
        pytest.param("mean", lambda parts: parts[0] * np.nan, id="no number"),
    ],
)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_wrong_result_of_one_type_is_refused(wrong_op: str, wrong: Callable[[Any], Any], dtype: type) -> None:
    def reduce(op: str, parts: Sequence[np.ndarray]) -> np.ndarray:
        return wrong(parts) if (op, parts[0].dtype) == (wrong_op, dtype) else reduce_rightly(op, parts)

    with pytest.raises(LaunchError, match=rf"backend doubled: the {wrong_op} of {np.dtype(dtype)} on the host"):
        check_ranks(session(reduce=reduce), backend=BACKEND, name="doubled")


def test_a_wrong_result_on_the_device_is_refused() -> None:
    backend: Any = SimpleNamespace(ops=SimpleNamespace(to_numpy=lambda x: 2 * x))
    with pytest.raises(LaunchError, match="sum of float32 on the device"):
        check_ranks(session(), backend=backend, name="doubled")


def test_ranks_gathered_in_another_order_are_refused() -> None:
    with pytest.raises(LaunchError, match="list of ranks that was gathered"):
        check_ranks(session(ranks=[0, 2, 1]), backend=BACKEND, name="any")


def test_a_single_rank_has_nothing_to_add_up() -> None:
    check_ranks(session(size=1, reduce=lambda op, parts: parts[0] * np.nan), backend=BACKEND, name="solo")


def halves(*, size: int, rank: int = 0, reduce: Reduce = reduce_rightly) -> None:
    """Check halves on one rank; what the others give follows from the rule."""

    def all_reduce(x: np.ndarray, op: str) -> np.ndarray:
        parts = [np.full(2, (1 + other % 2) * (other < 100), np.float16) for other in range(size)]
        assert x.tolist() == parts[rank].tolist()
        return reduce(op, parts).astype(np.float16)

    check_halves(
        SimpleNamespace(rank=rank, size=size, all_reduce=all_reduce),
        lambda number: np.full(2, number, np.float16),
        np.asarray,
        name="halved",
        dtype="float16",
    )


@pytest.mark.parametrize("size", [2, 3, 100, 101, 5000])
def test_halves_that_add_up_rightly_pass(size: int) -> None:
    for rank in {0, 1, size - 1}:
        halves(size=size, rank=rank)


@pytest.mark.parametrize(
    ("op", "wrong"),
    [
        pytest.param("mean", lambda parts: np.sum(parts, axis=0), id="the sum for the mean"),
        pytest.param("sum", lambda parts: np.mean(parts, axis=0), id="the mean for the sum"),
        pytest.param("sum", lambda parts: np.sum(parts[:-1], axis=0), id="the last rank is left out"),
        pytest.param("mean", lambda parts: parts[0] * np.nan, id="no number"),
    ],
)
@pytest.mark.parametrize("size", [2, 3, 100])
def test_halves_that_add_up_wrongly_are_refused(op: str, wrong: Callable[[Any], Any], size: int) -> None:
    def reduce(given: str, parts: Sequence[np.ndarray]) -> np.ndarray:
        return wrong(parts) if given == op else reduce_rightly(given, parts)

    with pytest.raises(LaunchError, match=f"backend halved: the {op} of float16 on the device"):
        halves(size=size, reduce=reduce)


def test_an_incomplete_session_is_refused_before_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    with pytest.raises(PluginError, match="`__enter__` returned None"):
        check_ranks(None, backend=BACKEND, name="any")  # type: ignore[arg-type]


def test_whoever_enters_a_backend_checks_its_ranks() -> None:
    entering = []
    for name, file in source_files().items():
        if not name.startswith("rank/"):
            continue  # an exported model has one rank
        for node in nodes(file):
            if not isinstance(node, ast.FunctionDef):
                continue
            text = ast.unparse(node)
            if "with backend as session" in text or "enter_context(backend)" in text:
                entering.append(name)
                assert "check_ranks(" in text, f"{name}: {node.name}"
    assert {"rank/allreduce.py", "rank/script/session.py", "rank/spec/assembly.py"} <= set(entering)
