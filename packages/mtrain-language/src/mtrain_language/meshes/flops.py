"""Count the floating-point operations of a micro batch on a language model without values, forward and backward.

torch's counter adds up matrix products; a product of (n, k) and (k, m) takes 2 n k m. Attention is counted as if each token saw
all tokens of its row, whatever its kernel leaves out, and what ``train.recompute`` computes again is not counted: the model's
operations of Chowdhery et al. 2022 (PaLM, arXiv 2204.02311, appendix B), by which utilisations are compared.
"""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from mtrain.core.interfaces import Task
from mtrain.core.update.recipe import is_frozen
from mtrain_language import likelihoods
from mtrain_language.meshes.internals import exchange_attention

ATTENTION = "mtrain_operations"
"""Name of the attention in plain matrix products among transformers' implementations."""


def of_plugin(plugin: Any, task: Task, rows: int, frozen: Sequence[str]) -> int | None:
    """Return the operations of ``rows`` samples; None: they cannot be counted. ``frozen``: as in ``train.freeze``."""
    with torch.device("meta"):
        model: nn.Module = plugin.without_values(task)
    freeze(model, frozen)
    return of_micro_batch(model, plugin.blank_batch(task, rows=rows))


def freeze(model: nn.Module, patterns: Sequence[str]) -> None:
    """Leave the parameters that ``patterns`` find untrained."""
    for name, parameter in model.named_parameters():
        if is_frozen(name, patterns):
            parameter.requires_grad = False


def of_micro_batch(model: nn.Module, batch: Mapping[str, tuple[tuple[int, ...], str]]) -> int | None:
    """Return the operations of a forward and a backward pass; None: the model cannot be computed so.

    ``model`` has no values, and is as before afterwards.
    """
    if not is_counted(model):
        return None
    # torch counts fused kernels of attention by device; plain products count alike everywhere.
    former = use_plain_attention(model)
    inputs = {
        name: torch.empty(shape, dtype=getattr(torch, kind), device="meta") for name, (shape, kind) in batch.items()
    }
    try:
        with FlopCounterMode(display=False) as counter:
            model(inputs)["total"].backward()
    except (RuntimeError, NotImplementedError, ValueError):  # a model that looks at values, which are not there
        return None
    finally:
        exchange_attention(cast(Any, model).config, former)
        model.zero_grad(set_to_none=True)
    return int(counter.get_total_flops())


def is_counted(model: nn.Module) -> bool:
    """Return whether this is a language model of transformers that asks ``mtrain_language.likelihoods`` for its loss."""
    return likelihoods.ask(model) is not None and hasattr(model, "set_attn_implementation")


def use_plain_attention(model: nn.Module) -> str:
    """Let the model use attention in plain matrix products, without a mask, in place; return the name of its own."""
    from transformers import AttentionInterface

    def attend(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: object, **options: Any
    ) -> tuple[Tensor, None]:
        groups = query.shape[1] // key.shape[1]
        keys, values = (x.repeat_interleave(groups, dim=1) if groups > 1 else x for x in (key, value))
        shares = torch.softmax(query @ keys.transpose(2, 3), dim=-1)
        return (shares @ values).transpose(1, 2), None

    cast(Any, AttentionInterface).register(ATTENTION, attend)
    return exchange_attention(cast(Any, model).config, ATTENTION)
