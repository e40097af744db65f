"""Let a user's own module be written as a program: arrays of a batch of its data set go in, its predictions come out."""

from typing import Any

import numpy as np

from mtrain.core.interfaces import Array
from mtrain.core.interfaces.program import ProgramInput
from mtrain.data import trees
from mtrain.errors import DataError, SpecError
from mtrain.spec import references
from mtrain.spec.model import Spec
from mtrain.tasks.datasets import OpenData
from mtrain.tasks.own import calls, layout
from mtrain.tasks.own.source import OwnSource

# torch takes a size of 1 for a constant.
EXAMPLES = 2
"""Samples in the example batch of a program for any batch."""
OUTPUT, INPUT = "predictions", "input"


def example_inputs(spec: Spec, data: OpenData, *, batch: int | None) -> list[ProgramInput]:
    """Return the arrays of a batch of the user's data set as inputs of a program, with an example of each.

    The batch is of the evaluation split, if there is one. The first axis of an array is that of samples if its size is that
    of the batch, also for a batch that has one sample more.

    Raises:
        DataError: the data set cannot be read, or a batch holds no array.
    """
    reference = references.parse(spec.data.format)
    split = "val" if calls.takes(reference, "split") else "train"
    source = OwnSource(getattr(data, split).dataset, reference, split=split, seed=spec.train.seed, floats=None)
    count = batch or EXAMPLES
    # An axis that grows with the batch is that of samples; one of equal size may be so by chance.
    arrays, more = _batch(source, count), _batch(source, count + 1)
    names = _names(arrays)
    return [
        ProgramInput(
            key=key,
            name=names[key],
            shape=array.shape[1:],
            dtype=array.dtype.name,
            layout="",
            example=array,
            batched=_is_batched(array, more.get(key), count),
        )
        for key, array in arrays.items()
    ]


def _batch(source: OwnSource, count: int) -> dict[str, Array]:
    samples = [source.sample(0, number % len(source)) for number in range(count)]
    batch = source.collate(samples)
    return {key: np.ascontiguousarray(array) for key, array in batch.items() if key != "index"}


def _is_batched(array: Array, more: Array | None, count: int) -> bool:
    return more is not None and array.shape[:1] == (count,) and more.shape[:1] == (count + 1,)


def _names(arrays: dict[str, Array]) -> dict[str, str]:
    """Return a name for each array of a packed batch: its place in the nesting, such as ``image`` or ``input_0``."""
    paths: dict[int, str] = {}

    def note(path: str, number: Any) -> None:
        paths[int(number)] = path

    keys = list(arrays)
    trees.map_leaves(layout.unpack(dict(zip(keys, range(len(keys)), strict=True))), note)
    return {key: _name_at(paths[number], INPUT) for number, key in enumerate(keys)}


def _name_at(path: str, whole: str) -> str:
    if not path:
        return whole
    return f"{whole}_{path}" if path[0].isdigit() else path


def exportable(module: Any, *, forward_gives_loss: bool) -> Any:
    """Replace the ``forward`` of a module, in place, by one that takes a packed batch and returns its predictions by name.

    Args:
        module: The user's module, as ``network.adapt`` left it.
        forward_gives_loss: Whether the module's own ``forward`` returns the loss, as that of an own model does. That of a script's
            module gives predictions, for the first element of a batch.
    """
    own_forward, name = module.forward, type(module).__name__

    def forward(*arguments: Any, **keywords: Any) -> Any:
        if keywords or len(arguments) != 1 or not layout.is_packed(arguments[0]):
            return own_forward(*arguments, **keywords)  # the module calls itself
        batch = layout.unpack(arguments[0])
        if callable(getattr(module, "predict", None)):
            return outputs(_first_of_pair(module.predict(batch), name), name=name)
        if forward_gives_loss:
            raise SpecError(
                f"{name} has no method predict(batch), and its forward returns the loss; add one that returns the pair "
                "(predictions, targets)"
            )
        if not isinstance(batch, tuple | list):
            raise SpecError(
                f"{name} has no method predict(batch), and a batch of the data set is a {type(batch).__name__}; add one, or let "
                "samples be pairs (inputs, targets), whose first element is given to forward"
            )
        return outputs(own_forward(batch[0]), name=name)

    module.forward = forward
    return module


def _first_of_pair(result: Any, name: str) -> Any:
    if not (isinstance(result, tuple) and len(result) == 2):
        raise DataError(
            f"{name}.predict(batch) returned a {type(result).__name__}; expected the pair (predictions, targets)"
        )
    return result[0]


def outputs(predictions: Any, *, name: str) -> dict[str, Any]:
    """Return the tensors of predictions by name: ``predictions``, or their places in the nesting.

    Raises:
        DataError: there is none.
    """
    found: dict[str, Any] = {}

    def leaf(path: str, value: Any) -> None:
        if hasattr(value, "detach"):
            found[_name_at(path, OUTPUT)] = value

    trees.map_leaves(predictions, leaf)
    if not found:
        raise DataError(f"{name}: its predictions hold no tensor; return tensors, in dicts, lists or tuples")
    return found
