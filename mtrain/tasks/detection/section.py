"""The sections of a spec that detection adds to the core's. Imports no framework and no image library."""

from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from mtrain.data.images.section import (
    PIPELINE_FILES,
    DistortSpec,
    DividedDataSpec,
    Factors,
    Side,
    VariationSpec,
    ascending,
)
from mtrain.spec.model import EvaluateSpec, Spec
from mtrain.spec.pathnames import PathText
from mtrain.spec.references import May
from mtrain.spec.section import Fraction, Off, Positive, Section, narrowed


def _fits_strides(side: int) -> int:
    if side % STRIDE:
        raise ValueError(f"given {side}, expected a multiple of {STRIDE}; use {max(round(side / STRIDE), 1) * STRIDE}")
    return side


STRIDE = 32
"""Pixels of the network input per cell of the coarsest feature map; the input's side must be a multiple of it."""


class ExpandSpec(Section):
    """Random placement of the image on a larger canvas."""

    probability: Fraction = Field(default=0.5, description="of an expansion")
    ratio: float = Field(default=4.0, ge=1, description="largest canvas, as a multiple of the sides")
    fill: list[Annotated[float, Field(ge=0, le=255)]] = Field(
        default=[123.675, 116.28, 103.53], min_length=3, max_length=3, description="colour around it: red, green, blue"
    )


class CropSpec(Section):
    """Random crop to a window that holds the centre of at least one box (SSD: Liu et al. 2016, section 2.2)."""

    thresholds: list[Fraction] = Field(
        default=[0.0, 0.1, 0.3, 0.5, 0.7, 0.9], description="one is drawn: least IoU of some box with the window"
    )
    allow_no_crop: bool = Field(default=True, description="no crop is one more choice")
    scaling: Annotated[list[Fraction], AfterValidator(ascending)] = Field(
        default=[0.3, 1.0], description="square root of the window's share of the image's area"
    )
    aspect_ratio: Factors = Field(default=[0.5, 2.0], description="width / height over those of the image")
    num_attempts: Positive = Field(default=50, description="windows tried for a threshold")


class AugmentSpec(VariationSpec):
    """Augmentation of training images: YOLOv5's keys under its names, and the keys for `resize: stretch`."""

    mosaic: Annotated[Fraction, Off(0.0)] = Field(default=1.0, description="probability of a mosaic")
    mosaic9: Fraction = Field(default=0.0, description="share of the mosaics that uses nine images")
    mixup: Fraction = Field(default=0.0, description="probability of mixing two mosaics")
    close_mosaic_epochs: int = Field(default=0, ge=0, description="last epochs without mosaic and mixup")
    sizes: list[Annotated[Side, AfterValidator(_fits_strides)]] | None = Field(
        default=None, min_length=1, description="sides in pixels, one drawn for each update"
    )
    multi_scale: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="x: each update draws a size between image_size * (1 - x) and * (1 + x); needs `resize: "
        "letterbox`; YOLOv5: 0.5",
    )
    interpolations: list[Literal["nearest", "linear", "area", "cubic", "lanczos4"]] = Field(
        default=["linear"], min_length=1, description="with `resize: stretch`: one drawn for each update"
    )
    albumentations: Annotated[str | None, May(files=PIPELINE_FILES)] = Field(
        default=None, description="a file of albumentations.save, or PATH.py:Name, after the other keys of augment"
    )
    distort: DistortSpec | None = Field(default=None, description="with `resize: stretch`; null: none")
    expand: ExpandSpec | None = Field(default=None, description="with `resize: stretch`; null: none")
    crop: CropSpec | None = Field(default=None, description="with `resize: stretch`; null: none")


_LETTERBOX_ONLY: dict[str, Any] = dict.fromkeys(
    ("mosaic", "mosaic9", "mixup", "degrees", "translate", "scale", "shear", "perspective", "multi_scale"), 0.0
)
"""Keys of `augment` that need `resize: letterbox`, with the value that switches each one off."""
_STRETCH_ONLY: dict[str, Any] = dict.fromkeys(("distort", "expand", "crop")) | {"interpolations": ["linear"]}
"""Keys of `augment` that need `resize: stretch`, with the value that switches each one off."""


class DetectionDataSpec(DividedDataSpec):
    """Images with boxes around objects."""

    skip_missing: bool = Field(default=False, description="leave out annotated images that are not there")
    cache: Literal["none", "ram", "disk"] = Field(default="none", description="where decoded images are kept")
    cache_dir: PathText | None = Field(
        default=None, description="folder of the disk cache; null: the user's cache folder"
    )
    decode: Literal["exact", "fast"] = Field(
        default="exact",
        description="fast: large JPEGs of evaluation are decoded at 1/2, 1/4 or 1/8, as those of training always are",
    )
    augment: AugmentSpec = Field(default=AugmentSpec(), description="of the training split")
    image_weights: bool = Field(
        default=False,
        description="each epoch draws with replacement, more of rare classes and of those with a low AP; YOLOv5's "
        "--image-weights",
    )

    @model_validator(mode="after")
    def _augmentation_suits_the_resize(self) -> Self:
        unsuitable, remedy = _LETTERBOX_ONLY, "set them to 0, or take resize: letterbox"
        if self.resize == "letterbox":
            unsuitable, remedy = _STRETCH_ONLY, "leave them out, or take resize: stretch"
        active = [f"augment.{name}" for name, off in unsuitable.items() if getattr(self.augment, name) != off]
        if active:
            raise ValueError(f"resize is {self.resize}, which does not go with {', '.join(active)}; {remedy}")
        if self.augment.multi_scale and self.augment.sizes is not None:
            raise ValueError("augment.sizes and augment.multi_scale both set the sides of the input; keep one of them")
        return self


class DetectionEvaluateSpec(EvaluateSpec):
    """How often and in what way boxes are scored."""

    max_detections: int = Field(default=100, ge=100, description="best predictions of one image that are scored")


def data_of(spec: Spec) -> DetectionDataSpec:
    """Return the data section of a detection job. Raises: ``SpecError`` if the job is of another task."""
    return narrowed(spec.data, DetectionDataSpec, where="data")


def evaluation_of(spec: Spec) -> DetectionEvaluateSpec:
    """Return the section on evaluation of a detection job. Raises: ``SpecError`` if the job is of another task."""
    return narrowed(spec.evaluate, DetectionEvaluateSpec, where="evaluate")
