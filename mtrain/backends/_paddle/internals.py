"""Everything that mtrain uses of Paddle without a promise of Paddle: private names, and changes of its behaviour.

``tests/backends/test_paddle_internals.py`` checks each of them, so that a new version of Paddle that differs is noticed
there and not in a job. Differences between Paddle 2.6 and 3 are in ``paddle2_compatibility``.
"""

import atexit
import ctypes
import math
import operator
import os
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import paddle
import psutil
from paddle import Tensor
from paddle import distributed as dist
from paddle.nn import Layer

TESTED = ("2.6.2", "3.0.0", "3.1.1", "3.2.2", "3.3.1")
"""Versions of Paddle with which these internals were tested; see docs/versions.md."""
_KERNELS: Any = paddle._C_ops
_NO_MASTER_WEIGHTS, _NOT_MULTI_PRECISION, _NO_RESCALING = None, False, 1.0


# ------------------------------------------------------------------------------------------------------------ kernels
def add_(x: Tensor, factor: float, y: Tensor) -> None:
    """Compute ``x += factor * y`` in one pass over memory, with ``factor`` in the dtype of ``x``."""
    # The public functions take two passes and a temporary tensor. SGD without momentum is x -= learning rate * grad.
    _KERNELS.sgd_(x, paddle.full([1], -factor, x.dtype), y, _NO_MASTER_WEIGHTS, _NOT_MULTI_PRECISION)


def momentum_(  # noqa: PLR0913 - the kernel has as many
    x: Tensor, velocity: Tensor, grad: Tensor, *, learning_rate: float, momentum: float, decay: float, nesterov: bool
) -> None:
    """Make one update of SGD with momentum and coupled weight decay, in one pass over memory.

    The kernel rounds ``momentum`` and ``decay`` to float32 for any dtype of ``x``.
    """
    # paddle.optimizer runs this kernel once for each parameter, and keeps state of its own.
    factor = paddle.full([1], learning_rate, x.dtype)
    constants = (momentum, nesterov, "l2_decay", decay, _NOT_MULTI_PRECISION, _NO_RESCALING)
    _KERNELS.momentum_(x, grad, velocity, factor, _NO_MASTER_WEIGHTS, *constants)


def norm(tensors: Sequence[Tensor]) -> Tensor:
    """Return the L2 norm over all elements of all tensors, a float64 number on the device."""
    # On the CPU, paddle.linalg.norm adds float32 numbers one after the other, which is 0.3 % off for 4 million numbers.
    total = paddle.zeros([], "float64")
    for tensor in tensors:
        total = total + _KERNELS.squared_l2_norm(tensor).astype("float64").reshape([])
    return total.sqrt()


def length(tensor: Tensor) -> float:
    """Return the L2 norm of one tensor; waits for the device."""
    # One kernel: a rule that asks for the length of every array has no time for the others of ``norm``.
    return math.sqrt(_KERNELS.squared_l2_norm(tensor).item())


def put_along_axis(x: Tensor, indices: Tensor, values: Tensor, axis: int, reduce: Any) -> Tensor:
    """Do what ``paddle.put_along_axis`` does without broadcasting, without waiting for the device."""
    # The public function reads from the device whether all indices are in range.
    if not paddle.in_dynamic_mode():
        return paddle.put_along_axis(x, indices, values, axis, reduce, broadcast=False)
    put: Tensor = _KERNELS.put_along_axis(x, indices, values, axis, reduce, True)  # noqa: FBT003 - x counts, too
    return put


