"""Everything that this uses of torch without a promise of torch's: private names."""

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mtrain.core.overriding import override

TESTED = ("2.13.0",)
"""Versions of torch with which these internals were tested."""


def exchange_attention(config: Any, name: str) -> str:
    """Let a model of transformers, by its configuration, use the attention ``name``; return the name of the former one."""
    former: str = config._attn_implementation
    config._attn_implementation = name
    return former


def storage_of(tensor: Tensor) -> int:
    """Return what tells the memory of a tensor from that of others, also where it has no values and so no address."""
    return int(tensor.untyped_storage()._cdata)


def forget_hooks(module: nn.Module) -> None:
    """Drop what was registered around the forward pass of one module."""
    module._forward_hooks.clear()
    module._forward_pre_hooks.clear()


class LiveBytes(TorchDispatchMode):
    """While it is entered, counts the bytes of tensors that are made, as long as something refers to their memory."""

    def __init__(self, known: Iterable[Tensor]) -> None:
        """Count all tensors but those in the memory of ``known``."""
        super().__init__()
        self.bytes = 0
        self.most = 0
        """The most bytes at a time so far."""
        self._counted: dict[int, object] = {storage_of(x): x for x in known}

    def add(self, size: int) -> None:
        """Count ``size`` bytes that no tensor stands for, or, below 0, do so no longer."""
        self.bytes += size
        self.most = max(self.most, self.bytes)

    @override
    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, Tensor) and storage_of(x) not in self._counted:
                storage, key = x.untyped_storage(), storage_of(x)
                self._counted[key] = weakref.ref(storage, partial(self._forget, key, storage.nbytes()))
                self.add(storage.nbytes())
        return result

    def _forget(self, key: int, size: int, _: object) -> None:
        del self._counted[key]
        self.bytes -= size
