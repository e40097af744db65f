"""What the task adds to a spec. Imports no framework and no image library."""

from pydantic import Field

from mtrain.data.images.section import DividedDataSpec
from mtrain.spec.model import EvaluateSpec, Spec
from mtrain.spec.section import Fraction, Section, narrowed


class KeypointAugmentSpec(Section):
    """Random changes of the window that is cut out for training."""

    degrees: float = Field(default=20.0, ge=0, le=180, description="rotation, +- degrees")
    scale: float = Field(default=0.2, ge=0, lt=1, description="zoom, 1 +- this")
    translate: float = Field(default=0.05, ge=0, lt=1, description="shift, +- fraction of the window")
    flip_lr: Fraction = Field(
        default=0.5, description="probability of a left-right flip, which swaps left and right points"
    )


class KeypointDataSpec(DividedDataSpec):
    """Images with the points of one person or thing in each box."""

    padding: float = Field(default=1.25, ge=1, le=4, description="side of the window around a box, in sides of the box")
    augment: KeypointAugmentSpec = Field(default=KeypointAugmentSpec(), description="of the training split")


class KeypointEvaluateSpec(EvaluateSpec):
    """How often and in what way points are scored."""

    near: float = Field(
        default=0.1, gt=0, le=1, description="distance within which a point counts as found, in longer sides of the box"
    )


def data_of(spec: Spec) -> KeypointDataSpec:
    """Return the data section of a keypoint job. Raises: `SpecError` if the job is of another task."""
    return narrowed(spec.data, KeypointDataSpec, where="data")


def evaluation_of(spec: Spec) -> KeypointEvaluateSpec:
    """Return the section on evaluation of a keypoint job. Raises: `SpecError` if the job is of another task."""
    return narrowed(spec.evaluate, KeypointEvaluateSpec, where="evaluate")
