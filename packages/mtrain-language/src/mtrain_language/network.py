"""Let a causal language model be called as the trainer calls every model: with a batch of rows."""

import inspect
from collections.abc import Mapping
from typing import Any

import numpy as np

from mtrain.core import nn, ops
from mtrain.errors import SpecError
from mtrain_language import likelihoods
from mtrain_language.likelihoods import Likelihoods, OfWhole
from mtrain_language.packing import NONE

_CHECKED = 4
"""Tokens of each of the two documents on which a module is tried."""
_ROUNDING = 1e-4
"""Largest difference, relative to the largest logit, that counts as rounding."""


def adapt(module: Any, *, path: str) -> Any:
    """Replace the ``forward`` of a module, in place, by one that also takes the batches of ``RowSource`` and ``Prompts``.

    With such a batch it returns its loss in training mode, and sums over rows, or continued prompts, in evaluation mode.
    Called in any other way, also by its own methods, it does what it did before. Names of parameters stay.

    Raises:
        SpecError: The module takes no positions, so it could not tell documents of a row apart.
    """
    own_forward = module.forward
    taken = inspect.signature(own_forward).parameters
    if "position_ids" not in taken:
        raise SpecError(
            f"model.options: {path} is a {type(module).__name__}, which takes no position_ids; documents of one row could "
            "see each other, so only models with positions are trained"
        )

    def forward(*arguments: Any, **keywords: Any) -> Any:
        batch = arguments[0] if len(arguments) == 1 and not keywords else None
        if not isinstance(batch, Mapping) or "tokens" not in batch:
            return own_forward(*arguments, **keywords)
        if "generate" in batch:
            return continue_texts(module, batch)
        logits_BLV = own_forward(input_ids=batch["tokens"], position_ids=batch["positions"], use_cache=False).logits
        asked = likelihoods.ask(module) or OfWhole()
        return losses(logits_BLV, batch, asked) if module.training else sums(logits_BLV, batch, asked)

    module.forward = forward
    likelihoods.answer(module, OfWhole())
    return module


def check_sees_its_own_past_only(module: Any, *, path: str, vocabulary: int) -> None:
    """Refuse a module whose output for a token depends on later tokens, or on another document of the same row.

    Two documents of four tokens are given to it, in a row of eight, once as they are and once with one token changed.

    Raises:
        SpecError: It sees what it should not; what it would learn is worth nothing.
    """
    rows = np.tile((7 * np.arange(2 * _CHECKED) + 3) % vocabulary, (3, 1))
    # Only the last token differs: what stands before it must not see it.
    rows[1, -1] = (rows[1, -1] + 1) % vocabulary
    # Only the first document differs: the second one must not see it.
    rows[2, 0] = (rows[2, 0] + 1) % vocabulary
    weight = next(iter(module.parameters()))
    tokens = ops.asarray(rows, like=weight, dtype="int64")
    positions = ops.asarray(np.tile(np.arange(_CHECKED), (3, 2)), like=weight, dtype="int64")
    was_training = module.training
    module.eval()
    with nn.no_grad():
        logits = module(input_ids=tokens, position_ids=positions, use_cache=False).logits
    module.train(was_training)
    scale = float(ops.max(ops.abs(logits[0])))
    later = float(ops.max(ops.abs(logits[1, :-1] - logits[0, :-1])))
    other = float(ops.max(ops.abs(logits[2, _CHECKED:] - logits[0, _CHECKED:])))
    name = type(module).__name__
    if later > _ROUNDING * scale:
        raise SpecError(
            f"model.options: {path}: {name} sees the tokens that it should predict, so its perplexity would mean nothing; "
            "give a causal language model (of some, config: {is_decoder: true} makes one)"
        )
    if other > _ROUNDING * scale:
        raise SpecError(
            f"model.options: {path}: {name} sees other documents of the same row, because it does not use position_ids for "
            "its attention; give a model that does, such as llama, qwen3 or gpt2"
        )


def losses(logits_BLV: Any, batch: Mapping[str, Any], asked: Likelihoods) -> dict[str, Any]:
    """Return the loss of a micro batch: the mean over its rows of each row's scaled sum, see ``RowSource``."""
    nll_BL, _ = _nll(logits_BLV, batch["labels"], asked)
    by_row = ops.sum(nll_BL, axis=1) * ops.astype(batch["scale"], ops.dtype(nll_BL))
    return {"total": ops.mean(by_row)}


def sums(logits_BLV: Any, batch: Mapping[str, Any], asked: Likelihoods) -> dict[str, Any]:
    """Return the sum of losses ``nll``, the number of labels ``count`` and of right ones ``right`` of each row, (B,)."""
    nll_BL, known_BL = _nll(logits_BLV, batch["labels"], asked)
    right_BL = (asked.likeliest(logits_BLV) == batch["labels"]) & known_BL
    return {
        "nll": ops.sum(nll_BL, axis=1),
        "count": ops.sum(ops.astype(known_BL, "int64"), axis=1),
        "right": ops.sum(ops.astype(right_BL, "int64"), axis=1),
    }


def _nll(logits_BLV: Any, labels_BL: Any, asked: Likelihoods) -> tuple[Any, Any]:
    """Return the negative logarithm of each label's probability (0 where there is none), and where there is one.

    It is computed in float32, or in float64 where the model is.
    """
    if ops.dtype(logits_BLV) != "float64":
        # A sum of thousands of exponentials loses digits in bfloat16.
        logits_BLV = ops.astype(logits_BLV, "float32")
    known_BL = labels_BL != NONE
    nll_BL = asked.nll(logits_BLV, ops.where(known_BL, labels_BL, ops.zeros_like(labels_BL)))
    return ops.where(known_BL, nll_BL, ops.zeros_like(nll_BL)), known_BL


def continue_texts(module: Any, batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tokens that continue each prompt, int64 (B, N), filled up with ``NONE``.

    ``generate`` holds, for each row: its length, the most new tokens, the token that ends a text, and in millionths the
    temperature and the probability from which tokens are drawn.
    """
    rows = []
    for tokens, setting in zip(batch["tokens"], ops.to_numpy(batch["generate"]).tolist(), strict=True):
        length, most, end, temperature, top_p = setting
        drawn = {"do_sample": True, "temperature": temperature / 1e6, "top_p": top_p / 1e6, "top_k": 0}
        asked = tokens[None, :length]
        whole = module.generate(
            input_ids=asked,
            attention_mask=ops.ones_like(asked),
            max_new_tokens=most,
            eos_token_id=end,
            pad_token_id=end,
            **(drawn if temperature else {"do_sample": False}),
        )
        rows.append(whole[0, length:])
    longest = max([row.shape[0] for row in rows])
    filled = [ops.concat([row, ops.full([longest - row.shape[0]], NONE, like=row)], axis=0) for row in rows]
    return {"continued": ops.stack(filled, axis=0)}
