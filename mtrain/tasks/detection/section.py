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
    ratio: float = Field(default=4.0, ge=1, description="largest canvas, as a multiple of the image's sides")
    fill: list[Annotated[float, Field(ge=0, le=255)]] = Field(
        default=[123.675, 116.28, 103.53], min_length=3, max_length=3, description="colour around it: red, green, blue"
    )


class CropSpec(Section):
    """Random crop to a window that holds the centre of at least one box (SSD: Liu et al. 2016, section 2.2)."""

    thresholds: list[Fraction] = Field(
        default=[0.0, 0.1, 0.3, 0.5, 0.7, 0.9],
        description="one is drawn: some box overlaps the window by at least this IoU",
    )
    allow_no_crop: bool = Field(default=True, description="one more choice beside the thresholds: no crop")
    scaling: Annotated[list[Fraction], AfterValidator(ascending)] = Field(
        default=[0.3, 1.0], description="square root of the window's share of the image's area"
    )
    aspect_ratio: Factors = Field(
        default=[0.5, 2.0], description="width / height of the window over those of the image"
    )
    num_attempts: Positive = Field(default=50, description="windows tried for a threshold before the next one is drawn")


class AugmentSpec(VariationSpec):
    """Augmentation of training images: YOLOv5's keys under its names, and the keys for `resize: stretch`."""

    mosaic: Annotated[Fraction, Off(0.0)] = Field(default=1.0, description="probability of a mosaic")
    mosaic9: Fraction = Field(
        default=0.0, description="of the mosaics, the share that uses nine images instead of four"
    )
    mixup: Fraction = Field(default=0.0, description="probability of mixing a mosaic with another one")
    close_mosaic_epochs: int = Field(default=0, ge=0, description="no mosaic and no mixup in this many last epochs")
    sizes: list[Annotated[Side, AfterValidator(_fits_strides)]] | None = Field(
        default=None,
        min_length=1,
        description="sides of the network input in pixels, one drawn for each update (multi-scale training); null: "
        "image_size, or multi_scale around it",
    )
    multi_scale: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="x: each update draws its input size from the multiples of 32 between image_size * (1 - x) and "
        "image_size * (1 + x); needs `resize: letterbox`; YOLOv5's --multi-scale is 0.5; 0: off",
    )
    interpolations: list[Literal["nearest", "linear", "area", "cubic", "lanczos4"]] = Field(
        default=["linear"], min_length=1, description="with `resize: stretch`: one drawn for each update"
    )
    albumentations: Annotated[str | None, May(files=PIPELINE_FILES)] = Field(
        default=None,
        description="pipeline that is applied after the other keys of augment: a file of albumentations.save (.yml, "
        ".json), or FILE.py:FUNCTION, relative to the spec",
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

    skip_missing: bool = Field(
        default=False, description="leave out images that are annotated but not there, and say how many"
    )
    cache: Literal["none", "ram", "disk"] = Field(default="none", description="where decoded images are kept")
    cache_dir: PathText | None = Field(
        default=None, description="folder of the disk cache; null: the user's cache folder"
    )
    decode: Literal["exact", "fast"] = Field(
        default="exact",
        description="of images for evaluation and prediction; exact: every pixel of the file; fast: JPEGs of at least twice "
        "the needed size are decoded at 1/2, 1/4 or 1/8, as those for training always are",
    )
    augment: AugmentSpec = Field(default=AugmentSpec(), description="of the training split")
    image_weights: bool = Field(
        default=False,
        description="each epoch draws its images with replacement, those more often whose classes are rare or had a low AP "
        "in the last evaluation before the epoch; YOLOv5's --image-weights",
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

    max_detections: int = Field(
        default=100,
        ge=100,
        description="the best predictions of one image that are scored; raise it where images hold more objects",
    )


def data_of(spec: Spec) -> DetectionDataSpec:
    """Return the data section of a detection job. Raises: ``SpecError`` if the job is of another task."""
    return narrowed(spec.data, DetectionDataSpec, where="data")


def evaluation_of(spec: Spec) -> DetectionEvaluateSpec:
    """Return the section on evaluation of a detection job. Raises: ``SpecError`` if the job is of another task."""
    return narrowed(spec.evaluate, DetectionEvaluateSpec, where="evaluate")
