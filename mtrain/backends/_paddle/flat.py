"""Store many tensors in one piece of memory, so that one kernel call updates them all."""

from collections.abc import Iterable, Mapping

import paddle
from paddle import Tensor

from mtrain.backends._paddle.internals import share_memory, view


class Flat:
    """Tensors of one dtype moved into one vector, ``buffer``; each tensor object stays valid and shares its memory."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        """Move ``tensors`` into one buffer: at least one, none of them empty."""
        self.tensors = tensors
        self.buffer = join(tensors.values())
        self._starts = [0]
        for i, tensor in enumerate(tensors.values()):
            self._starts.append(self._starts[-1] + tensor.size)
            share_memory(self.span(i, i + 1), tensor)

    def zeros(self) -> "Flat":
        """Return zeros in the same layout."""
        return Flat({name: paddle.zeros_like(tensor).detach() for name, tensor in self.tensors.items()})

    def copy(self) -> "Flat":
        """Return a copy in memory of its own."""
        return Flat({name: tensor.detach().clone() for name, tensor in self.tensors.items()})

    def span(self, first: int, end: int) -> Tensor:
        """Return tensors ``first`` up to ``end`` (excluded) as one vector that shares their memory."""
        return view(self.buffer, self._starts[first], self._starts[end])

    def check(self) -> None:
        """Assert that the tensors still lie in the buffer: a tensor moved elsewhere would no longer get its updates."""
        start, width = self.buffer.data_ptr(), self.buffer.element_size()
        for name, tensor in self.tensors.items():
            assert tensor.data_ptr() == start, f"{name} was given memory of its own after the optimizer was made"
            start += tensor.size * width


def join(tensors: Iterable[Tensor]) -> Tensor:
    """Return a new vector of all elements, in C order."""
    return paddle.concat([tensor.detach().reshape([-1]) for tensor in tensors])
