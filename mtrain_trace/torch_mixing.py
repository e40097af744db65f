"""Digests and sketches of torch's tensors, computed where the tensors are; the definitions are those of ``mixing``.

Nothing here waits for a device: results are tensors, and ``Late`` brings them to the host with an asynchronous copy that
is read an update later.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from mtrain_trace import mixing

_WIDTHS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


@functools.lru_cache(maxsize=8)
def _coefficients(device: torch.device) -> Any:
    return torch.from_numpy(mixing.coefficients().copy()).to(device)


@functools.lru_cache(maxsize=8)
def _signs(device: torch.device) -> Any:
    # Apple's devices have no float64, and none of them is supported; everywhere else sums are kept in it.
    return torch.from_numpy(mixing.signs().copy()).to(device)


@functools.lru_cache(maxsize=65536)
def _period_signs(seed: int, period: int, device: torch.device) -> Any:
    return torch.tensor(mixing.period_signs(seed, period), dtype=torch.float64, device=device)


def _bits(flat: Any) -> Any:
    """Return the bits of each element as an integer tensor; integers by value."""
    if flat.is_floating_point():
        return flat.view(_WIDTHS[flat.element_size()])
    return flat.to(torch.int64) if flat.dtype == torch.bool else flat


def digest(tensor: Any, seed: int, *, start: int = 0) -> Any:
    """Return the digest of a tensor, or of a part that begins at the flat index ``start``, as an int64 scalar tensor."""
    bits = _bits(tensor.detach().reshape(-1))
    table = _coefficients(bits.device)
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for period, first, begin, count in mixing.pieces(start, bits.numel()):
        # Pieces of a period stay in the processor's cache; narrower bits are widened by the product itself.
        part = (bits[begin : begin + count] * table[first : first + count]).sum()
        total = total + part * mixing.period_factor(seed, period)
    return total


def sketch(tensor: Any, seed: int, *, start: int = 0) -> Any:
    """Return the sketch of a tensor or of a part of it, float64 of shape (LENGTH,)."""
    flat = tensor.detach().reshape(-1)
    table, length = _signs(flat.device), mixing.LENGTH
    total = torch.zeros(length, dtype=torch.float64, device=flat.device)
    for period, first, begin, count in mixing.pieces(start, flat.numel()):
        signed = flat[begin : begin + count] * table[first : first + count]
        before, after = first % length, -(first + count) % length
        if before or after:
            signed = torch.nn.functional.pad(signed, (before, after))
        total = total + signed.view(-1, length).sum(dim=0) * _period_signs(seed, period, flat.device)
    return total


def square(tensor: Any) -> Any:
    """Return the squared Euclidean length of a tensor, summed in float64."""
    flat = tensor.detach().reshape(-1).to(torch.float64)
    return flat @ flat


def rows(tensor: Any, seed: int) -> Any:
    """Return a digest of each row of a tensor, int64 of shape (rows,): of each sample, where samples are rows."""
    flat = tensor.detach().reshape(tensor.shape[0], -1)
    size = flat.element_size()
    if flat.is_floating_point() and flat.is_contiguous() and flat.shape[1] * size % 8 == 0 and flat.shape[1]:
        bits = flat.view(torch.int64)  # words of eight bytes: half the work for float32
    else:
        bits = _bits(flat)
    table = _coefficients(bits.device)
    total = torch.zeros(bits.shape[0], dtype=torch.int64, device=bits.device)
    for period, first, begin, count in mixing.pieces(0, bits.shape[1]):
        part = (bits[:, begin : begin + count] * table[first : first + count]).sum(dim=1)
        total = total + part * mixing.period_factor(seed, period)
    return total


class Late:
    """A tensor on its way to the host, which is read when it has arrived.

    On an accelerator the copy is asynchronous into page-locked memory, and an event tells when it is complete: reading an
    update later waits for nothing.
    """

    def __init__(self, tensor: Any) -> None:
        self._event = None
        if tensor.device.type == "cuda":
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor.detach(), non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()
        else:
            self._host = tensor.detach().clone()

    def read(self) -> Any:
        """Return the value as a number or a list of numbers."""
        if self._event is not None:
            self._event.synchronize()
        return self._host.tolist()
