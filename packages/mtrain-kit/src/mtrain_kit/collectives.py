"""Check the collective operations, and the path of data to the ranks."""

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import numpy as np

from mtrain.core import ops
from mtrain.core.collective import barrier, broadcast, mean
from mtrain.core.interfaces import Array, HostBatch, Tensor
from mtrain.core.samples.feed import closable
from mtrain_kit.check_context import Site
from mtrain_kit.checks import Measure, none_of

ROUNDS = 20


def place(site: Site) -> list[Measure]:
    """Check that every rank has its own number."""
    c = site.session.collective
    problems = [] if c.size == site.ranks else [f"size is {c.size}, {site.ranks} ranks were started"]
    if not 0 <= c.rank < c.size:
        problems.append(f"rank {c.rank} of {c.size}")
    numbers = sorted(c.all_gather(c.rank))
    if numbers != list(range(site.ranks)):
        problems.append(f"ranks are numbered {numbers}")
    return [none_of("wrong places", problems)]


def reduces(site: Site) -> list[Measure]:
    """Check sums, means and maxima of tensors and of numpy arrays."""
    c = site.session.collective
    number, size = float(c.rank + 1), c.size
    values = np.array([[number, -number, 0.5]])
    expected = {
        "sum": values / number * size * (size + 1) / 2,
        "mean": values / number * (size + 1) / 2,
        "max": np.array([[float(size), -1.0, 0.5]]),
    }
    expected["sum"][0, 2], expected["mean"][0, 2] = size / 2, 0.5
    problems: list[str] = []
    for op, expected_result in expected.items():
        tensor = ops.asarray(values)
        for kind, operand in (("tensor", tensor), ("array", values.copy())):
            result = c.all_reduce(operand, op)  # type: ignore[arg-type]
            problems += _wrong_result(f"{op} of a {kind}", result, expected_result, is_array=kind == "array")
            if not np.array_equal(operand if kind == "array" else ops.to_numpy(operand), values):
                problems.append(f"{op} of a {kind} changes its argument")
    scalar = c.all_reduce(np.array(number), "sum")
    problems += [] if np.shape(scalar) == () else [f"sum of a scalar has shape {np.shape(scalar)}"]
    return [none_of("wrong reductions", problems), none_of("results with a gradient", _with_gradient(site))]


def _wrong_result(what: str, result: Any, expected: Array, *, is_array: bool) -> list[str]:
    if is_array and not isinstance(result, np.ndarray):
        return [f"{what} is a {type(result).__name__}"]
    array = result if is_array else ops.to_numpy(result)
    if array.dtype != expected.dtype or not np.array_equal(array, expected):
        return [f"{what} is {array.tolist()} ({array.dtype}), expected {expected.tolist()} ({expected.dtype})"]
    return []


def _with_gradient(site: Site) -> list[str]:
    """Report a reduced parameter that is part of a graph, which it must not be."""
    from mtrain.core import nn

    parameter = nn.parameter((2,), fill=1.0)
    return ["sum of a parameter"] if carries_gradient(site.session.collective.all_reduce(parameter, "sum")) else []


def carries_gradient(x: Tensor) -> bool:
    """Return whether a tensor belongs to a graph."""
    return bool(x.requires_grad if hasattr(x, "requires_grad") else not x.stop_gradient)


def gathers(site: Site) -> list[Measure]:
    """Check that any values of any length are gathered in the order of ranks, between other calls."""
    c = site.session.collective
    problems = []
    for turn in range(ROUNDS):
        # Lengths that differ by rank find gathers that assume one size.
        payload: dict[str, Any] = {"rank": c.rank, "text": "x" * (turn * c.rank * 997), "array": np.full(c.rank, turn)}
        gathered = c.all_gather(payload)
        if [each["rank"] for each in gathered] != list(range(c.size)):
            problems.append(f"turn {turn}: values of ranks {[each['rank'] for each in gathered]}")
        elif any(len(e["text"]) != turn * r * 997 or e["array"].tolist() != [turn] * r for r, e in enumerate(gathered)):
            problems.append(f"turn {turn}: values are not what ranks gave")
        # A reduction between gathers finds calls that overtake one another.
        total = c.all_reduce(np.array([float(turn + c.rank)]), "sum")[0]
        if total != c.size * turn + c.size * (c.size - 1) / 2:
            problems.append(f"turn {turn}: the next reduction is {total}")
    barrier(c)
    last = c.size - 1
    if broadcast(c, c.rank + 10, source=last) != last + 10:
        problems.append("broadcast from the last rank")
    if mean(c, {"x": float(c.rank)})["x"] != last / 2:
        problems.append("mean")
    return [none_of("wrong gathers", problems)]


def many_values(site: Site) -> list[Measure]:
    """Check that a long array is summed exactly enough, and to the same bits on every rank."""
    c = site.session.collective
    arrays = [np.random.default_rng(rank).normal(size=100_003) for rank in range(c.size)]
    total = c.all_reduce(arrays[c.rank], "sum")
    error = float(np.abs(total - np.sum(arrays, axis=0)).max())
    others = c.all_gather(total.tobytes())
    unequal = [f"rank {rank}" for rank, other in enumerate(others) if other != others[0]]
    return [
        Measure(what="largest error of a sum", value=error, bound=1e-12),
        none_of("ranks with other sums than rank 0", unequal),
    ]


def batches(site: Site) -> list[Measure]:
    """Check that a loader's arrays come out as tensors, in order, whatever their memory layout."""
    session, loader_batches = site.session, list(_awkward())
    arrays = [{name: ops.to_numpy(x) for name, x in batch.items()} for batch in session.batches(iter(loader_batches))]
    problems = (
        [] if len(arrays) == len(loader_batches) else [f"{len(arrays)} micro batches came out of {len(loader_batches)}"]
    )
    for i, (a, b) in enumerate(zip(loader_batches, arrays, strict=False)):
        problems += [f"{n} of micro batch {i}" for n in a if n not in b or not np.array_equal(a[n], b[n])]
        problems += [f"type of {n}" for n in a if n in b and a[n].dtype != b[n].dtype]
    with closing(closable(session.batches(iter(loader_batches)))) as stream:  # as in a job that ends within an epoch
        next(stream)
    return [none_of("wrong micro batches", problems)]


def _awkward() -> Iterator[HostBatch]:
    for i in range(5):
        images = np.arange(24, dtype=np.uint8).reshape(2, 3, 2, 2) + np.uint8(i)
        fixed = np.full((2, 1), float(i), np.float32)
        # Loaders hand out memory of files, which cannot be written to.
        fixed.setflags(write=False)
        yield {"images": images[:, ::-1], "fixed": fixed, "none": np.zeros((0, 6)), "index": np.arange(2) + 2 * i}
