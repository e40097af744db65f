"""How likely a model finds tokens, from logits that a rank holds whole or in part.

A loss asks the ``Likelihoods`` of its module, so that a backend whose ranks each compute a part of the logits (tensor
parallelism) can answer without any of them holding all.
"""

from typing import Any, Protocol

from mtrain.core import ops
from mtrain.core.overriding import override


class Likelihoods(Protocol):
    """What a loss asks of logits (B, L, V)."""

    def nll(self, logits_BLV: Any, tokens_BL: Any) -> Any:
        """Return the negative logarithm of the probability of each token, (B, L)."""
        ...

    def likeliest(self, logits_BLV: Any) -> Any:
        """Return the token with the largest logit at each place, (B, L); the first one of several."""
        ...


class OfWhole(Likelihoods):
    """Answers from logits of the whole vocabulary."""

    @override
    def nll(self, logits_BLV: Any, tokens_BL: Any) -> Any:
        wanted_BL1 = ops.expand_dims(tokens_BL, axis=-1)
        chosen_BL1 = ops.take_along_axis(ops.log_softmax(logits_BLV, axis=-1), wanted_BL1, axis=-1)
        return -ops.squeeze(chosen_BL1, axis=-1)

    @override
    def likeliest(self, logits_BLV: Any) -> Any:
        return ops.argmax(logits_BLV, axis=-1)


def ask(module: Any) -> Likelihoods | None:
    """Return the likelihoods that the losses of ``module`` ask; None: they ask none, and need whole logits."""
    found: Likelihoods | None = getattr(module, "likelihoods", None)
    return found


def answer(module: Any, likelihoods: Likelihoods) -> None:
    """Let the losses of ``module`` ask ``likelihoods`` from now on."""
    module.likelihoods = likelihoods
