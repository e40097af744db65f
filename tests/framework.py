"""One face of torch and Paddle for tests that run under both: `pytest --framework paddle ...`.

Models and losses are written once; so are the tests that hold them to numbers. What a test needs of a framework beyond
`core.nn` and `core.ops` is here, in numpy arrays and names.
"""

from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any, Protocol

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]


class Framework(Protocol):
    """The operations of a framework that tests need."""

    name: str
    nn: ModuleType
    ops: ModuleType

    def tensor(self, values: Any, dtype: str | None = None) -> Any:
        """A tensor without gradient, copied."""

    def variable(self, values: Any, dtype: str | None = None) -> Any:
        """A leaf tensor that takes a gradient."""

    def gradients(self, loss: Any, variables: Sequence[Any], *, again: bool = False) -> list[Array]:
        """Return the gradients of ``loss`` with respect to ``variables``; zeros where it does not depend on one.
        ``again``: keep the graph for further calls."""

    def to(self, module: Any, dtype: str) -> Any:
        """``module`` with its float parameters and buffers in another type; returned."""

    def state(self, module: Any) -> dict[str, Any]:
        """Live parameters and persistent buffers by neutral name."""

    def load(self, module: Any, values: Mapping[str, Array]) -> None:
        """Overwrite the entries that ``values`` names."""

    def parameters(self, module: Any) -> dict[str, Any]:
        """Live parameters that take a gradient, in model order."""

    def one_thread(self) -> None:
        """Compute with one thread."""

    def solo(self, **options: Any) -> Any:
        """The backend ``solo`` on this framework, on the CPU."""


class Torch:
    """See ``Framework``."""

    name = "torch"

    def __init__(self) -> None:
        import torch

        from mtrain.backends._torch import nn, ops

        self.nn, self.ops, self._torch = nn, ops, torch

    def tensor(self, values: Any, dtype: str | None = None) -> Any:
        return self.ops.asarray(np.asarray(values), dtype=dtype)

    def variable(self, values: Any, dtype: str | None = None) -> Any:
        return self.tensor(values, dtype).requires_grad_(True)

    def gradients(self, loss: Any, variables: Sequence[Any], *, again: bool = False) -> list[Array]:
        grads = self._torch.autograd.grad(loss, list(variables), allow_unused=True, retain_graph=again)
        return [
            np.zeros(tuple(x.shape)) if g is None else self.ops.to_numpy(g)
            for x, g in zip(variables, grads, strict=True)
        ]

    def to(self, module: Any, dtype: str) -> Any:
        return module.to(getattr(self._torch, dtype))

    def state(self, module: Any) -> dict[str, Any]:
        return dict(module.state_dict(keep_vars=True))

    def load(self, module: Any, values: Mapping[str, Array]) -> None:
        state = self.state(module)
        with self._torch.no_grad():
            for name, array in values.items():
                state[name].copy_(self._torch.from_numpy(np.array(array)))

    def parameters(self, module: Any) -> dict[str, Any]:
        return {name: p for name, p in module.named_parameters() if p.requires_grad}

    def one_thread(self) -> None:
        self._torch.set_num_threads(1)

    def solo(self, **options: Any) -> Any:
        from mtrain.backends.solo import Solo

        return Solo(Solo.Options(framework="torch", device="cpu", **options))


class Paddle:
    """See ``Framework``."""

    name = "paddle"

    def __init__(self) -> None:
        from mtrain.backends._paddle import nn, ops

        self.nn, self.ops = nn, ops

        import paddle  # after the package that imports it without its warnings

        self._paddle = paddle

    def tensor(self, values: Any, dtype: str | None = None) -> Any:
        return self.ops.asarray(np.asarray(values), dtype=dtype)

    def variable(self, values: Any, dtype: str | None = None) -> Any:
        x = self.tensor(values, dtype)
        x.stop_gradient = False
        return x

    def gradients(self, loss: Any, variables: Sequence[Any], *, again: bool = False) -> list[Array]:
        grads = self._paddle.grad([loss], list(variables), allow_unused=True, retain_graph=again)
        return [
            np.zeros(tuple(x.shape)) if g is None else self.ops.to_numpy(g)
            for x, g in zip(variables, grads, strict=True)
        ]

    def to(self, module: Any, dtype: str) -> Any:
        return module.to(dtype=dtype)

    def state(self, module: Any) -> dict[str, Any]:
        return dict(module.state_dict())

    def load(self, module: Any, values: Mapping[str, Array]) -> None:
        state = self.state(module)
        for name, array in values.items():
            state[name].set_value(np.asarray(array).astype(self.ops.dtype(state[name])))

    def parameters(self, module: Any) -> dict[str, Any]:
        return {name: p for name, p in module.named_parameters() if not p.stop_gradient}

    def one_thread(self) -> None:
        """Nothing: OMP_NUM_THREADS says it."""

    def solo(self, **options: Any) -> Any:
        from mtrain.backends.solo import Solo

        return Solo(Solo.Options(framework="paddle", device="cpu", **options))


FRAMEWORKS = {"torch": Torch, "paddle": Paddle}
