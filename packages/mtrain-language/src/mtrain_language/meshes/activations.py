"""How many bytes of inner results the backward pass of a rank needs, counted on a language model without values.

The model computes a micro batch on tensors that have shapes only, each layer with the part that a rank of a tensor group has of
it; what autograd keeps is added up. Kernels of attention are not asked, because they differ by device: the stand-in keeps what
torch's fused kernel on the CPU keeps, or with ``eager`` the probabilities.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from mtrain.core.interfaces import Mesh
from mtrain.core.overriding import override
from mtrain_language import likelihoods
from mtrain_language.likelihoods import Likelihoods
from mtrain_language.meshes import sequence, vocabulary
from mtrain_language.meshes.internals import exchange_attention, storage_of
from mtrain_language.meshes.tensor_plan import Style, has_inputs_first, weight_axis

ATTENTION = "mtrain_counted"
"""Name of the stand-in among transformers' implementations of attention."""
BatchShapes = Mapping[str, tuple[tuple[int, ...], str]]


def kept_bytes(model: nn.Module, batch: BatchShapes, plan: Mapping[str, Style], mesh: Mesh) -> int | None:
    """Return the bytes that are kept of a micro batch, without weights; None: the model cannot be computed so.

    ``model`` has no values. Afterwards its layers have the shapes of a rank's parts, for ``fullest.most_bytes``.
    """
    if not is_counted(model):
        return None
    stand_in(model)
    leave_parts(model, plan, mesh)
    counter = Counter([*model.parameters(), *model.buffers()])
    model.train()
    try:
        with torch.autograd.graph.saved_tensors_hooks(counter.pack, lambda x: x):
            model(blank(batch))
    except UNCOUNTED:
        return None
    return counter.bytes


UNCOUNTED = (RuntimeError, NotImplementedError, ValueError)
"""What a model raises that looks at values, which are not there."""


def is_counted(model: nn.Module) -> bool:
    """Return whether this is a language model of transformers that asks ``mtrain_language.likelihoods`` for its loss."""
    return likelihoods.ask(model) is not None and hasattr(model, "set_attn_implementation")


def blank(batch: BatchShapes) -> dict[str, Tensor]:
    """Return a micro batch without values."""
    return {
        name: torch.empty(shape, dtype=getattr(torch, dtype), device="meta") for name, (shape, dtype) in batch.items()
    }


class Counter:
    """Adds up the memory of tensors that autograd keeps, each piece of memory once."""

    def __init__(self, known: Iterable[Tensor]) -> None:
        """Count all tensors but those in the memory of ``known``."""
        self.bytes = 0
        self._held: list[Tensor] = [*known]  # held, so that no address comes twice
        self._known = {storage_of(x) for x in self._held}

    def pack(self, x: Tensor) -> Tensor:
        """Count a tensor."""
        if storage_of(x) not in self._known:
            self._known.add(storage_of(x))
            self._held.append(x)
            self.bytes += x.untyped_storage().nbytes()
        return x


# ------------------------------------------------------------------------------------------------------ parts of a rank
def leave_parts(model: nn.Module, plan: Mapping[str, Style], mesh: Mesh) -> None:
    """Give each layer the shapes that a rank of a tensor group has of it, in place."""
    split = vocabulary.split_layers(model, plan)
    for name, style in plan.items():
        by_rows, by_columns = style == "rowwise", style == "colwise" or name in split
        if by_rows or by_columns:
            module: Any = model.get_submodule(name)
            _cut(module, "weight", weight_axis(module, str(style)), mesh.tensor)
            if by_columns and getattr(module, "bias", None) is not None:
                _cut(module, "bias", 0, mesh.tensor)
            if has_inputs_first(module):
                module.nf = module.weight.shape[1]
    if split:
        likelihoods.answer(model, _OfOneRank())
    if mesh.sequence:
        _divide_texts(model, plan, mesh.tensor)


