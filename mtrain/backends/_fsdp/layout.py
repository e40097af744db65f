"""Where a mesh of ranks holds the parts of each array."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from mtrain.backends._torch.sharded.shards import Box, Boxes
from mtrain.core.interfaces import Mesh


@dataclass(frozen=True, slots=True)
class MeshLayout:
    """The mesh of a job, as torch has it."""

    mesh: Mesh
    ranks: DeviceMesh = field(repr=False)

    @classmethod
    def of(cls, mesh: Mesh, device_type: str) -> "MeshLayout":
        """Connect the ranks of each line of the mesh; every rank must call."""
        lengths = (mesh.pipeline, mesh.replicate, mesh.shard, mesh.tensor)
        names = ("pipeline", "replicate", "shard", "tensor")
        return cls(mesh, init_device_mesh(device_type, lengths, mesh_dim_names=names))

    @property
    def data(self) -> DeviceMesh:
        """The ranks over which FSDP averages gradients: those of its stage with this one's place in their tensor group."""
        return self.ranks["shard"] if self.mesh.replicate == 1 else self.ranks["replicate", "shard"]

    @property
    def tensor(self) -> DeviceMesh:
        """The ranks of this one's tensor group."""
        return self.ranks["tensor"]

    @property
    def pipeline(self) -> DeviceMesh:
        """The ranks that compute this one's samples one after the other: one of each stage."""
        return self.ranks["pipeline"]

    def boxes(
        self,
        shapes: Mapping[str, Sequence[int]],
        axes: Mapping[str, int],
        stages: Mapping[str, Sequence[int]] | None = None,
    ) -> dict[str, Boxes]:
        """Return where all ranks' parts of arrays lie.

        Args:
            shapes: Shapes of whole arrays by name.
            axes: The axis along which tensor groups cut an array, by name of those that they cut.
            stages: The stages that hold an array, by name; None: there is one, with all.
        """
        alone = {} if stages is None else stages
        return {
            name: self._boxes(tuple(shape), axes.get(name), alone.get(name, (0,))) for name, shape in shapes.items()
        }

    def _boxes(self, shape: tuple[int, ...], axis: int | None, stages: Sequence[int]) -> Boxes:
        mesh = self.mesh
        held: list[Box] = []
        first: list[bool] = []
        for rank in range(mesh.size):
            place, stage = rank % mesh.tensor, mesh.stage(rank)
            replica, part = divmod(mesh.data_rank(rank), mesh.shard)
            box = [(0, length) for length in shape]
            if stage not in stages:
                held.append(((0, 0), *box[1:]))
                first.append(False)
                continue
            if axis is not None:
                box[axis] = piece(box[axis], place, mesh.tensor)
            # FSDP cuts what a tensor group has left a rank, along the first axis.
            box[0] = piece(box[0], part, mesh.shard)
            held.append(tuple(box))
            first.append(stage == stages[0] and replica == 0 and (axis is not None or place == 0))
        return Boxes(tuple(held), tuple(first))


def piece(bounds: tuple[int, int], number: int, count: int) -> tuple[int, int]:
    """Return piece ``number`` of ``count`` as ``torch.chunk`` cuts them: of equal length, but for the last ones."""
    first, end = bounds
    each = -(-(end - first) // count)
    return min(first + number * each, end), min(first + (number + 1) * each, end)


def cut_axes(model: nn.Module) -> dict[str, int]:
    """Return the axis along which a tensor group cuts each of the parameters that it cuts, by name."""
    axes: dict[str, int] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if isinstance(parameter, DTensor):
            (placement,) = parameter.placements
            if isinstance(placement, Shard):
                axes[name] = placement.dim % parameter.dim()
    return axes


def shapes_of(model: nn.Module) -> dict[str, torch.Size]:
    """Return the shapes of a model's parameters by name."""
    return {name: parameter.shape for name, parameter in model.named_parameters()}
