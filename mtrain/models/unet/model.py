"""A U-Net as a model plugin. Only ``build`` needs a framework."""

from typing import Annotated, ClassVar

from pydantic import BaseModel, Field

from mtrain.core.interfaces import Collective, Module, Task
from mtrain.models.common.segmenter import Segmenter, SegmenterOptions


class UNetOptions(SegmenterOptions):
    """Options of the U-Net, given in the spec as ``model.options``."""

    width: Annotated[int, Field(ge=1)] = 32
    """Channels at full size; each halving of the size doubles them."""
    depth: Annotated[int, Field(ge=1, le=6)] = 4
    """Number of halvings."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Probability with which training drops an element of the smallest feature map."""


class UNet(Segmenter):
    """The U-Net: Ronneberger et al. 2015 (arXiv 1505.04597), with padding and BatchNorm; 7.8 million parameters."""

    Options: ClassVar[type[BaseModel]] = UNetOptions

    @property
    def stride(self) -> int:
        """Return the factor between the largest and the smallest feature map."""
        return int(2**self.options.depth)

    def build(self, task: Task, collective: Collective) -> Module:
        """Build the network (``models.unet.network.Network``) on the bound framework."""
        from mtrain.models.unet.network import Network

        return Network(self.options, class_count=len(task.class_names), collective=collective)
