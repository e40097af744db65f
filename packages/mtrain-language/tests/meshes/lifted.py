"""A model plugin of the tests: ``hf`` in pure float64, and faults that can be planted into a job on a mesh.

transformers casts the input of every RMSNorm to float32, whatever the model's type; differences of 1e-16 between meshes would
become 1e-7 there. These casts are lifted. The variable ``MESH_FAULT`` names a fault; with ``MESH_NUDGE`` a job begins one
rounding error away.
"""

import itertools
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.models.gemma2 import modeling_gemma2

from mtrain.backends._torch.sharded import shards
from mtrain.backends._torch.sharded.optimizer import PartsAverage
from mtrain.core import ops
from mtrain.core.overriding import override
from mtrain_language import network
from mtrain_language.meshes import pipeline, tensor_styles, vocabulary
from mtrain_language.model import HuggingFaceModel


def _normed(self: Any, hidden_BLH: Tensor) -> Tensor:
    """Compute an RMSNorm in the type of its input."""
    mean_BL1 = hidden_BLH.pow(2).mean(-1, keepdim=True)
    is_gemmas = hasattr(self, "eps")  # whose weights begin with 0
    epsilon, weight = (self.eps, 1 + self.weight) if is_gemmas else (self.variance_epsilon, self.weight)
    normed: Tensor = weight * (hidden_BLH * torch.rsqrt(mean_BL1 + epsilon))
    return normed


def _attended(part: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **given: Any) -> tuple[Tensor, Tensor]:
    """Compute Gemma 2's attention, whose scores have a soft cap, in the type of its input."""
    key, value = (x.repeat_interleave(part.num_key_value_groups, dim=1) for x in (key, value))
    scores = torch.tanh(query @ key.transpose(2, 3) * given["scaling"] / given["softcap"]) * given["softcap"]
    shares = torch.softmax(scores if mask is None else scores + mask, dim=-1)
    return (shares @ value).transpose(1, 2).contiguous(), shares


class Lifted(HuggingFaceModel):
    """Model ``hf`` without casts to float32."""

    @override
    def module(self, config: Any) -> Any:
        module = super().module(config)
        for part in module.modules():
            if type(part).__name__.endswith("RMSNorm"):
                part.forward = _normed.__get__(part)
        if config.model_type == "gemma2":
            modeling_gemma2.eager_attention_forward = _attended
        if fault := os.environ.get("MESH_FAULT"):
            FAULTS[fault](module)
        if os.environ.get("MESH_NUDGE"):
            module.register_forward_pre_hook(_Nudge())
        if file := os.environ.get("MESH_WIDTHS"):
            for name, part in module.named_modules():
                if name.endswith("mlp.down_proj"):
                    part.register_forward_pre_hook(_Widths(Path(file)))
        return module


class _Widths:
    """Appends how many numbers of each token a rank hands to a layer: those that it has computed itself, of a shared one."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def __call__(self, module: Any, inputs: Any) -> None:
        """Write the width of this rank's part."""
        (x,) = inputs
        local = x.to_local() if hasattr(x, "to_local") else x
        with self._file.open("a") as file:
            file.write(f"{local.shape[-1]}\n")


class _Nudge:
    """Moves each weight by one unit in the last place of float64, up or down, before the first update."""

    def __init__(self) -> None:
        self._done = False

    def __call__(self, module: Any, inputs: Any) -> None:
        """Move the weights, once they are in float64: models are built in float32."""
        if self._done or not module.training or next(module.parameters()).dtype != torch.float64:
            return
        self._done = True
        draws = torch.Generator().manual_seed(7)
        with torch.no_grad():
            for weight in module.parameters():
                up = torch.rand(weight.shape, generator=draws) < 0.5
                end = torch.where(up, torch.inf, -torch.inf).to(weight.dtype)
                weight.copy_(torch.where(weight == 0, weight, weight.nextafter(end)))


def _mean_of_each_rank(module: Any) -> None:
    """Average the loss over the tokens of each micro batch, not over those of the update."""

    def losses(logits_BLV: Any, batch: Any, asked: Any) -> dict[str, Any]:
        nll_BL, known_BL = network._nll(logits_BLV, batch["labels"], asked)
        return {"total": ops.sum(nll_BL) / ops.sum(ops.astype(known_BL, ops.dtype(nll_BL)))}

    network.losses = losses


def _bias_on_every_rank(module: Any) -> None:
    """Add the bias of layers that are cut by rows on every rank of a tensor group."""
    own = tensor_styles.TransposedParallel._apply

    def applied(self: Any, part: Any, mesh: Any) -> Any:
        shared = own(self, part, mesh)
        if self._style == "rowwise":
            shared.register_forward_hook(lambda part, inputs, output: output + part.bias.to_local())
        return shared

    tensor_styles.TransposedParallel._apply = applied


def _norm_counted_twice(module: Any) -> None:
    """Count in the norm what several ranks hold as often as they hold it."""

    def norm(self: Any, held: Any, device: Any) -> Tensor:
        squares = torch.stack([x.double().square().sum() for x in held.values()]).sum()
        return self._collective.all_reduce(squares.reshape(1), "sum")[0].sqrt()

    shards.Parts._norm_of_boxes = norm


def _average_of_one_part(module: Any) -> None:
    """Let the average follow on one rank of each tensor group alone."""
    own = PartsAverage.follow
    PartsAverage.follow = lambda self, update: own(self, update) if int(os.environ["RANK"]) % 2 == 0 else None


def _ties_cut(module: Any) -> None:
    """Give the embedding and the output layer a weight each once they are shared."""
    tensor_styles.ties = lambda model: []


def _sum_of_one_part(module: Any) -> None:
    """Divide by the sum of exponentials over a rank's own part of the vocabulary."""
    own = vocabulary.added_up

    def added_up(sum_BL: Tensor, chosen_BL: Tensor, group: Any) -> tuple[Tensor, Tensor]:
        return sum_BL, own(sum_BL, chosen_BL, group)[1]

    vocabulary.added_up = added_up


def _norm_of_one_stage(module: Any) -> None:
    """Count in the norm on each rank what it holds alone."""

    def norm(self: Any, held: Any, device: Any) -> Tensor:
        return torch.stack([x.double().square().sum() for x in held.values()]).sum().sqrt()

    shards.Parts._norm_of_boxes = norm


def _whole_loss(module: Any) -> None:
    """Count the loss of an update's first micro batch, of three, whole in its gradient."""
    places = itertools.cycle((0, 1, 2))
    pipeline._scale = lambda loss, factor: loss * (factor[0] if next(places) else 1.0)


def _ties_of_one_stage(module: Any) -> None:
    """Leave each stage its own gradient of a weight that two hold."""
    pipeline.Stage.add_ties = lambda self, held: None


FAULTS = {
    "norm of one stage": _norm_of_one_stage,
    "whole loss": _whole_loss,
    "ties of one stage": _ties_of_one_stage,
    "vocabulary": _sum_of_one_part,
    "loss": _mean_of_each_rank,
    "bias": _bias_on_every_rank,
    "norm": _norm_counted_twice,
    "average": _average_of_one_part,
    "ties": _ties_cut,
}
