"""The arrays of a training as pieces of named wholes: plain parameters, rows of a split one, stretches of a flat one.

A digest or a sketch of an array is the sum of those of its pieces, wherever they lie. So one description serves a plain
optimizer, FSDP2's rows, and DeepSpeed's flat partitions, which hold the ends and beginnings of many arrays.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from mtrain_trace import mixing, torch_mixing

WRAPPERS = ("module.", "_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_forward_module.")
"""Parts of parameter names that wrappers (DDP, torch.compile, FSDP, Fabric) put in front; names are compared without."""

Piece = tuple[str, Any, int]
"""(name of the whole, the tensor of a part of it, the part's first flat index in the whole)."""


@dataclass(frozen=True)
class Segment:
    """Where a part of a named array lies in a flat one."""

    name: str
    begin: int
    """First element in the flat array."""
    count: int
    start: int
    """First element in the named array."""


@dataclass
class Holding:
    """What an optimizer holds: its parameters, and the named arrays that they are or contain."""

    parameters: list[Any]
    names: dict[int, str] = field(default_factory=dict)
    """Names by the identity of the parameters that are arrays by themselves."""
    segments: dict[int, list[Segment]] = field(default_factory=dict)
    """Parts by the identity of the parameters that are flat."""
    groups: list[list[str]] = field(default_factory=list)
    """Names of the arrays of each parameter group."""
    shapes: dict[str, list[int]] = field(default_factory=dict)
    sharded: bool = False
    """Whether each rank holds parts that add up, and no copies."""

    def pieces(self, parameter: Any, tensor: Any, *, front: str = "") -> Iterator[Piece]:
        """Yield the pieces of a tensor that is laid out as a parameter: itself, its gradient (a sparse one too), a moment."""
        tensor = tensor.to_dense() if tensor.layout != torch.strided else tensor
        segments = self.segments.get(id(parameter))
        if segments is None:
            yield (front + self.names[id(parameter)], *local_part(tensor.detach()))
            return
        flat = tensor.detach().reshape(-1)
        for segment in segments:
            yield front + segment.name, flat[segment.begin : segment.begin + segment.count], segment.start


def plain_holding(optimizer: Any, roots: list[Any]) -> Holding:
    """Return what a plain optimizer holds, named as in the models that have been called."""
    parameters = list(parameters_of(optimizer))
    names = _names(optimizer, parameters, roots)
    return Holding(
        parameters,
        names,
        groups=[[names[id(p)] for p in group["params"]] for group in optimizer.param_groups],
        shapes={names[id(p)]: list(p.shape) for p in parameters},
        sharded=any(hasattr(p, "placements") for p in parameters),
    )


def _names(optimizer: Any, parameters: list[Any], roots: list[Any]) -> dict[int, str]:
    owned = {id(p) for p in parameters}
    roots = [root for root in roots if any(id(p) in owned for p in root.parameters())]
    names: dict[int, str] = {}
    for place, root in enumerate(roots):
        front = f"model{place}." if len(roots) > 1 else ""
        for name, parameter in names_of(root):
            names.setdefault(id(parameter), front + name)
    for number, group in enumerate(optimizer.param_groups):
        for place, parameter in enumerate(group["params"]):
            names.setdefault(id(parameter), f"group{number}.{place}")
    return names


def names_of(root: Any) -> Iterator[tuple[str, Any]]:
    """Yield the parameters of a model with their names as they are without wrappers and holders."""
    listed = [(plain_name(name), parameter) for name, parameter in root.named_parameters()]
    cut = common_front([name for name, _ in listed])
    for name, parameter in listed:
        yield name[cut:], parameter


def buffers_of(roots: list[Any]) -> Iterator[Piece]:
    """Yield the buffers of floating point numbers of all models that have been called."""
    for place, root in enumerate(roots):
        front = f"model{place}." if len(roots) > 1 else ""
        cut = common_front([plain_name(name) for name, _ in root.named_parameters()])
        for name, buffer in root.named_buffers():
            if buffer.is_floating_point():
                yield (front + plain_name(name)[cut:], *local_part(buffer.detach()))


def parameters_of(optimizer: Any) -> Iterator[Any]:
    """Yield the parameters of all groups of an optimizer."""
    for group in optimizer.param_groups:
        yield from group["params"]


def plain_name(name: str) -> str:
    """Return a parameter's name without the parts that wrappers add."""
    for part in WRAPPERS:
        name = name[len(part) :] if name.startswith(part) else name.replace("." + part, ".")
    return name


def common_front(names: list[str]) -> int:
    """Return the length of what all names begin with: a module that only holds the model, for its loss or its labels.

    Digests and sketches depend on names, so a model and the same model inside such a holder need the same ones.
    """
    cut = 0
    while names and all("." in name[cut:] for name in names) and len({name[cut:].split(".")[0] for name in names}) == 1:
        cut += names[0][cut:].index(".") + 1
    return cut


def local_part(tensor: Any) -> tuple[Any, int]:
    """Return (the part of a tensor that this rank holds, its first flat index in the whole).

    Raises:
        ValueError: the tensor is split otherwise than by rows, so that the part is not one stretch of the whole.
    """
    if not hasattr(tensor, "placements"):
        return tensor, 0
    splits = [placement for placement in tensor.placements if not placement.is_replicate()]
    if not splits:
        return (tensor.to_local(), 0) if tensor.device_mesh.get_rank() == 0 else (tensor.to_local()[:0], 0)
    if len(tensor.placements) > 1 or not splits[0].is_shard(0):
        raise ValueError(f"arrays that are split as {tensor.placements} are not recorded")
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    local = tensor.to_local()
    row = math.prod(tensor.shape[1:])
    return local, int(offset[0]) * row if local.numel() else 0


class Arrays:
    """Digests, sketches and squared lengths of arrays: computed on their device piece by piece, read when they arrived."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._columns: tuple[list[Any], list[Any], list[Any]] = ([], [], [])
        self._late: list[torch_mixing.Late] = []

    def add(self, pieces: Iterable[Piece], seeds: dict[str, int]) -> None:
        """Measure pieces on their device; ``seeds`` keeps the number of each name."""
        for name, part, start in pieces:
            if name not in seeds:
                seeds[name] = mixing.name_seed(name)
            self._names.append(name)
            self._columns[0].append(torch_mixing.digest(part, seeds[name], start=start))
            self._columns[1].append(torch_mixing.sketch(part, seeds[name], start=start))
            self._columns[2].append(torch_mixing.square(part))

    def send(self) -> Arrays | None:
        """Start the copy to the host; None where nothing was added."""
        if not self._names:
            return None
        device = self._columns[0][0].device
        self._late = [torch_mixing.Late(torch.stack([x.to(device) for x in column])) for column in self._columns]
        self._columns = ([], [], [])
        return self

    def read(self) -> dict[str, list[Any]]:
        """Return [digest, length squared, sketch] by name; the pieces of an array are added up."""
        digests, sketches, squares = (late.read() for late in self._late)
        found: dict[str, list[Any]] = {}
        for place, name in enumerate(self._names):
            row = [digests[place], squares[place], sketches[place]]
            if name in found:
                before = found[name]
                row = [before[0] + row[0], before[1] + row[1], [a + b for a, b in zip(before[2], row[2])]]
            found[name] = row
        return {
            name: [f"{row[0] & mixing.MASK:016x}", row[1], [float(f"{x:.9g}") for x in row[2]]]
            for name, row in found.items()
        }
