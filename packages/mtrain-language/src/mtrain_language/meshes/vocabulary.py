"""The loss over a vocabulary that the ranks of a tensor group share: each of them keeps the logits of its own tokens.

Of each place in a text, ranks exchange three numbers: the largest logit, the sum of exponentials, and the logit of the token
that is asked for. Its gradient needs no exchange.
"""

from collections.abc import Mapping
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from mtrain.core.overriding import override
from mtrain_language import likelihoods
from mtrain_language.likelihoods import Likelihoods
from mtrain_language.meshes.tensor_adapters import layer_of
from mtrain_language.meshes.tensor_plan import Style


def split_layers(model: nn.Module, plan: Mapping[str, Style]) -> frozenset[str]:
    """Return the layers of ``plan`` that compute logits of which each rank may keep a part.

    They are the output layer of a model of transformers whose losses ask ``mtrain_language.likelihoods``, or its parts; or none.
    """
    outputs = getattr(model, "get_output_embeddings", None)
    if likelihoods.ask(model) is None or outputs is None or (layer := outputs()) is None:
        return frozenset()
    gathered = [name for name, style in plan.items() if style == "colwise_gather_output"]
    return frozenset(name for name in gathered if model.get_submodule(layer_of(name)) is layer)


def answer_from_parts(model: nn.Module, tensor: DeviceMesh) -> None:
    """Let losses of ``model`` ask for parts of logits, and give whole logits to everybody else, in place."""
    likelihoods.answer(model, OfParts(tensor.get_group()))

    def gather(module: nn.Module, inputs: object, output: object) -> None:
        logits = getattr(output, "logits", None)
        if isinstance(logits, Tensor):
            whole = DTensor.from_local(logits, tensor, [Shard(-1)], run_check=False).full_tensor()
            cast(Any, output).logits = whole

    model.register_forward_hook(gather)


class OfParts(Likelihoods):
    """Answers from the logits of this rank's part of a vocabulary; all ranks of the group must ask."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    @override
    def nll(self, logits_BLV: Tensor, tokens_BL: Tensor) -> Tensor:
        return nll_of_part(logits_BLV, tokens_BL - dist.get_rank(self._group) * logits_BLV.shape[-1], self._group)

    @override
    def likeliest(self, logits_BLV: Tensor) -> Tensor:
        best_BL, place_BL = logits_BLV.max(dim=-1)
        place_BL = place_BL + dist.get_rank(self._group) * logits_BLV.shape[-1]
        size = dist.get_world_size(self._group)
        bests = [torch.empty_like(best_BL) for _ in range(size)]
        places = [torch.empty_like(place_BL) for _ in range(size)]
        dist.all_gather(bests, best_BL.contiguous(), group=self._group)
        dist.all_gather(places, place_BL.contiguous(), group=self._group)
        all_best_RBL = torch.stack(bests)
        # Of equal ones the first: argmax alone does not promise it.
        first_1BL = (all_best_RBL == all_best_RBL.amax(dim=0)).int().argmax(dim=0, keepdim=True)
        return torch.stack(places).gather(0, first_1BL)[0]


def nll_of_part(logits_BLV: Tensor, within_BL: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Return the loss of each place, (B, L).

    Args:
        logits_BLV: The logits of this rank's part of the vocabulary.
        within_BL: Tokens, counted from the first of this part.
        group: The ranks that have the other parts; None: there are none.
    """
    found: Tensor = _Nll.apply(logits_BLV, within_BL, group)
    return found


class _SavedForBackward(Protocol):
    """What the backward pass reads of the forward pass."""

    saved_tensors: tuple[Tensor, ...]

    def save_for_backward(self, *tensors: Tensor) -> None: ...


class _Nll(torch.autograd.Function):
    """The negative logarithm of probabilities, from parts of logits."""

    @staticmethod
    def forward(
        ctx: _SavedForBackward, logits_BLV: Tensor, within_BL: Tensor, group: dist.ProcessGroup | None
    ) -> Tensor:
        """Return the loss of each place; see ``nll_of_part``."""
        largest_BL = logits_BLV.amax(dim=-1)
        if group is not None:
            dist.all_reduce(largest_BL, dist.ReduceOp.MAX, group=group)
        shifted_BLV = logits_BLV - largest_BL[..., None]
        is_own_BL = (within_BL >= 0) & (within_BL < logits_BLV.shape[-1])
        place_BL1 = within_BL.where(is_own_BL, 0)[..., None]
        chosen_BL = shifted_BLV.gather(-1, place_BL1)[..., 0].where(is_own_BL, 0)
        powers_BLV = shifted_BLV.exp_()
        sum_BL = powers_BLV.sum(dim=-1)
        if group is not None:
            sum_BL, chosen_BL = added_up(sum_BL, chosen_BL, group)
        ctx.save_for_backward(powers_BLV, sum_BL, place_BL1, is_own_BL)
        return sum_BL.log() - chosen_BL

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: _SavedForBackward, gradient_BL: Tensor) -> tuple[Tensor, None, None]:
        """Return the gradient of this rank's logits: probabilities, less 1 where the token is."""
        powers_BLV, sum_BL, place_BL1, is_own_BL = ctx.saved_tensors
        own_BLV = powers_BLV * (gradient_BL / sum_BL)[..., None]
        own_BLV.scatter_add_(-1, place_BL1, -gradient_BL.where(is_own_BL, 0)[..., None])
        return own_BLV, None, None


def added_up(sum_BL: Tensor, chosen_BL: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """Add up, over the ranks of a group, the sums of exponentials and the logits of tokens that one rank each holds."""
    both_2BL = torch.stack([sum_BL, chosen_BL])
    dist.all_reduce(both_2BL, group=group)
    return both_2BL[0], both_2BL[1]
