"""The section of a spec that classification adds to the core's. Imports no framework and no picture library."""

from pydantic import Field

from mtrain.data.images.section import PictureDataSpec, VariationSpec
from mtrain.spec.model import Spec
from mtrain.spec.section import narrowed


class ClassificationDataSpec(PictureDataSpec):
    """Pictures with one class each."""

    augment: VariationSpec = Field(default=VariationSpec(), description="of the training split")


def data_of(spec: Spec) -> ClassificationDataSpec:
    """Return the data section of a classification job. Raises: ``SpecError`` if the job is of another task."""
    return narrowed(spec.data, ClassificationDataSpec, where="data")