def suppress_boxes(boxes_BN4: Tensor, scores_BCN: Tensor, settings: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Suppress boxes by class: rows (K, 6) ``[class, score, x1, y1, x2, y2]`` of all images, and int32 (B,), their numbers."""
    limits = settings["confidence"], -1, settings["max_detections"], settings["iou_threshold"]
    rows_K6, _, counts_B = _KERNELS.multiclass_nms3(boxes_BN4, scores_BCN, None, *limits, True, 1.0, -1)  # noqa: FBT003
    return rows_K6, counts_B


# ----------------------------------------------------------------------------------------------------------- programs
def inputs_read(static: Any) -> set[str]:
    """Return the names of the inputs on which the outputs of a traced ``forward`` depend; Paddle 3 only."""
    traced = static.forward.concrete_program
    values = paddle.utils.flatten(traced.outputs)  # type: ignore[attr-defined]
    waiting = [value.get_defining_op() for value in values]
    seen: set[int] = set()
    names: set[str] = set()
    while waiting:
        operator_ = waiting.pop()
        if operator_ is None or operator_.id() in seen:
            continue
        seen.add(operator_.id())
        if operator_.name() == "pd_op.data":
            names.add(operator_.attrs()["name"])
        waiting += [operand.source().get_defining_op() for operand in operator_.operands()]
        # The branches of a condition read values from outside without naming them as operands.
        waiting += [inner for block in operator_.blocks() for inner in block.ops]
    return names


# ------------------------------------------------------------------------------------------------------------- memory
def empty_like(x: Tensor) -> Tensor:
    """Return a tensor of the shape, type and place of ``x``, whose numbers are arbitrary."""
    # paddle.empty_like spends 20 us in Python on checks of its arguments.
    empty: Tensor = _KERNELS.empty_like(x, x.dtype, x.place)
    return empty


def share_memory(memory: Tensor, tensor: Tensor) -> None:
    """Make ``tensor`` lie in ``memory``, which has as many elements; both objects stay valid."""
    # set_value and paddle.assign copy into the memory that the tensor has.
    memory._share_buffer_to(tensor)


def view(vector: Tensor, first: int, end: int) -> Tensor:
    """Return elements ``first`` up to ``end`` (excluded) of a vector; the result shares its memory."""
    # Indexing with a slice returns a view only as long as FLAGS_use_stride_kernel is set.
    part: Tensor = vector._slice(first, end)
    return part


def sharing_array(array: Any) -> Tensor:
    """Return a CPU tensor that shares the memory of a writable C-contiguous array and keeps the array alive."""
    # paddle.to_tensor copies. These arguments of the constructor are not documented.
    return paddle.Tensor(value=array, place=paddle.CPUPlace(), zero_copy=True, stop_gradient=True)


def download(vector: Tensor) -> Callable[[], Any]:
    """Start copying ``vector`` to the host; return a function that waits for the copy and returns it as an array."""
    if vector.place.is_cpu_place():
        array: Callable[[], Any] = vector.numpy
        return array
    # The public functions wait for the copy.
    host = vector._copy_to(paddle.CUDAPinnedPlace(), False)  # noqa: FBT003 - it is not blocking
    copied: Any = paddle.device.cuda.Event()
    copied.record()

    def read() -> Any:
        copied.synchronize()
        return host.numpy()

    return read


# -------------------------------------------------------------------------------------------------- devices and layers
def use_tf32(allowed: bool) -> None:  # noqa: FBT001 - the only argument
    """Allow or forbid TensorFloat-32 in products and convolutions on CUDA."""
    # These switches of cuBLAS and cuDNN have no public name. Up to 3.2, Paddle for the CPU lacks them.
    paddle.base.core.set_cublas_switch(allowed)
    paddle.base.core.set_cudnn_switch(allowed)


def unwrap(model: Layer) -> Layer:
    """Return the layer that ``paddle.DataParallel`` was made of, or ``model`` if it is not one."""
    # DataParallel has no public attribute for it.
    return model._layers if isinstance(model, paddle.DataParallel) else model


def convert_floats(layer: Layer, **target: Any) -> None:
    """Do ``layer.to(**target)``, but convert floating types only."""
    # The public `to` converts counters and labels too.
    layer._to_impl(floating_only=True, **target)


def on_gradients(parameters: Iterable[Any], call: Callable[..., None]) -> None:
    """Call ``call`` whenever a gradient of ``parameters`` is computed; hooks run in the order of registration."""
    # The public register_hook is called before a gradient is added to those of earlier passes. This hook is called
    # afterwards, like those in which DataParallel exchanges gradients.
    for parameter in parameters:
        parameter._register_backward_hook(call)


# --------------------------------------------------------------------------------------------------------------- ranks
@contextmanager
def one_group(size: int) -> Iterator[None]:
    """Return the first process group whenever another one of all ranks is requested, while inside."""
    # Paddle writes the addresses of every gloo group under the same keys of its store. With three or more ranks, a fast
    # rank can read the address that another one used for the previous group: without this, one start in five hangs or
    # ends with "Connection refused". fleet.init calls the attribute of the module, so replacing it there suffices.
    make_group = dist.new_group

    def new_group(ranks: Any = None, *args: Any, **named: Any) -> Any:
        return dist.get_group(0) if ranks is None or len(ranks) == size else make_group(ranks, *args, **named)

    dist.new_group = new_group
    try:
        yield
    finally:
        dist.new_group = make_group


def port_of_store(environ: Mapping[str, str]) -> int | None:
    """Return the port at which rank 0 makes Paddle's store listen; None if ``environ`` does not name it."""
    # The store has no attribute for it. These are the variables that Paddle itself reads, in its order.
    if environ.get("MASTER_ADDR") and environ.get("MASTER_PORT"):
        return int(environ["MASTER_PORT"])
    first = environ.get("PADDLE_MASTER") or environ.get("PADDLE_TRAINER_ENDPOINTS", "").partition(",")[0]
    port = first.rpartition(":")[2]
    return int(port) if port.isdecimal() else None


def close_port(port: int) -> None:
    """Stop this process from accepting connections at ``port``; existing connections stay."""
    # Paddle's store listens on every interface, has no option for an address, and no password. One of Paddle's threads
    # waits on the listening socket for as long as the process lives, so its file descriptor must stay valid: it is
    # replaced by a socket on which nothing ever arrives.
    quiet, other = socket.socketpair()
    other.detach()  # never closed, because the thread would then see the end of the stream
    with quiet:
        for connection in psutil.Process().net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port:
                os.dup2(quiet.fileno(), connection.fd, inheritable=False)


_handlers: list[Any] = []  # keeps the functions of ``on_terminate`` alive: C++ holds no reference to them


def on_terminate(call: Callable[[], None]) -> None:
    """Make C++ call ``call``, which must end the process, where it would abort because of an exception."""
    # gloo's exceptions cannot pass through Paddle's backward pass, so C++ calls its terminate handler. Where libstdc++
    # has another name the process aborts, as it does without this.
    handler = ctypes.CFUNCTYPE(None)(call)
    with suppress(OSError, AttributeError):
        ctypes.CDLL("libstdc++.so.6")._ZSt13set_terminatePFvvE(handler)
        _handlers[:] = [*_handlers, handler]


EXIT_FUNCTIONS = ("clear_kernel_factory", "clear_device_manager", "clear_executor_cache", "ProcessGroupIdMap.destroy")
"""Names in ``paddle.base.core`` of functions that Paddle calls when Python ends."""


def keep_kernels() -> None:
    """Leave kernels and devices as they are when this process ends.

    Paddle frees them then, and a thread of gloo that still uses one crashes the process, whose work is done.
    """
    for name in EXIT_FUNCTIONS:
        atexit.unregister(operator.attrgetter(name)(paddle.base.core))
