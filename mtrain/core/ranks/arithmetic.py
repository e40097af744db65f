"""Refuse a session that is incomplete, or ranks whose library adds up wrongly, before anything is trained with them."""

from collections.abc import Callable

import numpy as np

from mtrain.core.completeness import check_session
from mtrain.core.interfaces import Array, Backend, Collective, RankSession, Tensor
from mtrain.errors import LaunchError


def check_ranks(session: RankSession, *, backend: Backend, name: str) -> None:
    """Refuse what a backend returned when it was entered, if it cannot train; every rank must call.

    Args:
        session: The session of this rank.
        backend: The backend, which is entered.
        name: The name by which the backend was selected.

    Raises:
        PluginError: The session lacks members, see ``check_session``.
        LaunchError: A sum, a mean, a maximum or a gathered value is wrong.
    """
    check_session(session, backend=backend, name=name)
    collective = session.collective
    size = collective.size
    if size == 1:
        return
    # Every rank gives something, and neighbours different numbers, so a rank that is left out shows, and a sum in the place of a
    # mean. Multiples of the number of ranks have a whole mean; up to some 3,000 ranks the sum is exact in float32.
    own = size * (1 + collective.rank % 2)
    expected = {"sum": size * (size + size // 2), "mean": size + size // 2, "max": 2 * size}
    # Host and device are checked both, because a backend may exchange values of the host by another library.
    for dtype in (np.float32, np.float64):
        given = np.full(2, own, dtype)
        for op, right in expected.items():
            result = np.asarray(collective.all_reduce(given, op))  # type: ignore[arg-type]  # a key of `expected`
            _check(result, right, name=name, what=f"{op} of {given.dtype} on the host")
    on_device = next(iter(session.batches([{"values": np.full(2, own, np.float32)}])))["values"]
    for op, right in expected.items():
        result = backend.ops.to_numpy(collective.all_reduce(on_device, op))  # type: ignore[arg-type]  # a key of `expected`
        _check(result, right, name=name, what=f"{op} of float32 on the device")
    gathered = collective.all_gather(collective.rank)
    _check(np.array(gathered), np.arange(collective.size), name=name, what="list of ranks that was gathered")


def check_halves(
    collective: Collective, give: Callable[[int], Tensor], read: Callable[[Tensor], Array], *, name: str, dtype: str
) -> None:
    """Refuse ranks whose library adds up numbers of half precision wrongly; every rank must call.

    Args:
        collective: The ranks.
        give: Returns a tensor of that precision, on the device, full of a number.
        read: Returns such a tensor as an array of float32.
        name: What the message calls the backend.
        dtype: What it calls the precision.

    Raises:
        LaunchError: A sum or a mean is wrong.
    """
    # Whole numbers up to 256 are exact in bfloat16, so of more than 100 ranks the others give 0.
    counted = min(collective.size, 100)
    given = give(1 + collective.rank % 2 if collective.rank < counted else 0)
    total = counted + counted // 2
    _check(read(collective.all_reduce(given, "sum")), total, name=name, what=f"sum of {dtype} on the device")
    _check(
        read(collective.all_reduce(given, "mean")),
        total / collective.size,
        name=name,
        what=f"mean of {dtype} on the device",
        rtol=0.01,
    )


def _check(result: Array, right: object, *, name: str, what: str, rtol: float = 1e-5) -> None:
    # A backend may multiply by a rounded 1 / size.
    if not np.allclose(result, np.asarray(right), rtol=rtol, atol=0):
        raise LaunchError(wrong_result(name, what, result.tolist(), right))


def wrong_result(name: str, what: str, result: object, right: object) -> str:
    """Return the message about a collective of backend ``name`` that returned ``result`` where ``right`` is right."""
    return (
        f"backend {name}: the {what} is {result}, where {right} is right: this version of the library that connects the ranks "
        "computes something else, and would train other weights; use another version (docs/versions.md), or another backend"
    )
