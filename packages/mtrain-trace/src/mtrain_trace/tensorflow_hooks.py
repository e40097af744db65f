"""Listen to TensorFlow and Keras: operations that hand arrays to the recorder are put around the steps of all optimizers.

They become a part of the graph that ``tf.function`` or a session runs, so an update is recorded whether it is made by
``model.fit``, by a loop with a GradientTape, or by a session of TensorFlow 1. Nothing that is computed changes.
"""

from __future__ import annotations

import functools
from typing import Any, Callable

import numpy as np
import tensorflow as tf

from mtrain_trace import wrapping
from mtrain_trace.recorder import Recorder
from mtrain_trace.tensorflow_listener import TensorflowListener
from mtrain_trace.wrapping import argument, attempt

wrap = functools.partial(wrapping.wrap, attempt)


class Hooks:
    """Puts the recorder's operations into what TensorFlow runs."""

    def __init__(self, listener: TensorflowListener) -> None:
        self._listener = listener
        self._depth = 0
        self._is_training = False
        """Whether a pass that trains was made and no step since; while a function is traced, this is about its graph."""
        self._models: list[Any] = []
        self._known: dict[int, int] = {}
        self._kept: list[Any] = []
        self._loss: Any = None
        self._states: list[Any] = []
        """Variables with the states of the random numbers from which dropout draws."""

    def install(self) -> None:
        """Wrap the classes of Keras and of ``tf.compat.v1.train``."""
        from keras.src.optimizers import optimizer as keras_optimizer

        keras = tf.keras
        self._wrap_model(keras.Model)
        wrap(keras.losses.Loss, "__call__", before=self._targets)
        wrap(tf.GradientTape, "gradient", before=self._tape)
        wrap(tf.compat.v1.train.Optimizer, "compute_gradients", before=self._v1_loss)
        self._wrap_step(keras_optimizer._BaseOptimizer, self._options, _keras_slots)
        self._wrap_step(tf.compat.v1.train.Optimizer, _v1_options, _v1_slots)
        for owner, name in (
            (keras.Model, "save"),
            (keras.Model, "save_weights"),
            (tf.train.Checkpoint, "save"),
            (tf.train.Checkpoint, "write"),
            (tf.train.CheckpointManager, "save"),
            (tf.compat.v1.train.Saver, "save"),
        ):
            wrap(owner, name, before=self._save)
        self._wrap_callbacks(keras.callbacks.CallbackList)

    def _wrap_model(self, model_class: Any) -> None:
        original = model_class.__call__

        @functools.wraps(original)
        def call(model: Any, *arguments: Any, **keywords: Any) -> Any:
            if not self._depth and keywords.get("training") is not False:
                attempt(self._pass, model, arguments)
            self._depth += 1
            try:
                return original(model, *arguments, **keywords)
            finally:
                self._depth -= 1

        model_class.__call__ = call

    def _pass(self, model: Any, arguments: Any) -> None:
        if not any(model is known for known in self._models):
            self._models.append(model)
        tensors = [t for t in tf.nest.flatten(arguments) if tf.is_tensor(t) and t.shape.rank not in (None, 0)]
        # Keras calls a model on symbols while it is made of layers.
        if tensors and not any(type(tensor).__name__ == "KerasTensor" for tensor in tensors):
            self._is_training = True
            _hand_over(self._listener.see_samples, tensors)

    def _targets(self, arguments: Any, keywords: Any) -> None:
        target = argument(arguments, keywords, 1, "y_true")
        if self._is_training and tf.is_tensor(target) and target.shape.rank not in (None, 0):
            _hand_over(self._listener.see_targets, [target])

    def _tape(self, arguments: Any, keywords: Any) -> None:
        loss = argument(arguments, keywords, 1, "target")
        if tf.is_tensor(loss) and loss.shape.rank == 0:
            _hand_over(self._listener.see_loss, [loss])

    def _v1_loss(self, arguments: Any, keywords: Any) -> None:
        loss = argument(arguments, keywords, 1, "loss")
        if tf.is_tensor(loss):
            self._loss = loss

    def _save(self, arguments: Any, keywords: Any) -> None:
        places = [value for value in (*arguments[1:], *keywords.values()) if isinstance(value, (str, bytes))]
        owner = arguments[0]
        self._listener.see_save(places[0] if places else getattr(owner, "directory", "?"))

    def _wrap_callbacks(self, list_class: Any) -> None:
        original = list_class.__init__
        listener = self._listener

        class Last(tf.keras.callbacks.Callback):  # type: ignore[misc, unused-ignore]
            def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
                listener.see_epoch(epoch, logs)

        @functools.wraps(original)
        def begin(callbacks: Any, *arguments: Any, **keywords: Any) -> None:
            original(callbacks, *arguments, **keywords)
            last = Last()
            last.set_model(keywords.get("model"))
            callbacks.callbacks.append(last)

        list_class.__init__ = begin

    def _wrap_step(self, owner: Any, options_of: Callable[..., Any], slots_of: Callable[..., Any]) -> None:
        original = owner.apply_gradients

        @functools.wraps(original)
        def apply(optimizer: Any, grads_and_vars: Any, *arguments: Any, **keywords: Any) -> Any:
            pairs = list(grads_and_vars)
            self._is_training = False
            used = [(gradient, variable) for gradient, variable in pairs if gradient is not None]
            names = [_plain(variable) for _, variable in used]
            before = attempt(self._before, optimizer, used, names, options_of)
            if tf.compat.v1.executing_eagerly_outside_functions():
                result = original(optimizer, pairs, *arguments, **keywords)
                attempt(self._after, optimizer, used, names, slots_of)
                return result
            with tf.control_dependencies([before] if before is not None else []):
                result = original(optimizer, pairs, *arguments, **keywords)
            with tf.control_dependencies([result]):
                after = attempt(self._after, optimizer, used, names, slots_of)
            return tf.group(result, *([] if after is None else [after]))

        owner.apply_gradients = apply

    def _before(self, optimizer: Any, used: Any, names: list[str], options_of: Callable[..., Any]) -> Any:
        number = self._number(optimizer, used, names)
        changing, fixed = options_of(optimizer)
        keys = list(changing)
        has_loss, self._loss = self._loss is not None, self._loss if self._loss is not None else 0.0
        gradients = [tf.convert_to_tensor(gradient) for gradient, _ in used]
        weights = [_value(variable) for _, variable in used]

        def note(*values: Any) -> None:
            loss, rest = values[0], values[1:]
            if has_loss:
                self._listener.see_loss(np.mean(loss))
            settings = {**fixed, **{key: _number(value) for key, value in zip(keys, rest)}}
            rest = rest[len(keys) :]
            mine, theirs, states = rest[: len(used)], rest[len(used) : 2 * len(used)], rest[2 * len(used) :]
            self._listener.before_step(number, names, list(mine), list(theirs), settings, list(states))

        loss, self._loss = self._loss, None
        return _hand_over(note, [loss, *changing.values(), *gradients, *weights, *map(_value, self._states)])

    def _after(self, optimizer: Any, used: Any, names: list[str], slots_of: Callable[..., Any]) -> Any:
        number = self._known[id(optimizer)]
        slots = slots_of(optimizer, [variable for _, variable in used])
        weights = [_value(variable) for _, variable in used]

        def note(*values: Any) -> None:
            self._listener.after_step(number, names, list(values[: len(used)]), dict(zip(slots, values[len(used) :])))

        return _hand_over(note, [*weights, *(_value(variable) for variable in slots.values())])

    def _number(self, optimizer: Any, used: Any, names: list[str]) -> int:
        """Return the number of an optimizer, which is described when it is seen first."""
        if id(optimizer) not in self._known:
            self._kept.append(optimizer)
            shapes = {name: list(variable.shape) for name, (_, variable) in zip(names, used)}
            dtypes = sorted({variable.dtype.base_dtype.name for _, variable in used})
            rule = type(optimizer).__name__
            self._known[id(optimizer)] = self._listener.describe(rule, shapes, dtypes, self._facts(dtypes))
        return self._known[id(optimizer)]

    def _facts(self, dtypes: list[str]) -> dict[str, Any]:
        layers = [layer for model in self._models for layer in getattr(model, "_flatten_layers", list)()]
        states = [
            layer._random_generator._generator.state
            for layer in layers
            if getattr(getattr(layer, "_random_generator", None), "_generator", None) is not None
        ]
        dropouts = [layer for layer in layers if "Dropout" in type(layer).__name__ and getattr(layer, "rate", False)]
        self._states = states if dropouts else []
        generators = [getattr(layer, "_random_generator", None) for layer in dropouts]
        seeds = [getattr(generator, "_seed", None) for generator in generators]
        of_all, _ = tf.compat.v1.get_seed(1)
        if dropouts and not states and of_all is not None:  # the operations of dropout count from these seeds
            self._listener.seeds = repr((of_all, seeds))
        return {
            "framework": "tensorflow",
            "tensorflow": tf.__version__,
            "models": [type(model).__name__ for model in self._models],
            "model_dtypes": dtypes,
            "batch_norms": sum("BatchNormalization" in type(layer).__name__ for layer in layers),
            "dropouts": len(dropouts),
        }

    def _options(self, optimizer: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return (settings that change, as tensors, those that do not) of an optimizer of Keras."""
        with tf.init_scope():  # the settings include the value of the learning rate, which no graph has
            config = optimizer.get_config()
        fixed = {
            key: value
            for key, value in config.items()
            if key != "learning_rate" and isinstance(value, (bool, int, float))
        }
        return {"lr": tf.convert_to_tensor(optimizer.learning_rate), "steps": _value(optimizer.iterations)}, fixed


def _v1_options(optimizer: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    words = {"_learning_rate": "lr", "_lr": "lr", "_momentum": "momentum", "_beta1": "beta1", "_beta2": "beta2"}
    found = {words[name]: getattr(optimizer, name) for name in words if hasattr(optimizer, name)}
    fixed = {name: float(value) for name, value in found.items() if isinstance(value, (int, float))}
    return {name: tf.convert_to_tensor(v) for name, v in found.items() if tf.is_tensor(v)}, fixed


def _keras_slots(optimizer: Any, weights: list[Any]) -> dict[str, Any]:
    """Return what an optimizer keeps for each weight, by ``moment/weight``."""
    names, found = {_plain(weight): tuple(weight.shape) for weight in weights}, {}
    for variable in optimizer.variables:
        parts = _plain(variable).split("/", 2)
        if len(parts) == 3 and names.get(parts[2]) == tuple(variable.shape):
            found[f"{parts[1]}/{parts[2]}"] = variable
    return found


def _v1_slots(optimizer: Any, weights: list[Any]) -> dict[str, Any]:
    return {
        f"{slot}/{_plain(weight)}": optimizer.get_slot(weight, slot)
        for slot in optimizer.get_slot_names()
        for weight in weights
        if optimizer.get_slot(weight, slot) is not None
    }


def _plain(variable: Any) -> str:
    return str(variable.name).partition(":")[0]


def _value(variable: Any) -> Any:
    return variable.read_value() if hasattr(variable, "read_value") else tf.convert_to_tensor(variable)


def _number(value: Any) -> Any:
    return np.asarray(value).item()


def _hand_over(note: Callable[..., None], tensors: list[Any]) -> Any:
    """Call ``note`` with the values of tensors: at once, or whenever the graph that is being made is run."""

    def call(*values: Any) -> Any:
        attempt(note, *values)
        return np.int32(0)

    if tf.executing_eagerly():
        call(*(np.asarray(tensor) for tensor in tensors))
        return None
    return tf.numpy_function(call, tensors, tf.int32, stateful=True)


def install(out: Recorder) -> TensorflowListener:
    """Connect a recorder to TensorFlow."""
    listener = TensorflowListener(out)
    Hooks(listener).install()
    return listener
