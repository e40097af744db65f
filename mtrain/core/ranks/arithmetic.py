"""Refuse ranks whose library adds up wrongly, before anything is trained with them."""

import numpy as np

from mtrain.core.interfaces import Array, Backend, RankSession
from mtrain.errors import LaunchError


def check_arithmetic(session: RankSession, *, backend: Backend, name: str) -> None:
    """Refuse a backend whose collectives compute something else than they say; every rank must call.

    Args:
        session: The session of this rank.
        backend: The backend, which is entered.
        name: The name by which the backend was selected.

    Raises:
        LaunchError: A sum, a mean, a maximum or a gathered value is wrong.
    """
    collective = session.collective
    if collective.size == 1:
        return
    # Rank 0 gives the number of ranks and all others 0, so every right result is a whole number, exact in any type, and a
    # sum in the place of a mean, or nothing exchanged at all, shows.
    expected = {"sum": collective.size, "mean": 1, "max": collective.size}
    own = collective.size if collective.rank == 0 else 0
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


def _check(result: Array, right: object, *, name: str, what: str) -> None:
    if not np.array_equal(result, np.broadcast_to(np.asarray(right), result.shape)):
        raise LaunchError(wrong_result(name, what, result.tolist(), right))


def wrong_result(name: str, what: str, result: object, right: object) -> str:
    """Return the message about a collective of backend ``name`` that returned ``result`` where ``right`` is right."""
    return (
        f"backend {name}: the {what} is {result}, where {right} is right: this version of the library that connects the ranks "
        "computes something else, and would train other weights; use another version (docs/versions.md), or another backend"
    )
