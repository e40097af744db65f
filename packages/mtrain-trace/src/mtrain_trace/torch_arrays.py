"""The arrays of a training as pieces of named wholes: plain parameters, rows of a split one, stretches of a flat one.

A digest or a sketch of an array is the sum of those of its pieces, wherever they lie. So one description serves a plain
optimizer, FSDP2's rows, and DeepSpeed's flat partitions, which hold the ends and beginnings of many arrays.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from mtrain_trace import mixing, naming, torch_mixing

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
    cut = naming.common_front([name for name, _ in listed])
    for name, parameter in listed:
        yield name[cut:], parameter


def buffers_of(roots: list[Any], cuts: dict[int, int]) -> Iterator[Piece]:
    """Yield the buffers of floating point numbers of all models that have been called; ``cuts`` keeps the common fronts."""
    for place, root in enumerate(roots):
        front = f"model{place}." if len(roots) > 1 else ""
        if id(root) not in cuts:
            cuts[id(root)] = naming.common_front([plain_name(name) for name, _ in root.named_parameters()])
        for name, buffer in root.named_buffers():
            if buffer.is_floating_point():
                yield (front + plain_name(name)[cuts[id(root)] :], *local_part(buffer.detach()))


def parameters_of(optimizer: Any) -> Iterator[Any]:
    """Yield the parameters of all groups of an optimizer."""
    for group in optimizer.param_groups:
        yield from group["params"]


@functools.lru_cache(maxsize=65536)
def plain_name(name: str) -> str:
    """Return a parameter's name without the parts that wrappers add."""
    for part in WRAPPERS:
        name = name[len(part) :] if name.startswith(part) else name.replace("." + part, ".")
    return name


def local_part(tensor: Any) -> tuple[Any, int]:
    """Return (the part of a tensor that this rank holds, its first flat index in the whole).

    Raises:
        ValueError: the tensor is split otherwise than by rows, so that the part is not one stretch of the whole.
    """
    if not hasattr(tensor, "placements"):
        return tensor, 0
    splits = [placement for placement in tensor.placements if not placement.is_replicate()]
    if not splits:
        # Copies count once: the parts of all ranks are added up.
        return (tensor.to_local(), 0) if tensor.device_mesh.get_rank() == 0 else (tensor.to_local()[:0], 0)
    # Other splits would take several stretches for each piece; no digest of rows serves them.
    if len(tensor.placements) > 1 or not splits[0].is_shard(0):
        raise ValueError(f"arrays that are split as {tensor.placements} are not recorded")
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    local = tensor.to_local()
    row = math.prod(tensor.shape[1:])
    return local, int(offset[0]) * row if local.numel() else 0


class Meter:
    """Measures the arrays of one optimizer, and keeps how they are laid out from one update to the next."""

    def __init__(self) -> None:
        self._seeds: dict[str, int] = {}
        self._layouts: dict[Any, tuple[Any, torch_mixing.WeightLayout]] = {}

    def measure(self, part: str, pieces: Iterable[Piece], *, one_by_one: bool) -> Arrays | None:
        """Measure pieces on their devices, and start the copy of the results to the host; None where there are none.

        Args:
            part: what they are, such as ``weights``; the layout of an update before serves where nothing has changed.
            pieces: the arrays.
            one_by_one: whether each array is measured for itself, or all of them together.
        """
        groups: dict[tuple[Any, Any], list[Piece]] = {}
        for piece in pieces:
            groups.setdefault((piece[1].dtype, piece[1].device), []).append(piece)
        lates = []
        for key, group in groups.items():
            digests, floats = self._layout(part, key, group).measure([x for _, x, _ in group], one_by_one=one_by_one)
            names = [name for name, _, _ in group] if one_by_one else [""]
            lates.append((names, torch_mixing.Late(digests), torch_mixing.Late(floats)))
        return Arrays(lates) if lates else None

    def _layout(self, part: str, key: tuple[Any, Any], group: list[Piece]) -> torch_mixing.WeightLayout:
        places = [(name, start, tensor.numel()) for name, tensor, start in group]
        place = (part, group[0][0], *key)  # an engine measures the arrays of a part group by group
        # Layouts take as long as a measurement to make, and stay the same until a group is added.
        known = self._layouts.get(place)
        if known is None or known[0] != places:
            for name, _, _ in places:
                if name not in self._seeds:
                    self._seeds[name] = mixing.name_seed(name)
            layout = torch_mixing.WeightLayout([(self._seeds[name], start, n) for name, start, n in places], *key)
            known = self._layouts[place] = (places, layout)
        return known[1]


class Arrays:
    """Digests, squared lengths and sketches of the arrays of one part, on their way to the host."""

    def __init__(self, lates: list[tuple[list[str], Any, Any]]) -> None:
        self._lates = lates

    def join(self, other: Arrays | None) -> Arrays:
        """Return these arrays and further ones of the same part."""
        return self if other is None else Arrays([*self._lates, *other._lates])

    def read(self) -> dict[str, list[Any]]:
        """Return [digest, length squared, sketch] by name, as lines of a trace hold them; the pieces of an array are added up.

        Where all arrays were measured together, their sum has the name ``""``.
        """
        found: dict[str, list[Any]] = {}
        for names, digests, floats in self._lates:
            for name, digest, (square, *sketch) in zip(names, digests.read(), floats.read()):
                before = found.get(name)
                if before is not None:
                    digest, square = before[0] + digest, before[1] + square
                    sketch = [a + b for a, b in zip(before[2], sketch)]
                found[name] = [digest, square, sketch]
        return {
            name: [mixing.as_hex(row[0]), row[1], [float(f"{x:.9g}") for x in row[2]]] for name, row in found.items()
        }
