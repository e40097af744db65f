"""The options of the U-Net. Needs no framework."""

from typing import Annotated

from pydantic import Field

from mtrain.models.common.segmenter import SegmenterOptions


class UNetOptions(SegmenterOptions):
    """Options of the U-Net, given in the spec as ``model.options``."""

    width: Annotated[int, Field(ge=1)] = 32
    """Channels at full size; each halving of the size doubles them."""
    depth: Annotated[int, Field(ge=1, le=6)] = 4
    """Number of halvings."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Probability with which training drops an element of the smallest feature map."""
