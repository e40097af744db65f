"""Update rules and schedules as values, which a script passes to ``session.prepare``.

They mean the same on every backend and framework. Their arithmetic is that of the spec's ``optimizer`` and ``schedule``
sections, into which they are converted.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from mtrain.errors import ScriptError
from mtrain.spec.calls import explain_calls


@explain_calls
@dataclass(frozen=True, kw_only=True)
class Group:
    """Parameters with settings of their own: those in whose name the regular expression ``match`` is found."""

    match: str
    learning_rate_factor: float = 1.0
    """Times the learning rate of the rule."""
    weight_decay: float | None = None
    """None: that of the rule."""


@dataclass(frozen=True, kw_only=True)
class _Rule:
    learning_rate: float
    """Learning rate, before the schedule."""
    weight_decay: float = 0.0
    groups: Sequence[Group] = ()
    """A parameter belongs to the first group that matches its name; those that none matches take the rule's values."""

    def _common(self) -> dict[str, Any]:
        groups = [
            {
                "match": group.match,
                "learning_rate_factor": group.learning_rate_factor,
                "weight_decay": group.weight_decay,
            }
            for group in self.groups
        ]
        return {
            "learning_rate": self.learning_rate,
            "weight_decay": self.weight_decay,
            "groups": [*groups, {"match": ""}],
        }


@explain_calls
@dataclass(frozen=True, kw_only=True)
class SGD(_Rule):
    """Stochastic gradient descent with momentum (Sutskever et al. 2013), as in torch and Paddle."""

    momentum: float = 0.0
    nesterov: bool = False

    def section(self) -> dict[str, Any]:
        """Return the spec's ``optimizer`` section with the same meaning."""
        return {**self._common(), "rule": "sgd", "momentum": self.momentum, "nesterov": self.nesterov}


@explain_calls
@dataclass(frozen=True, kw_only=True)
class Adam(_Rule):
    """Adam (Kingma and Ba 2014, arXiv 1412.6980); weight decay is added to the gradient."""

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8

    def section(self) -> dict[str, Any]:
        """Return the spec's ``optimizer`` section with the same meaning."""
        return {**self._common(), "rule": "adam", "momentum": self.betas[0], "beta2": self.betas[1], "eps": self.eps}


@explain_calls
@dataclass(frozen=True, kw_only=True)
class AdamW(_Rule):
    """Adam with decoupled weight decay (Loshchilov and Hutter 2017, arXiv 1711.05101)."""

    weight_decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8

    def section(self) -> dict[str, Any]:
        """Return the spec's ``optimizer`` section with the same meaning."""
        return {**self._common(), "rule": "adamw", "momentum": self.betas[0], "beta2": self.betas[1], "eps": self.eps}


@explain_calls
@dataclass(frozen=True, kw_only=True)
class Lion(_Rule):
    """Lion (Chen et al. 2023, arXiv 2302.06675): steps are signs; weight decay is decoupled."""

    betas: tuple[float, float] = (0.9, 0.99)

    def section(self) -> dict[str, Any]:
        """Return the spec's ``optimizer`` section with the same meaning."""
        return {**self._common(), "rule": "lion", "momentum": self.betas[0], "beta2": self.betas[1]}


@explain_calls
@dataclass(frozen=True, kw_only=True)
class RMSprop(_Rule):
    """RMSprop (Tieleman and Hinton 2012), not centred, as in torch; weight decay is added to the gradient."""

    alpha: float = 0.99
    momentum: float = 0.0
    eps: float = 1e-8

    def section(self) -> dict[str, Any]:
        """Return the spec's ``optimizer`` section with the same meaning."""
        return {**self._common(), "rule": "rmsprop", "momentum": self.momentum, "beta2": self.alpha, "eps": self.eps}


@explain_calls
@dataclass(frozen=True, kw_only=True)
class Adadelta(_Rule):
    """Adadelta (Zeiler 2012, arXiv 1212.5701), whose steps are multiplied by the learning rate, as in torch."""

    rho: float = 0.9
    eps: float = 1e-6

    def section(self) -> dict[str, Any]:
        """Return the spec's ``optimizer`` section with the same meaning."""
        return {**self._common(), "rule": "adadelta", "momentum": 0.0, "beta2": self.rho, "eps": self.eps}


