"""Stochastic gradient descent in numpy, for tests that train a network by hand under any framework."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from mtrain.core import ops
from tests.framework import Array, Framework


def arrays(tensors: Mapping[str, Any]) -> dict[str, Array]:
    """Copies."""
    return {name: np.array(ops.to_numpy(x)) for name, x in tensors.items()}


def norm(values: Any) -> float:
    """L2 norm over one array or all of several, in float64."""
    parts = values.values() if isinstance(values, Mapping) else [values]
    return float(np.sqrt(sum(np.sum(np.square(x, dtype=np.float64)) for x in parts)))


class Descent:
    """Nesterov momentum (as torch and Sutskever et al. 2013 arrange it), weight decay by name, clipping by global norm."""

    def __init__(
        self,
        framework: Framework,
        network: Any,
        *,
        learning_rate: float,
        momentum: float,
        decay: Callable[[str], float] = lambda name: 0.0,
        clip: float = np.inf,
    ) -> None:
        self._framework = framework
        self._network = network
        self._learning_rate = learning_rate
        self._momentum = momentum
        self._decay = decay
        self._clip = clip
        self._moments: dict[str, Array] = {}

    def step(self, loss: Any) -> float:
        """One update; the gradient norm before clipping."""
        parameters = self._framework.parameters(self._network)
        actual = self._framework.gradients(loss, list(parameters.values()))
        gradients = dict(zip(parameters, actual, strict=True))
        length = norm(gradients)
        share = min(self._clip / (length + 1e-6), 1.0)
        values = arrays(parameters)
        for name, gradient in gradients.items():
            slope = gradient * share + self._decay(name) * values[name]
            before = self._moments.get(name)
            self._moments[name] = slope if before is None else self._momentum * before + slope
            values[name] = values[name] - self._learning_rate * (slope + self._momentum * self._moments[name])
        self._framework.load(self._network, values)
        return length
