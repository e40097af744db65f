"""The state of a training with Keras as named numpy arrays: weights, what the optimizer keeps for each, and random numbers."""

import random
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from mtrain.core.interfaces import State
from mtrain.errors import CheckpointError
from mtrain_tensorflow import internals

PRECISIONS = {"float64": "fp64", "float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}


class Variables:
    """The variables of a model and of its optimizer, under the names that they have in checkpoints.

    ``dense/kernel:0`` is ``dense.kernel``, and Adam's ``Adam/m/dense/kernel:0`` is the moment ``m/dense.kernel``. What an
    optimizer keeps once and not for each weight, such as its number of steps, is a counter.
    """

    def __init__(self, model: Any, weights: Sequence[Any], optimizer: Any) -> None:
        """``model``: None where the script has given variables alone."""
        self._model = model
        self._optimizer = optimizer
        self._weights = by_name(weights)
        trained = [weight for weight in weights if getattr(weight, "trainable", True)]
        # Else a checkpoint would have to be restored into variables that are made at the first step.
        internals.make_slots(optimizer, trained)
        self._moments: dict[str, Any] = {}
        self._counters: dict[str, Any] = {}
        for variable in of_optimizer(optimizer):
            moment = self._moment(variable)
            if moment is None:
                self._counters[plain(variable).rpartition("/")[2]] = variable
            else:
                self._moments[moment] = variable

    def _moment(self, variable: Any) -> str | None:
        """Return ``moment/weight`` of a variable of the optimizer; None where it belongs to no weight."""
        name = plain(variable)
        # The longest name first, since a short one may be part of another: `dense/kernel` of `block/dense/kernel`.
        for weight in sorted(self._weights, key=len, reverse=True):
            raw = plain(self._weights[weight])
            if raw and f"/{raw}/" in f"/{name}/" and variable.shape == self._weights[weight].shape:
                words = f"/{name}/".replace(f"/{raw}/", "/", 1).strip("/").split("/")
                return f"{words[-1]}/{weight}"
        return None

    def learning_rate(self) -> float | None:
        """Return the learning rate of the next update; None where the optimizer has none."""
        rate = getattr(self._optimizer, "learning_rate", None)
        if callable(rate):
            rate = rate(getattr(self._optimizer, "iterations", 0))
        return None if rate is None else float(rate)

    def copies(self, *, updates: int) -> State:
        """Return copies of all arrays."""
        return State(
            weights={name: np.array(variable.numpy()) for name, variable in self._weights.items()},
            moments={name: np.array(variable.numpy()) for name, variable in self._moments.items()},
            counters={
                "updates": float(updates),
                **{name: float(variable.numpy()) for name, variable in self._counters.items()},
            },
        )

    def precision(self) -> str:
        """Return the type of the weights, as specs name it."""
        dtype = next(iter(self._weights.values())).dtype.name
        return PRECISIONS.get(dtype, dtype)

    def restore(self, state: State) -> None:
        """Give the variables the values of a checkpoint.

        Raises:
            CheckpointError: the arrays are those of another model or optimizer.
        """
        _assign(self._weights, state.weights, what="weights")
        _assign(self._moments, state.moments, what="moments of the optimizer")
        for name, variable in self._counters.items():
            if name in state.counters:
                variable.assign(tf.cast(tf.constant(state.counters[name], tf.float64), variable.dtype))

    def without_state(self) -> list[str]:
        """Return the names of layers whose random numbers cannot be saved."""
        return [] if self._model is None else internals.without_state(self._model)

    def random_state(self) -> dict[str, Any]:
        """Return the states of the random numbers of this rank, as plain values."""
        kind, keys, *rest = np.random.get_state()
        version, words, gauss = random.getstate()
        layers = [] if self._model is None else [state.numpy().tolist() for state in internals.generators(self._model)]
        return {
            "layers": layers,
            "tensorflow": tf.random.get_global_generator().state.numpy().tolist(),
            "numpy": [kind, np.asarray(keys).tolist(), *rest],
            "python": [version, list(words), gauss],
        }

    def restore_random_state(self, saved: Mapping[str, Any]) -> None:
        """Set the random numbers of this rank to a state that ``random_state`` has returned."""
        kind, keys, *rest = saved["numpy"]
        np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))
        version, words, gauss = saved["python"]
        random.setstate((version, tuple(words), gauss))
        tf.random.get_global_generator().state.assign(saved["tensorflow"])
        if self._model is not None:
            for state, values in zip(internals.generators(self._model), saved["layers"], strict=False):
                state.assign(values)

    def metrics(self) -> list[Any]:
        """Return what the metrics of the model have added up since the epoch began, as plain values."""
        if self._model is None:
            return []
        return [v.numpy().tolist() for metric in self._model.metrics for v in metric.variables]

    def restore_metrics(self, saved: Sequence[Any]) -> None:
        """Let the metrics go on from ``saved``; not where the model has others by now."""
        variables = [] if self._model is None else [v for metric in self._model.metrics for v in metric.variables]
        # A script may have other metrics now, which concern no weights; they begin anew.
        if len(variables) == len(saved):
            for variable, value in zip(variables, saved, strict=True):
                variable.assign(tf.cast(tf.constant(value, tf.float64), variable.dtype))


def plain(variable: Any) -> str:
    """Return the name of a variable without TensorFlow's number of the output."""
    return str(variable.name).partition(":")[0]


def by_name(variables: Iterable[Any]) -> dict[str, Any]:
    """Return variables by their names, with a number behind one that comes again."""
    found: dict[str, Any] = {}
    for variable in variables:
        first = name = plain(variable).replace("/", ".")
        number = 1
        while name in found:
            number += 1
            name = f"{first}_{number}"
        found[name] = variable
    return found


def of_optimizer(optimizer: Any) -> list[Any]:
    """Return the variables of an optimizer, of Keras or of ``tf.compat.v1.train``."""
    variables = optimizer.variables
    return list(variables() if callable(variables) else variables)


def _assign(variables: Mapping[str, Any], arrays: Mapping[str, Any], *, what: str) -> None:
    missing, further = sorted(set(variables) - set(arrays)), sorted(set(arrays) - set(variables))
    other = [name for name in variables if name in arrays and tuple(variables[name].shape) != arrays[name].shape]
    if missing or further or other:
        parts = [
            f"{words} {', '.join(names[:3])}"
            for words, names in (("lacks", missing), ("has besides", further), ("has another shape of", other))
            if names
        ]
        raise CheckpointError(
            f"mtrain_tensorflow.keras: the {what} of the checkpoint are not those of this model: it {'; it '.join(parts)}; "
            "start a new run, or take the model and optimizer of the script that wrote it"
        )
    for name, variable in variables.items():
        variable.assign(arrays[name])
