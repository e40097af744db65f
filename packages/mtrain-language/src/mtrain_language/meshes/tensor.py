"""Tensor parallelism: the ranks of a group compute the same samples together, each a part of every layer."""

from collections.abc import Mapping

from torch import nn

from mtrain.backends._fsdp.layout import MeshLayout
from mtrain.core.interfaces import Mesh
from mtrain_language.meshes import tensor_styles, vocabulary
from mtrain_language.meshes.sequence import share_texts
from mtrain_language.meshes.tensor_adapters import with_adapters
from mtrain_language.meshes.tensor_plan import Style, check_sizes, plan_of, with_ties, without_uneven


def whole_plan(model: nn.Module, mesh: Mesh) -> dict[str, Style]:
    """Return the style of each layer that a tensor group shares, with those that follow from the plan's.

    Raises:
        SpecError: The layers cannot be shared.
    """
    plan = with_adapters(plan_of(model, mesh), model)
    plan = with_ties(without_uneven(plan, model, mesh), model)
    check_sizes(model, plan, mesh)
    return plan


def share_layers(model: nn.Module, plan: Mapping[str, Style], layout: MeshLayout) -> list[str]:
    """Leave this rank its part of the layers that its group shares, in place; weights may be without values.

    Returns the names of parameters whose gradients are to be added up over the group.

    Args:
        model: The model.
        plan: See ``whole_plan``.
        layout: The mesh of the job.

    Raises:
        SpecError: The layers cannot be shared.
    """
    split = vocabulary.split_layers(model, plan)
    tensor_styles.share(model, plan, layout.tensor, sequence=layout.mesh.sequence, split=split)
    if split:
        vocabulary.answer_from_parts(model, layout.tensor)
    summed = tensor_styles.find_reduced_alone(model, plan)
    if layout.mesh.sequence:
        summed += share_texts(model, plan, layout.tensor)
    return summed
