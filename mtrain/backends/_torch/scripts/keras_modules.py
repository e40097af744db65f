"""Models of Keras 3 as modules of torch that every backend can wrap, split and save.

With its torch backend a model of Keras is an ``nn.Module`` already, but its layers reach their variables by themselves and not through the
module, so a backend that puts other arrays in the module's place (FSDP, ZeRO 3) would not be noticed.
"""

import inspect
import sys
from typing import Any

import torch
from torch import Tensor, nn

from mtrain.errors import ScriptError

SEED_STATE = "seed_generator_state"
"""Last part of the path of a variable from which Keras's random layers count."""
SEEDS = 1 << 31


def seed_keras() -> None:
    """Seed what Keras draws start weights from, where it is imported, as torch was seeded last."""
    if (keras := _with_torch()) is not None:
        keras.utils.set_random_seed(torch.initial_seed() % (1 << 32))


def adapt(model: Any) -> Any:
    """Return a model of Keras as a ``KerasModule``, and anything else as it is.

    Raises:
        ScriptError: the model has no variables yet, or losses of its own.
    """
    keras = _with_torch()
    return KerasModule(model) if keras is not None and isinstance(model, keras.Model) else model


def _with_torch() -> Any:
    """Return the module of Keras 3, where it is imported and computes with torch."""
    keras = sys.modules.get("keras")
    if keras is None or int(getattr(keras, "__version__", "2").partition(".")[0]) < 3:
        return None
    return keras if keras.backend.backend() == "torch" else None


class KerasModule(nn.Module):
    """A model of Keras whose variables are parameters and buffers of this one module, without modules below it.

    The model is called as a function of them, so it computes with whatever array a backend has put there. ``train()`` and ``eval()`` of the
    module decide over ``training``. Random layers draw from torch's generator while training, so they follow its seed.
    """

    keras_model: Any
    """The model itself. It shares its arrays with the module where a backend does not split them."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        _check(model)
        self.__dict__["keras_model"] = model  # no module of this one, whose parameters would be found twice
        self._trained: list[str] = []
        self._kept: list[str | None] = []
        """For each variable that is not trained the buffer that has it; None: it is drawn for each call."""
        self._takes_training = "training" in inspect.signature(model.call).parameters
        for variable in model.trainable_variables:
            self._trained.append(self._free_name(variable))
            self.register_parameter(self._trained[-1], variable.value)
        for variable in model.non_trainable_variables:
            if variable.path.endswith(SEED_STATE):
                self._kept.append(None)
                continue
            name = self._free_name(variable)
            self._kept.append(name)
            self.register_buffer(name, variable.value.detach())

    def _free_name(self, variable: Any) -> str:
        """Return the name of a variable in checkpoints: ``sequential/dense/kernel`` is ``dense_kernel``."""
        first = name = variable.path.removeprefix(f"{self.keras_model.name}/").replace("/", "_").replace(".", "_")
        number = 1
        while hasattr(self, name):
            number += 1
            name = f"{first}_{number}"
        return name

    def forward(self, *inputs: Any, **arguments: Any) -> Any:
        """Call the model; what it has counted meanwhile, such as moving means, is in the buffers afterwards."""
        if self._takes_training:
            arguments.setdefault("training", self.training)
        trained = [self._parameters[name] for name in self._trained]
        kept = [self._draw_state() if name is None else self._buffers[name] for name in self._kept]
        self._check_types(trained)
        outputs, after = self.keras_model.stateless_call(trained, kept, *inputs, **arguments)
        if self.training:
            with torch.no_grad():
                for name, before, value in zip(self._kept, kept, after, strict=True):
                    if name is not None and before is not None and value is not before:
                        before.copy_(value)
        return outputs

    def _draw_state(self) -> Tensor:
        """Return the state of a generator of Keras; while training from torch's generator, which is seeded for each micro batch."""
        drawn = torch.randint(SEEDS, (2,)) if self.training else torch.zeros(2, dtype=torch.int64)
        return drawn.to(next(iter(self._parameters.values())).device)  # type: ignore[union-attr]

    def _check_types(self, trained: list[Any]) -> None:
        variable = next(iter(self.keras_model.trainable_variables), None)
        if variable is None or not trained[0].is_floating_point():
            return
        own = str(trained[0].dtype).removeprefix("torch.")
        if own == "float64" and variable.dtype != own:
            raise ScriptError(
                f"session.prepare: the layers of Keras compute in {variable.dtype}, and the job in {own} (train.precision); call "
                f"keras.config.set_floatx('{own}') before the model is built"
            )


def _check(model: Any) -> None:
    if not model.built or not model.variables:
        raise ScriptError(
            "session.prepare: the model of Keras has no variables before its first batch; begin it with keras.layers.Input(shape=...), or "
            "call model.build(...) in the function"
        )
    penalised = [variable.path for variable in model.trainable_variables if variable.regularizer is not None]
    if penalised:
        raise ScriptError(
            f"session.prepare: {penalised[0]} has a regularizer of Keras, whose penalty is in no loss of the script; leave it out, and "
            "give the optimizer a weight_decay, or compute the penalty in the script"
        )
