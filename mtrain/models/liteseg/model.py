"""A real-time segmentation network in the manner of PP-LiteSeg as a model plugin. Only ``build`` needs a framework."""

from collections.abc import Sequence
from typing import ClassVar

from pydantic import BaseModel

from mtrain.core.interfaces import Collective, Module, Task
from mtrain.models.common.segmenter import Segmenter
from mtrain.models.liteseg.options import LiteSegOptions


class LiteSeg(Segmenter):
    """A network of the design of PP-LiteSeg: Peng et al. 2022 (arXiv 2204.02681), on the encoder of STDC: Fan et al. 2021
    (arXiv 2104.13188); 6.7 million parameters."""

    Options: ClassVar[type[BaseModel]] = LiteSegOptions
    spans_ranks: ClassVar[bool] = True
    recomputable: ClassVar[Sequence[str]] = (
        r"^stem\.\d+$",
        r"^stages\.\d+\.\d+$",
        r"^(pooling|fuse_16|fuse_8|head)$",
    )

    @property
    def stride(self) -> int:
        """Return the factor between the input and the smallest feature map."""
        return 32

    def build(self, task: Task, collective: Collective) -> Module:
        """Build the network (``models.liteseg.network.Network``) on the bound framework."""
        from mtrain.models.liteseg.network import Network

        return Network(self.options, class_count=len(task.class_names), collective=collective)
