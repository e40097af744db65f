"""Checks of the collective and of what brings data to the ranks."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from mtrain.core.collective import barrier, broadcast, mean
from mtrain.core.interfaces import Array, HostBatch, Tensor
from mtrain.testing.check_context import Site
from mtrain.testing.checks import Measure, none_of

ROUNDS = 20


def place(site: Site) -> list[Measure]:
    """Every rank has its own number."""
    c = site.backend.collective
    wrong = [] if c.size == site.ranks else [f"size is {c.size}, {site.ranks} ranks were started"]
    if not 0 <= c.rank < c.size:
        wrong.append(f"rank {c.rank} of {c.size}")
    numbers = sorted(c.all_gather(c.rank))
    if numbers != list(range(site.ranks)):
        wrong.append(f"ranks are numbered {numbers}")
    if len(set(c.all_gather(c.local_rank))) != site.ranks:
        wrong.append("two ranks of this host have the same local_rank")
    return [none_of("wrong places", wrong)]


def reduces(site: Site) -> list[Measure]:
    """Sums, means and maxima of tensors and of numpy arrays."""
    c, ops = site.backend.collective, site.backend.ops
    mine, size = float(c.rank + 1), c.size
    values = np.array([[mine, -mine, 0.5]])
    expected = {
        "sum": values / mine * size * (size + 1) / 2,
        "mean": values / mine * (size + 1) / 2,
        "max": np.array([[float(size), -1.0, 0.5]]),
    }
    expected["sum"][0, 2], expected["mean"][0, 2] = size / 2, 0.5
    wrong: list[str] = []
    for op, right in expected.items():
        tensor = ops.asarray(values)
        for kind, given in (("tensor", tensor), ("array", values.copy())):
            found = c.all_reduce(given, op)  # type: ignore[arg-type]
            wrong += _wrong_result(f"{op} of a {kind}", ops, found, right, is_array=kind == "array")
            if not np.array_equal(given if kind == "array" else ops.to_numpy(given), values):
                wrong.append(f"{op} of a {kind} changes what it is given")
    scalar = c.all_reduce(np.array(mine), "sum")
    wrong += [] if np.shape(scalar) == () else [f"sum of a scalar has shape {np.shape(scalar)}"]
    return [none_of("wrong reductions", wrong), none_of("results with a gradient", _with_gradient(site))]


def _wrong_result(what: str, ops: Any, found: Any, right: Array, *, is_array: bool) -> list[str]:
    if is_array and not isinstance(found, np.ndarray):
        return [f"{what} is a {type(found).__name__}"]
    array = found if is_array else ops.to_numpy(found)
    if array.dtype != right.dtype or not np.array_equal(array, right):
        return [f"{what} is {array.tolist()} ({array.dtype}), expected {right.tolist()} ({right.dtype})"]
    return []


def _with_gradient(site: Site) -> list[str]:
    """A reduced parameter must not be part of a graph."""
    from mtrain.core import nn

    parameter = nn.parameter((2,), fill=1.0)
    return ["sum of a parameter"] if carries_gradient(site.backend.collective.all_reduce(parameter, "sum")) else []


def carries_gradient(x: Tensor) -> bool:
    """Whether a tensor has a place in a graph."""
    return bool(x.requires_grad if hasattr(x, "requires_grad") else not x.stop_gradient)


def gathers(site: Site) -> list[Measure]:
    """Any values, ordered by rank, of any length, between other calls."""
    c = site.backend.collective
    wrong = []
    for turn in range(ROUNDS):
        payload: dict[str, Any] = {"rank": c.rank, "text": "x" * (turn * c.rank * 997), "array": np.full(c.rank, turn)}
        found = c.all_gather(payload)
        if [each["rank"] for each in found] != list(range(c.size)):
            wrong.append(f"turn {turn}: values of ranks {[each['rank'] for each in found]}")
        elif any(len(e["text"]) != turn * r * 997 or e["array"].tolist() != [turn] * r for r, e in enumerate(found)):
            wrong.append(f"turn {turn}: values are not what ranks gave")
        total = c.all_reduce(np.array([float(turn + c.rank)]), "sum")[0]
        if total != c.size * turn + c.size * (c.size - 1) / 2:
            wrong.append(f"turn {turn}: a reduction behind it is {total}")
    barrier(c)
    last = c.size - 1
    if broadcast(c, c.rank + 10, source=last) != last + 10:
        wrong.append("broadcast from the last rank")
    if mean(c, {"x": float(c.rank)})["x"] != last / 2:
        wrong.append("mean")
    return [none_of("wrong gathers", wrong)]


def many_values(site: Site) -> list[Measure]:
    """A long array is summed well, and to the same bits on every rank."""
    c = site.backend.collective
    arrays = [np.random.default_rng(rank).normal(size=100_003) for rank in range(c.size)]
    found = c.all_reduce(arrays[c.rank], "sum")
    error = float(np.abs(found - np.sum(arrays, axis=0)).max())
    others = c.all_gather(found.tobytes())
    unequal = [f"rank {rank}" for rank, other in enumerate(others) if other != others[0]]
    return [
        Measure(what="largest error of a sum", value=error, bound=1e-12),
        none_of("ranks with other sums than rank 0", unequal),
    ]


def batches(site: Site) -> list[Measure]:
    """What a loader yields comes out as tensors, in order, whatever the memory of the arrays looks like."""
    backend, given = site.backend, list(_awkward())
    found = [{name: backend.ops.to_numpy(x) for name, x in batch.items()} for batch in backend.batches(iter(given))]
    wrong = [] if len(found) == len(given) else [f"{len(found)} micro batches came out of {len(given)}"]
    for i, (a, b) in enumerate(zip(given, found, strict=False)):
        wrong += [f"{n} of micro batch {i}" for n in a if n not in b or not np.array_equal(a[n], b[n])]
        wrong += [f"type of {n}" for n in a if n in b and a[n].dtype != b[n].dtype]
    stream = backend.batches(iter(given))
    next(stream)
    getattr(stream, "close", lambda: None)()  # a job that ends in mid-epoch
    return [none_of("wrong micro batches", wrong)]


def _awkward() -> Iterator[HostBatch]:
    for i in range(5):
        images = np.arange(24, dtype=np.uint8).reshape(2, 3, 2, 2) + np.uint8(i)
        fixed = np.full((2, 1), float(i), np.float32)
        fixed.setflags(write=False)
        yield {"images": images[:, ::-1], "fixed": fixed, "none": np.zeros((0, 6)), "index": np.arange(2) + 2 * i}
