"""The section of a spec that segmentation adds to the core's. Imports no framework and no image library."""

from typing import Annotated

from pydantic import AfterValidator, Field

from mtrain.data.images.section import DividedDataSpec, ascending
from mtrain.spec.model import Spec
from mtrain.spec.section import Fraction, Section, narrowed

_Zoom = Annotated[float, Field(gt=0, le=16)]


class SegmentationAugmentSpec(Section):
    """Augmentation of training images and their masks: size, window, flips and colours."""

    random_scale: Annotated[list[_Zoom], AfterValidator(ascending)] = Field(
        default=[0.5, 2.0], description="factor of the size at which the image fits the input"
    )
    flip_lr: Fraction = Field(default=0.5, description="probability of a left-right flip")
    flip_ud: Fraction = Field(default=0.0, description="probability of an up-down flip")
    hsv_h: Fraction = Field(default=0.015, description="hue gain, +- fraction")
    hsv_s: Fraction = Field(default=0.4, description="saturation gain, +- fraction")
    hsv_v: Fraction = Field(default=0.4, description="value gain, +- fraction")


class SegmentationDataSpec(DividedDataSpec):
    """Images with a mask that has a class for each pixel."""

    augment: SegmentationAugmentSpec = Field(default=SegmentationAugmentSpec(), description="of the training split")


def data_of(spec: Spec) -> SegmentationDataSpec:
    """Return the data section of a segmentation job. Raises: ``SpecError`` if the job is of another task."""
    return narrowed(spec.data, SegmentationDataSpec, where="data")
