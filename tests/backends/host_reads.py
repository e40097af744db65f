"""Counts the calls in which the host waits for a device, or would wait for one: a shim around code that runs on a CPU.

Counted are reads (numbers, truth values, arrays), operations whose shape depends on values, and tensors made of values of the
host. On a CPU none of them waits; on a GPU each does, unless it is named as asynchronous here.
"""

import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

READS = ("item", "tolist", "numpy", "cpu", "__float__", "__int__", "__bool__", "__index__", "__array__", "__contains__")
ROOT = str(Path(__file__).parents[2])


class Reads:
    """The calls that were counted."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self._inside = False

    def count(self, name: str) -> None:
        """Count a call by its name and the line of mtrain that made it."""
        lines = [f for f in traceback.extract_stack() if f.filename.startswith(f"{ROOT}/mtrain/")]
        place = f"{Path(lines[-1].filename).relative_to(ROOT)}:{lines[-1].name}" if lines else "?"
        self.calls[f"{name} in {place}"] += 1

    def wrapped(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``call`` that is counted, but not what it calls itself."""

        def counted(*args: Any, **named: Any) -> Any:
            if self._inside:
                return call(*args, **named)
            self.count(name)
            self._inside = True
            try:
                return call(*args, **named)
            finally:
                self._inside = False

        return counted


@contextmanager
def counted(framework: str) -> Iterator[Reads]:
    """Count the calls of this context."""
    with torch_reads() if framework == "torch" else paddle_reads() as reads:
        yield reads


@contextmanager
def torch_reads() -> Iterator[Reads]:
    """Count under torch: the methods, and below them every kernel that answers to the host."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    aten = torch.ops.aten
    waiting = {
        aten._local_scalar_dense.default: "_local_scalar_dense",
        aten.nonzero.default: "nonzero",
        aten.masked_select.default: "masked_select",
        aten.is_nonzero.default: "is_nonzero",
        aten.equal.default: "equal",
        aten._unique2.default: "unique",
        aten.repeat_interleave.Tensor: "repeat_interleave",
    }
    reads = Reads()

    class Kernels(TorchDispatchMode):
        """Sees what C++ calls, too, such as kernels of backward passes."""

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            by_mask = func is aten.index.Tensor and any(i is not None and i.dtype == torch.bool for i in args[1])
            if (func in waiting or by_mask) and not reads._inside:
                reads.count(waiting.get(func, "index by a mask"))
            return func(*args, **(kwargs or {}))

    with ExitStack() as stack:
        for name in READS:
            stack.enter_context(mock.patch.object(torch.Tensor, name, reads.wrapped(name, getattr(torch.Tensor, name))))
        for name in ("tensor", "as_tensor", "from_numpy"):
            stack.enter_context(mock.patch.object(torch, name, reads.wrapped(name, getattr(torch, name))))
        stack.enter_context(Kernels())
        yield reads


@contextmanager
def paddle_reads() -> Iterator[Reads]:
    """Count under Paddle: methods and functions, since it has no place that sees every kernel."""
    import paddle

    reads = Reads()
    with ExitStack() as stack:
        for name in READS:
            if hasattr(paddle.Tensor, name):
                whole = getattr(paddle.Tensor, name)
                stack.enter_context(mock.patch.object(paddle.Tensor, name, reads.wrapped(name, whole)))
        for name in ("to_tensor", "nonzero", "masked_select", "unique"):
            stack.enter_context(mock.patch.object(paddle, name, reads.wrapped(name, getattr(paddle, name))))
        yield reads
