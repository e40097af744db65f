"""The section of a spec that classification adds to the core's. Imports no framework and no image library."""

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from mtrain.data.images.section import PIPELINE_FILES, DividedDataSpec, VariationSpec, ascending
from mtrain.spec.model import Spec
from mtrain.spec.references import May
from mtrain.spec.section import Fraction, Section, narrowed

_PositiveRatio = Annotated[float, Field(gt=0, le=100)]


class RandomCropSpec(Section):
    """Random window of a training image that becomes the input (torchvision's RandomResizedCrop)."""

    scale: Annotated[list[Annotated[float, Field(gt=0, le=1)]], AfterValidator(ascending)] = Field(
        default=[0.08, 1.0], description="share of the image's area"
    )
    aspect_ratio: Annotated[list[_PositiveRatio], AfterValidator(ascending)] = Field(
        default=[3 / 4, 4 / 3], description="width / height of the window"
    )


class ClassificationAugmentSpec(VariationSpec):
    """Augmentation of training images: a random window, then changes of position, shape and colours, and flips."""

    random_crop: RandomCropSpec | None = Field(
        default=RandomCropSpec(),
        description="with `resize: crop`: a random window becomes the input; null: the centre, as in evaluation",
    )
    albumentations: Annotated[str | None, May(files=PIPELINE_FILES)] = Field(
        default=None,
        description="a file of albumentations.save, or PATH.py:Name, in place of all other keys of augment",
    )
    translate: float = Field(default=0.0, ge=0, le=0.9, description="shift, +- fraction of the side")
    scale: float = Field(default=0.0, ge=0, lt=1, description="zoom, 1 +- this")
    hsv_h: Fraction = Field(default=0.0, description="hue gain, +- fraction")
    hsv_s: Fraction = Field(default=0.0, description="saturation gain, +- fraction")
    hsv_v: Fraction = Field(default=0.0, description="value gain, +- fraction")


class ClassificationDataSpec(DividedDataSpec):
    """Images with one class each."""

    # Wider than what it replaces: only detection, which has no use for a centre crop, relies on the two other values.
    resize: Literal["crop", "letterbox", "stretch"] = Field(  # type: ignore[assignment]
        default="crop",
        description="crop: the central square, or in training a random window; letterbox: keep the shape, fill up "
        "with grey; stretch: both sides to image_size",
    )
    crop_share: float = Field(default=0.875, gt=0, le=1, description="with `resize: crop`: share of the shorter side")
    augment: ClassificationAugmentSpec = Field(default=ClassificationAugmentSpec(), description="of the training split")


def data_of(spec: Spec) -> ClassificationDataSpec:
    """Return the data section of a classification job. Raises: ``SpecError`` if the job is of another task."""
    return narrowed(spec.data, ClassificationDataSpec, where="data")
