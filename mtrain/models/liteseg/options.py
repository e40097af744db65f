"""The options of the real-time network. Needs no framework."""

from typing import Annotated

from pydantic import Field

from mtrain.models.common.segmenter import SegmenterOptions


class LiteSegOptions(SegmenterOptions):
    """Options of the network, given in the spec as ``model.options``."""

    width: Annotated[int, Field(ge=8, multiple_of=8)] = 64
    """Channels at a quarter of the size; the three stages after it have 4, 8 and 16 times as many."""
    blocks: Annotated[int, Field(ge=1)] = 2
    """Modules of each stage."""
    decoder: tuple[int, int, int] = (32, 64, 128)
    """Channels of the decoder at an eighth, a sixteenth and a thirty-second of the size."""
    auxiliary: Annotated[float, Field(ge=0)] = 0.0
    """Factor of the cross entropy of a second head, at a sixteenth of the size, which only training uses; 0: no such head."""
