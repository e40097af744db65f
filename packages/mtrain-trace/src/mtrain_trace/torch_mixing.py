"""Digests and sketches of torch's tensors, computed where the tensors are; the definitions are those of ``mixing``.

Nothing here waits for a device: results are tensors, and ``Late`` brings them to the host with an asynchronous copy that
is read an update later.

Arrays are measured many at a time. A model has hundreds of small ones, and each call of torch costs as much as a pass over
thousands of numbers, so ``WeightLayout`` puts them one after the other into rows, and each pass reads a block of rows.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from mtrain_trace import mixing

_WIDTHS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# The copies of a block in float64 and int64, 1.5 megabytes, stay in the cache between the calls of torch.
BLOCK_ROWS = 256
"""Rows of a pass on a processor."""
# On an accelerator each call of torch costs more than on a processor, and memory for it is there.
STRETCH_ROWS = 8192
"""Rows whose sums are kept until they are added up; on an accelerator also those of a pass."""


@functools.lru_cache(maxsize=8)
def _coefficients(device: torch.device) -> Any:
    return _send(mixing.coefficients().copy(), device)


@functools.lru_cache(maxsize=32)
def _signs(device: torch.device, kind: torch.dtype) -> Any:
    return _send(mixing.signs().copy(), device).to(kind)


def _send(array: Any, device: torch.device) -> Any:
    """Return an array of numpy as a tensor on a device, without waiting for what the device is at."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def _bits(tensor: Any) -> Any:
    """Return the bits of each element as an integer tensor; integers by value."""
    if not tensor.is_floating_point():
        return tensor
    bits = tensor.view(_WIDTHS[tensor.element_size()])
    return mixing.fold(bits) if tensor.element_size() == 8 else bits


def _products(bits: Any, table: Any) -> Any:
    """Return the product of a matrix and a vector of int64, modulo 2^64."""
    if bits.device.type == "cpu":
        return torch.mv(bits.to(torch.int64), table)
    return (bits * table).sum(dim=1)  # accelerators know products of matrices for floating point numbers alone


def rows(tensor: Any, seed: int) -> Any:
    """Return a digest of each row of a tensor, int64 of shape (rows,): of each sample, where samples are rows."""
    flat = tensor.detach().reshape(tensor.shape[0], -1)
    size = flat.element_size()
    if flat.is_floating_point() and flat.shape[1] * size % 8 == 0 and flat.shape[1]:
        flat = flat.contiguous()  # the digest of a sample does not depend on where it lies
        # A view as words of eight bytes needs an address that eight divides.
        flat = flat.clone() if flat.storage_offset() * size % 8 else flat
        bits = mixing.fold(flat.view(torch.int64))  # words of eight bytes: half the work for float32
    else:
        bits = _bits(flat)
    table = _coefficients(bits.device)
    total = torch.zeros(bits.shape[0], dtype=torch.int64, device=bits.device)
    for period, first, begin, count in mixing.pieces(0, bits.shape[1]):
        part = _products(bits[:, begin : begin + count], table[first : first + count])
        total = total + part * mixing.period_factor(seed, period)
    return total


@dataclass
class _Block:
    """Rows of one pass."""

    begin: int
    end: int
    """First row of the stretch, and the one behind the last."""
    parts: list[tuple[int, Any]] = field(default_factory=list)
    """What fills them, in order: (number of a piece, the slice of it; None: all of it), or (-1, a tensor of zeros)."""


@dataclass
class _Stretch:
    """Blocks whose rows are added up at once, and what each row is multiplied by."""

    blocks: list[_Block]
    factors: Any
    signs: Any
    owners: Any
    """Number of the piece of each row."""


