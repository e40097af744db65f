"""A U-Net as a model plugin. Only ``build`` needs a framework."""

from collections.abc import Sequence
from typing import ClassVar

from pydantic import BaseModel

from mtrain.core.interfaces import Collective, Module, Task
from mtrain.models.common.segmenter import Segmenter
from mtrain.models.unet.options import UNetOptions


class UNet(Segmenter):
    """The U-Net: Ronneberger et al. 2015 (arXiv 1505.04597), with padding and BatchNorm; 7.8 million parameters."""

    Options: ClassVar[type[BaseModel]] = UNetOptions
    spans_ranks: ClassVar[bool] = True
    recomputable: ClassVar[Sequence[str]] = (r"^(down|up)\.\d+$",)

    @property
    def stride(self) -> int:
        """Return the factor between the largest and the smallest feature map."""
        return int(2**self.options.depth)

    @property
    def size_step(self) -> int:  # type: ignore[override]
        """Return ``stride``: nothing in the network depends on the size of images."""
        return self.stride

    def build(self, task: Task, collective: Collective) -> Module:
        """Build the network (``models.unet.network.Network``) on the bound framework."""
        from mtrain.models.unet.network import Network

        return Network(self.options, class_count=len(task.class_names), collective=collective)