def _cut(module: nn.Module, key: str, axis: int, count: int) -> None:
    former = getattr(module, key)
    shape = list(former.shape)
    shape[axis] //= count
    part = torch.empty(shape, dtype=former.dtype, device="meta")
    setattr(module, key, nn.Parameter(part, requires_grad=former.requires_grad))


class _OfOneRank(Likelihoods):
    """The loss of this rank's part of a vocabulary, without the others."""

    @override
    def nll(self, logits_BLV: Any, tokens_BL: Any) -> Any:
        return vocabulary.nll_of_part(logits_BLV, tokens_BL, None)

    @override
    def likeliest(self, logits_BLV: Any) -> Any:
        return logits_BLV.argmax(dim=-1)


def _divide_texts(model: nn.Module, plan: Mapping[str, Style], count: int) -> None:
    """Let parts of texts go where ``sequence.share_texts`` lets them go."""
    _, layers, norm = sequence.blocks(model)

    def divide(x: Tensor) -> Tensor:
        return x[:, : x.shape[1] // count].clone()

    def whole(x: Tensor) -> Tensor:
        return torch.cat([x] * count, dim=1)

    layers[0].register_forward_pre_hook(sequence.on_first_input(divide), with_kwargs=True)
    norm.register_forward_hook(lambda module, inputs, output: whole(output))
    by_rows = [name for name, style in plan.items() if style == "rowwise"]
    for name in by_rows:
        model.get_submodule(name).register_forward_hook(lambda module, inputs, output: divide(output))
    for half in {sequence.half_of(name) for name in by_rows}:
        model.get_submodule(half).register_forward_pre_hook(sequence.on_first_input(whole), with_kwargs=True)


# ------------------------------------------------------------------------------------------------------------ attention
class _SavedForBackward(Protocol):
    saved_tensors: tuple[Tensor, ...]
    is_eager: bool

    def save_for_backward(self, *tensors: Tensor) -> None: ...


class _Attention(torch.autograd.Function):
    """Keeps what attention keeps; queries, keys and values are (B, heads, L, D)."""

    @staticmethod
    def forward(ctx: _SavedForBackward, q_BHLD: Tensor, k_BHLD: Tensor, v_BHLD: Tensor, is_eager: bool) -> Tensor:  # noqa: FBT001
        """Return the shape of a result, (B, L, heads, D)."""
        ctx.is_eager = is_eager
        b, heads, length, _ = q_BHLD.shape
        out_BLHD = q_BHLD.new_empty((b, length, heads, v_BHLD.shape[-1]))
        if is_eager:
            ctx.save_for_backward(q_BHLD, k_BHLD, v_BHLD, q_BHLD.new_empty((b, heads, length, length)))
        else:
            sums_BHL, mask_B1LL = q_BHLD.new_empty((b, heads, length)), q_BHLD.new_empty((b, 1, length, length))
            ctx.save_for_backward(q_BHLD, k_BHLD, v_BHLD, out_BLHD, sums_BHL, mask_B1LL)
        return out_BLHD

    @staticmethod
    def backward(ctx: _SavedForBackward, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        """Return the shapes of gradients."""
        q_BHLD, k_BHLD, v_BHLD, *others = ctx.saved_tensors
        if ctx.is_eager:  # gradients of the probabilities, and of what they are made of
            _ = [torch.empty_like(others[0]) for _ in range(2)]
        return torch.empty_like(q_BHLD), torch.empty_like(k_BHLD), torch.empty_like(v_BHLD), None


def stand_in(model: nn.Module) -> None:
    """Let the model use the stand-in, with which transformers makes no mask either."""
    from transformers import AttentionInterface

    is_eager = exchange_attention(model.config, ATTENTION) == "eager"

    def attend(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: object, **options: Any
    ) -> tuple[Tensor, None]:
        groups = query.shape[1] // key.shape[1]
        keys, values = (x.repeat_interleave(groups, dim=1) if groups > 1 else x for x in (key, value))
        return cast(Tensor, _Attention.apply(query, keys, values, is_eager)), None

    cast(Any, AttentionInterface).register(ATTENTION, attend)