@explain_calls
@dataclass(frozen=True, kw_only=True)
class LAMB(_Rule):
    """LAMB (You et al. 2020, arXiv 1904.00962), for backends that keep arrays whole; weight decay is decoupled."""

    weight_decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-6

    def section(self) -> dict[str, Any]:
        """Return the spec's ``optimizer`` section with the same meaning."""
        return {**self._common(), "rule": "lamb", "momentum": self.betas[0], "beta2": self.betas[1], "eps": self.eps}


Rule: TypeAlias = SGD | Adam | AdamW | Lion | RMSprop | Adadelta | LAMB


@dataclass(frozen=True, kw_only=True)
class _Curve:
    warmup: int = 0
    """Updates over which the learning rate rises linearly from 0 to the curve."""
    per: Literal["update", "epoch"] = "update"
    """How often the factor changes."""

    def _section(self, name: str, **settings: Any) -> dict[str, Any]:
        warmup = {"epochs": None, "updates": self.warmup, "momentum_from": None} if self.warmup else None
        return {"name": name, "per": self.per, "warmup": warmup, **settings}


@explain_calls
@dataclass(frozen=True, kw_only=True)
class Constant(_Curve):
    """The learning rate stays as it is."""

    def section(self) -> dict[str, Any]:
        """Return the spec's ``schedule`` section with the same meaning."""
        return self._section("constant")


@explain_calls
@dataclass(frozen=True, kw_only=True)
class Linear(_Curve):
    """The learning rate falls linearly to ``final_factor`` times itself at the end of the loop."""

    final_factor: float = 0.0

    def section(self) -> dict[str, Any]:
        """Return the spec's ``schedule`` section with the same meaning."""
        return self._section("linear", final_factor=self.final_factor)


@explain_calls
@dataclass(frozen=True, kw_only=True)
class Cosine(_Curve):
    """The learning rate falls to ``final_factor`` times itself along half a cosine (Loshchilov and Hutter 2016)."""

    final_factor: float = 0.0

    def section(self) -> dict[str, Any]:
        """Return the spec's ``schedule`` section with the same meaning."""
        return self._section("cosine", final_factor=self.final_factor)


@explain_calls
@dataclass(frozen=True, kw_only=True)
class Polynomial(_Curve):
    """The learning rate falls to ``final_factor`` times itself, as the remaining share of the loop to the power ``power``."""

    power: float = 0.9
    final_factor: float = 0.0

    def section(self) -> dict[str, Any]:
        """Return the spec's ``schedule`` section with the same meaning."""
        return self._section("polynomial", power=self.power, final_factor=self.final_factor)


@explain_calls
@dataclass(frozen=True, kw_only=True)
class Exponential(_Curve):
    """The learning rate falls by the same factor in each epoch, to ``final_factor`` times itself at the end of the loop."""

    final_factor: float = 0.01

    def section(self) -> dict[str, Any]:
        """Return the spec's ``schedule`` section with the same meaning."""
        return self._section("exponential", final_factor=self.final_factor)


@explain_calls
@dataclass(frozen=True, kw_only=True)
class Step(_Curve):
    """The learning rate is multiplied by ``gamma`` after each of the epochs ``milestones``."""

    milestones: Sequence[float] = field(default_factory=tuple)
    gamma: float = 0.1

    def section(self) -> dict[str, Any]:
        """Return the spec's ``schedule`` section with the same meaning."""
        if not self.milestones:
            raise ScriptError("mtrain.Step: no milestones given; name the epochs, e.g. Step(milestones=[30, 60])")
        return self._section("step", milestones=list(self.milestones), gamma=self.gamma)


@explain_calls
@dataclass(frozen=True, kw_only=True)
class OneCycle(_Curve):
    """The learning rate rises to its value at ``peak`` of the loop and falls to ``final_factor`` (Smith and Topin 2017).

    It is that of torch's ``OneCycleLR`` with ``pct_start=peak`` and ``cycle_momentum=False``: momentum stays as it is.
    """

    peak: float = 0.3
    final_factor: float = 4e-6
    """Of the learning rate at the peak; the default is torch's 1 / (div_factor * final_div_factor)."""

    def section(self) -> dict[str, Any]:
        """Return the spec's ``schedule`` section with the same meaning."""
        return self._section("one_cycle", peak=self.peak, final_factor=self.final_factor)


Curve: TypeAlias = Constant | Linear | Cosine | Polynomial | Exponential | Step | OneCycle
RateOf: TypeAlias = Callable[[int], float]
"""Maps the number of an update (0-based) to the learning rate, in place of a curve."""
