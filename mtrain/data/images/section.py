"""Parts of a spec that tasks on images have in common. Imports no image library."""

from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from mtrain.spec.model import DataSpec
from mtrain.spec.section import Count, Fraction, Off, Positive, Section


def _each_once(classes: Any) -> Any:
    repeated = [name for name in classes if classes.count(name) > 1] if isinstance(classes, list) else []
    if repeated:
        raise ValueError(f"given {repeated[0]!r} twice, expected each class once")
    for old, new in classes.items() if isinstance(classes, dict) else ():
        if isinstance(new, list) and new:
            raise ValueError(f"given a list for {old!r}; the class of the data set comes first: {{{new[0]}: {old}}}")
        if new == "":
            raise ValueError(f"given no name for {old!r}; expected one, or null to leave the class out")
    return classes


PIPELINE_FILES = (".yml", ".yaml", ".json")
"""Suffixes of files with a pipeline of albumentations."""


def ascending(span: list[float]) -> list[float]:
    """Return a span as it is. Raises: ``ValueError`` unless it is [smallest, largest]."""
    if len(span) != 2 or span[0] > span[1]:
        raise ValueError(f"given {span}, expected [smallest, largest]")
    return span


Side = Annotated[int, Field(gt=0, le=16384)]
"""Side of a square image, in pixels."""
Span = Annotated[list[float], AfterValidator(ascending)]
"""Range [smallest, largest] of a random value."""
Factors = Annotated[list[Annotated[float, Field(ge=0)]], AfterValidator(ascending)]
"""Range [smallest, largest] of a random factor, not negative."""


class ImageDataSpec(DataSpec):
    """A data set of images, and the square input that the network is given."""

    image_size: Side = Field(default=640, description="side of the network input, in pixels")
    resize: Literal["letterbox", "stretch"] = Field(
        default="letterbox",
        description="letterbox: keep the shape, fill up with grey; stretch: both sides to image_size",
    )
    classes: (
        Annotated[
            Annotated[list[str], Field(min_length=1)] | Annotated[dict[str, str | None], Field(min_length=1)],
            BeforeValidator(_each_once),
        ]
        | None
    ) = Field(
        default=None,
        description="a list of those to learn, in label order; or a mapping that renames (mug: cup), merges, and "
        "leaves out (table: null; '*': all others)",
    )
    max_pixels: Positive = Field(default=120_000_000, description="pixels of the largest image that is decoded")

    @property
    def input_side(self) -> int:
        """See ``DataSpec.input_side``."""
        return self.image_size


class DividedDataSpec(ImageDataSpec):
    """A data set of images that may come as one set, from which the evaluation split is taken."""

    split: Annotated[float, Field(gt=0.0, lt=1.0)] | None = Field(
        default=None, description="share of `train` (null: of all images) that becomes the evaluation split"
    )
    split_seed: Count = Field(default=0, description="chooses the images for `split`")

    @model_validator(mode="after")
    def _evaluation_split_is_given_once(self) -> Self:
        if self.split is not None and self.val is not None:
            raise ValueError(
                f"split ({self.split}) takes the evaluation split from the training images, but val "
                f"({self.val}) is given too; set one of them to null"
            )
        return self


class VariationSpec(Section):
    """Random changes of training images under YOLOv5's names: position, shape, colours and flips."""

    degrees: float = Field(default=0.0, ge=0, le=180, description="rotation, +- degrees")
    translate: Annotated[float, Off(0.0)] = Field(
        default=0.1, ge=0, le=0.9, description="shift, +- fraction of the side"
    )
    scale: Annotated[float, Off(0.0)] = Field(default=0.5, ge=0, lt=1, description="zoom, 1 +- this")
    shear: float = Field(default=0.0, ge=0, le=45, description="+- degrees")
    perspective: float = Field(default=0.0, ge=0, le=0.001, description="+- per pixel")
    hsv_h: Annotated[Fraction, Off(0.0)] = Field(default=0.015, description="hue gain, +- fraction")
    hsv_s: Annotated[Fraction, Off(0.0)] = Field(default=0.7, description="saturation gain, +- fraction")
    hsv_v: Annotated[Fraction, Off(0.0)] = Field(default=0.4, description="value gain, +- fraction")
    flip_ud: Fraction = Field(default=0.0, description="probability of an up-down flip")
    flip_lr: Annotated[Fraction, Off(0.0)] = Field(default=0.5, description="probability of a left-right flip")


class DistortSpec(Section):
    """Random change of colours in four steps; each is applied with the given probability, in random order."""

    form: Literal["linear", "enhance"] = Field(
        default="linear",
        description="linear: PaddleDetection's until September 2023; enhance: its newer one, with Pillow's ImageEnhance",
    )
    probability: Fraction = Field(default=0.5, description="of each step")
    hue: float = Field(
        default=180.0,
        ge=0,
        le=180,
        description="linear: rotation in YIQ, +- degrees; enhance: in HSV, where PaddleDetection's 18 are 25.3",
    )
    saturation: Factors = Field(default=[0.5, 1.5], description="factor of the distance to grey")
    contrast: Factors = Field(
        default=[0.5, 1.5], description="linear: factor of all values; enhance: of their distance to the mean grey"
    )
    brightness: Span = Field(
        default=[0.5, 1.5], description="linear: grey levels (of 255) added; enhance: factor of all values"
    )

    @model_validator(mode="after")
    def _a_factor_is_not_negative(self) -> Self:
        if self.form == "enhance" and self.brightness[0] < 0:
            raise ValueError(
                f"brightness ({self.brightness}) is a factor with form: enhance and cannot be negative; "
                "form: linear adds grey levels"
            )
        return self
