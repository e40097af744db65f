"""Updates of which the host does not know whether they are applied, and metrics that it reads later."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import paddle
from paddle import Tensor

from mtrain.backends._paddle import internals
from mtrain.backends._paddle.collective import PaddleCollective
from mtrain.backends._paddle.flat import Flat
from mtrain.core.interfaces import Array


@contextmanager
def undone_unless_finite(norm: Tensor | None, flats: Sequence[Flat]) -> Iterator[None]:
    """Restore ``flats`` after the body, on the device, where ``norm`` is not finite; None: the body stands."""
    former = [] if norm is None else [flat.buffer.clone() for flat in flats]
    yield
    if norm is not None:
        finite = paddle.isfinite(norm)
        for flat, values in zip(flats, former, strict=True):
            # Paddle's kernels of SGD and Adam have no argument for it, unlike torch's.
            paddle.assign(paddle.where(finite, flat.buffer, values), flat.buffer)


def send(
    norm: Tensor, numbers: Sequence[float], tensors: Sequence[Tensor], *, collective: PaddleCollective
) -> Callable[[], Array]:
    """Start sending ``norm``, and the means over ranks of ``numbers`` and ``tensors``, to the host.

    Returns:
        A function that waits for them and returns them as one float64 vector. On the CPU, several ranks exchange them
        at once over sockets, where gloo would give up after 30 s.
    """
    metrics = [tensor.detach().reshape([1]).astype("float64") for tensor in tensors]
    if collective.size > 1 and norm.place.is_cpu_place():
        own = np.concatenate([np.array(numbers, np.float64), *(metric.numpy() for metric in metrics)])
        exchanged = np.concatenate([norm.reshape([1]).numpy(), collective.all_reduce(own, "mean")])
        return lambda: exchanged
    mine = [paddle.full([1], number, "float64") for number in numbers]
    means = collective.all_reduce(paddle.concat([*mine, *metrics]), "mean")
    # The norm is equal on all ranks already; a mean of it could round.
    return internals.downloaded(paddle.concat([norm.reshape([1]), means]))
