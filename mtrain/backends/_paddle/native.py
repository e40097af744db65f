"""A user's own ``paddle.optimizer`` optimizer in the place of mtrain's update rules."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import paddle
from paddle import Tensor
from paddle.nn import Layer

from mtrain.backends._paddle.rules import GradientPiece
from mtrain.core.interfaces import Array
from mtrain.errors import SpecError

PREFIX = "native."
SCHEDULED = (
    "session.prepare: something else than mtrain sets the learning rate of the script's optimizer, such as a scheduler of Paddle; "
    "give the optimizer a number, and the schedule to session.prepare(schedule=...)"
)


class NativeRule:
    """Applies an optimizer of Paddle; see ``rules.Rule``. mtrain clips before, and sets the learning rate."""

    def __init__(self, make: Callable[[Layer], Any], model: Layer, parameters: Mapping[str, Tensor]) -> None:
        """Make the optimizer of ``model``, whose trained parameters are ``parameters``.

        Raises:
            SpecError: ``make`` returned something that cannot be used.
        """
        optimizer = make(model)
        if not isinstance(optimizer, paddle.optimizer.Optimizer):
            raise SpecError(
                f"session.prepare: `optimizer` returned a {type(optimizer).__name__}; expected one of paddle.optimizer"
            )
        self._optimizer = optimizer
        self._parameters = parameters
        self._learning_rate = optimizer.get_lr()
        try:
            optimizer.set_lr(self._learning_rate)
        except RuntimeError:
            raise SpecError(SCHEDULED) from None
        self._pending: dict[str, Tensor] = {}
        """Restored moments until the next update, in which Paddle creates its own from them."""

    def named_moments(self) -> dict[str, Tensor]:
        """Return the optimizer's state by ``<moment>/<parameter name>``; it is empty before the first update."""
        if self._pending:
            return self._pending
        state = self._optimizer.state_dict()
        return {
            f"{PREFIX}{moment}/{name}": tensor
            for key, tensor in state.items()
            if isinstance(tensor, Tensor)
            for name, moment in [self._parse_key(key)]
        }

    def _parse_key(self, key: str) -> tuple[str, str]:
        """Return (parameter name, moment) of an entry that Paddle names ``<Paddle's name of the parameter>_<moment>``."""
        matches = [(len(p.name), name) for name, p in self._parameters.items() if key.startswith(f"{p.name}_")]
        if not matches:
            raise SpecError(
                f"session.prepare: the script's optimizer holds the state {key!r} of a parameter that is not trained here; "
                "write lambda model: paddle.optimizer.SGD(parameters=model.parameters(), ...)"
            )
        length, name = max(matches)
        return name, key[length + 1 :]

    def expect(self, saved: Mapping[str, Array]) -> None:
        """Set the state from saved moments; Paddle takes it when it creates its own in the next update."""
        state = {}
        for path, array in saved.items():
            moment, _, name = path.partition("/")
            if moment.startswith(PREFIX) and name in self._parameters:
                self._pending[path] = tensor = paddle.to_tensor(np.array(array))
                state[f"{self._parameters[name].name}_{moment.removeprefix(PREFIX)}"] = tensor
        if state:
            self._optimizer.set_state_dict(state)

    def apply(self, grad_pieces: Sequence[GradientPiece], *, learning_rate: float) -> None:
        """Update the parameters of ``grad_pieces``, whose clipped gradients become those of the parameters.

        Raises:
            SpecError: something else than mtrain has changed the learning rate.
        """
        if self._optimizer.get_lr() != self._learning_rate:
            raise SpecError(SCHEDULED)
        parameters = list(self._parameters.values())
        for piece in grad_pieces:
            start = 0
            for parameter in parameters[piece.first : piece.end]:
                clipped = piece.grad[start : start + parameter.size].reshape(parameter.shape)
                paddle.assign(clipped, parameter.grad)
                start += parameter.size
        self._learning_rate = learning_rate
        self._optimizer.set_lr(learning_rate)
        self._optimizer.step()
        self._pending = {}
