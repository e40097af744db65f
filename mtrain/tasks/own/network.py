"""Let a user's native module be called as the trainer calls every model: with a flat batch, for losses or predictions."""

import math
from collections.abc import Mapping
from typing import Any

from mtrain.core.losses import problem_of
from mtrain.errors import DataError
from mtrain.tasks.own import layout

PARTS = ("predictions", "targets")


def adapt(module: Any, *, name: str) -> Any:
    """Replace the ``forward`` of a module, in place, by one that also takes the flat batches of a loader.

    With such a batch the module returns its losses in training mode, and its predictions in evaluation mode. Called in
    any other way, also by itself, it does what it did before. Names of parameters stay as they are.
    """
    own_forward = module.forward

    def forward(*arguments: Any, **keywords: Any) -> Any:
        if keywords or len(arguments) != 1 or not layout.is_packed(arguments[0]):
            return own_forward(*arguments, **keywords)
        batch = layout.unpack(arguments[0])
        return (
            losses(own_forward(batch), name=name) if module.training else flatten_predictions(module, batch, name=name)
        )

    module.forward = forward
    return module


def losses(result: Any, *, name: str) -> dict[str, Any]:
    """Return what a user's ``forward`` returned as losses by name, of which ``total`` carries the gradient.

    Raises:
        DataError: it is neither a loss, nor a dict with ``total``, nor an object with ``loss``.
    """
    own_loss = getattr(result, "loss", None)
    if own_loss is not None and not hasattr(result, "backward"):
        return {"total": _loss(own_loss, f"{name}.forward(batch).loss")}
    if isinstance(result, Mapping):
        if "total" not in result:
            raise DataError(
                f"{name}.forward(batch) returned a dict with {', '.join(map(str, result)) or 'nothing'}; expected the loss to "
                "minimise under 'total'"
            )
        total = _loss(result["total"], f"{name}.forward(batch)['total']")
        others = {str(key): _report(key, value, total, name) for key, value in result.items() if key != "total"}
        return {"total": total, **others}
    return {"total": _loss(result, f"{name}.forward(batch)")}


def _loss(value: Any, what: str) -> Any:
    if problem := problem_of(value):
        hint = "" if hasattr(value, "backward") else ", or a dict of such with 'total'"
        hint += " (with Hugging Face models, the batch needs `labels`)" if value is None else ""
        raise DataError(f"{what} {problem}{hint}")
    return value if len(value.shape) == 0 else value.reshape([])


def _report(key: Any, value: Any, total: Any, name: str) -> Any:
    """Return a further loss as a tensor without gradient."""
    if isinstance(value, int | float):
        return total.detach() * 0 + value
    if hasattr(value, "detach") and math.prod(value.shape) == 1:
        return value.detach().reshape([])
    shape = f" of shape {tuple(value.shape)}" if hasattr(value, "shape") else ""
    raise DataError(
        f"{name}.forward(batch)[{key!r}] is a {type(value).__name__}{shape}; expected a single number to report: return the "
        "losses alone, and predictions from predict(batch)"
    )


def flatten_predictions(module: Any, batch: Any, *, name: str) -> dict[str, Any]:
    """Return the predictions and targets of a batch as a flat mapping of tensors.

    Raises:
        DataError: ``predict`` is missing, or returns something else than a pair with a row for each sample.
    """
    if not callable(getattr(module, "predict", None)):
        raise DataError(no_predict(name))
    result = module.predict(batch)
    if not (isinstance(result, tuple) and len(result) == 2):
        raise DataError(
            f"{name}.predict(batch) returned a {type(result).__name__}; expected the pair (predictions, targets)"
        )

    def leaf(path: str, value: Any) -> Any:
        if not hasattr(value, "detach"):
            return None
        if len(value.shape) == 0:
            part = PARTS[int(path.partition(".")[0])]
            raise DataError(
                f"{name}.predict(batch) returned {part} with a single number for a batch; expected one row for each sample, "
                "with the batch as the first axis"
            )
        return value

    return layout.pack(result, leaf, where=f"{name}.predict(batch)")


def no_predict(name: str) -> str:
    """Return the sentence on a model without ``predict`` in a job with evaluation."""
    return (
        f"{name} has no method predict(batch), and evaluate.metrics asks for predictions; add one that returns the pair "
        "(predictions, targets), or set evaluate.enabled: false"
    )