class WeightLayout:
    """Where pieces of arrays lie in rows of ``mixing.ROW`` elements, each piece from the start of a row of its array.

    Args:
        places: (seed of the name, first flat index in the whole array, elements) of each piece.
        kind: their format.
        device: where they are.
    """

    def __init__(self, places: Sequence[tuple[int, int, int]], kind: torch.dtype, device: torch.device) -> None:
        self.pieces, self.device = len(places), device
        rows = [
            (start % mixing.ROW + count + mixing.ROW - 1) // mixing.ROW if count else 0 for _, start, count in places
        ]
        owners = np.repeat(np.arange(len(places)), rows)
        ends = np.cumsum(rows, dtype=np.int64)
        firsts = np.array([start // mixing.ROW for _, start, _ in places], dtype=np.int64) - (ends - rows)
        numbers = (np.arange(len(owners)) + firsts[owners]).astype(np.uint64)
        seeds = np.array([seed for seed, _, _ in places], dtype=np.uint64)[owners]
        zeros = torch.zeros(mixing.ROW, dtype=kind, device=device)
        blocks = _blocks(places, rows, BLOCK_ROWS if device.type == "cpu" else STRETCH_ROWS, zeros)
        self._block_rows = max((block.end - block.begin for block in blocks), default=0)
        self._stretches = []
        for begin in range(0, len(owners), STRETCH_ROWS):
            part = slice(begin, begin + STRETCH_ROWS)
            inside = [block for block in blocks if begin <= block.begin < begin + STRETCH_ROWS]
            tables = (mixing.row_factors(seeds[part], numbers[part]), mixing.row_signs(seeds[part], numbers[part]))
            self._stretches.append(
                _Stretch(
                    [_Block(block.begin - begin, block.end - begin, block.parts) for block in inside],
                    *(_send(table, device) for table in (*tables, owners[part].astype(np.int64))),
                )
            )

    def measure(self, tensors: Sequence[Any], *, one_by_one: bool) -> tuple[Any, Any]:
        """Return (digests, [squared length, sketch]) of the pieces, or of all of them together.

        Args:
            tensors: the pieces, in any shape.
            one_by_one: whether each piece is measured for itself: int64 of shape (pieces,) and float64 of shape
                (pieces, 1 + LENGTH); otherwise (1,) and (1, 1 + LENGTH).
        """
        count = self.pieces if one_by_one else 1
        digests = torch.zeros(count, dtype=torch.int64, device=self.device)
        floats = torch.zeros(count, 1 + mixing.LENGTH, dtype=torch.float64, device=self.device)
        if not self._stretches:
            return digests, floats
        passes = _Passes([x if x.dim() == 1 else x.reshape(-1) for x in tensors], self._block_rows)
        for stretch in self._stretches:
            sums = [passes.read(block) for block in stretch.blocks]
            bits, lengths, sketches = (column[0] if len(sums) == 1 else torch.cat(column) for column in zip(*sums))
            bits, squares, sketches = bits * stretch.factors, lengths**2, sketches * stretch.signs
            if one_by_one:
                digests.index_add_(0, stretch.owners, bits)
                floats.index_add_(0, stretch.owners, torch.cat([squares[:, None], sketches], dim=1))
            else:
                digests += bits.sum()
                floats[0, 0] += squares.sum()
                floats[0, 1:] += sketches.sum(dim=0)
        return digests, floats


def _blocks(places: Sequence[tuple[int, int, int]], rows: Sequence[int], most: int, zeros: Any) -> list[_Block]:
    """Divide the rows of all pieces into blocks of up to ``most`` rows; the ends of pieces are filled up with zeros."""
    blocks: list[_Block] = []
    end = 0
    for piece, ((_, start, count), left) in enumerate(zip(places, rows)):
        done = -(start % mixing.ROW)
        while left:
            if not blocks or blocks[-1].end - blocks[-1].begin == most:
                blocks.append(_Block(end, end))
            block = blocks[-1]
            taken = min(left, most - (block.end - block.begin))
            first, last = max(done, 0), min(done + taken * mixing.ROW, count)
            before, after = first - done, done + taken * mixing.ROW - last
            block.parts += [(-1, zeros[:before])] if before else []
            block.parts.append((piece, None if last - first == count else slice(first, last)))
            block.parts += [(-1, zeros[:after])] if after else []
            done, left, end = done + taken * mixing.ROW, left - taken, end + taken
            block.end = end
    return blocks


class _Passes:
    """Reads blocks of rows of flat tensors of one format; the memory of a block serves all of them."""

    def __init__(self, tensors: list[Any], rows: int) -> None:
        self._tensors = tensors
        kind, device = tensors[0].dtype, tensors[0].device
        self._flat = torch.empty(rows * mixing.ROW, dtype=kind, device=device)
        self._bits = torch.empty(rows, mixing.ROW, dtype=torch.int64, device=device)
        self._coefficients = _coefficients(device)[: mixing.ROW]
        self._signs = _signs(device, kind)

    def read(self, block: _Block) -> tuple[Any, Any, Any]:
        """Return (sums of bits, lengths, sums under signs) of each row."""
        rows = block.end - block.begin
        flat, wide = self._flat[: rows * mixing.ROW], self._bits[:rows]
        tensors = self._tensors
        parts = [
            part if piece < 0 else tensors[piece] if part is None else tensors[piece][part]
            for piece, part in block.parts
        ]
        torch.cat(parts, out=flat)
        digests = _products(wide.copy_(_bits(flat).view(rows, mixing.ROW)), self._coefficients)
        # A sign changes no length, so it is given while a number is still narrow. The bits have been read: their memory serves.
        wide = wide.view(torch.float64).copy_(flat.view(rows, mixing.ROW).mul_(self._signs))
        return digests, torch.linalg.vector_norm(wide, dim=1), wide.view(rows, -1, mixing.LENGTH).sum(dim=1)


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
