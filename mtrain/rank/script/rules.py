"""Update rules and schedules as values, which a script passes to ``session.prepare``.

They mean the same on every backend and framework. Their arithmetic is that of the spec's ``optimizer`` and ``schedule``
sections, into which they are converted.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, ClassVar, Literal, TypeAlias, TypeVar, dataclass_transform

from mtrain.errors import ScriptError
from mtrain.spec.calls import explain_calls

T = TypeVar("T")


@explain_calls
@dataclass(frozen=True, kw_only=True)
class Group:
    """Parameters with settings of their own: those in whose name the regular expression ``match`` is found."""

    match: str
    learning_rate_factor: float = 1.0
    """Times the learning rate of the rule."""
    weight_decay: float | None = None
    """None: that of the rule."""


@dataclass_transform(kw_only_default=True, frozen_default=True)
def _value(kind: type[T]) -> type[T]:
    return explain_calls(dataclass(frozen=True, kw_only=True)(kind))


@dataclass(frozen=True, kw_only=True)
class _Rule:
    learning_rate: float
    """Learning rate, before the schedule."""
    weight_decay: float = 0.0
    groups: Sequence[Group] = ()
    """A parameter belongs to the first group that matches its name; those that none matches take the rule's values."""

    _rule: ClassVar[str]

    def section(self) -> dict[str, Any]:
        """Return the spec's ``optimizer`` section with the same meaning."""
        return {
            "learning_rate": self.learning_rate,
            "weight_decay": self.weight_decay,
            # Specs end with a group that takes the parameters which no other one has matched.
            "groups": [*map(asdict, self.groups), {"match": ""}],
            "rule": self._rule,
            **self._own(),
        }

    def _own(self) -> dict[str, Any]:
        """Return the keys that this rule has beside those of all; specs call the first beta, too, ``momentum``."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class _RuleWithBetas(_Rule):
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8

    def _own(self) -> dict[str, Any]:
        return {"momentum": self.betas[0], "beta2": self.betas[1], "eps": self.eps}


@_value
class SGD(_Rule):
    """Stochastic gradient descent with momentum (Sutskever et al. 2013), as in torch and Paddle."""

    _rule = "sgd"
    momentum: float = 0.0
    nesterov: bool = False

    def _own(self) -> dict[str, Any]:
        return {"momentum": self.momentum, "nesterov": self.nesterov}


@_value
class Adam(_RuleWithBetas):
    """Adam (Kingma and Ba 2014, arXiv 1412.6980); weight decay is added to the gradient."""

    _rule = "adam"


@_value
class AdamW(_RuleWithBetas):
    """Adam with decoupled weight decay (Loshchilov and Hutter 2017, arXiv 1711.05101)."""

    _rule = "adamw"
    weight_decay: float = 0.01


@_value
class Lion(_Rule):
    """Lion (Chen et al. 2023, arXiv 2302.06675): steps are signs; weight decay is decoupled."""

    _rule = "lion"
    betas: tuple[float, float] = (0.9, 0.99)

    def _own(self) -> dict[str, Any]:
        return {"momentum": self.betas[0], "beta2": self.betas[1]}


@_value
class RMSprop(_Rule):
    """RMSprop (Tieleman and Hinton 2012), not centred, as in torch; weight decay is added to the gradient."""

    _rule = "rmsprop"
    alpha: float = 0.99
    momentum: float = 0.0
    eps: float = 1e-8

    def _own(self) -> dict[str, Any]:
        return {"momentum": self.momentum, "beta2": self.alpha, "eps": self.eps}


@_value
class LAMB(_RuleWithBetas):
    """LAMB (You et al. 2020, arXiv 1904.00962), for backends that keep arrays whole; weight decay is decoupled."""

    _rule = "lamb"
    weight_decay: float = 0.01
    eps: float = 1e-6


@_value
class Muon(_Rule):
    """Muon (Jordan et al. 2024, Liu et al. 2025, arXiv 2502.16982) for hidden matrices, AdamW for the rest, at one learning rate.

    It needs a backend on torch that keeps arrays whole.
    """

    _rule = "muon"
    weight_decay: float = 0.1
    momentum: float = 0.95
    nesterov: bool = True
    adamw: Sequence[str] = ("(?<![a-z])emb", "wte|wpe", "(?<![a-z])head(?![a-z])", "classifier")
    """Regular expressions of the names of matrices that AdamW trains: embeddings and heads. Arrays with another number of axes always
    are."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Of AdamW, as ``eps``."""
    eps: float = 1e-8

    def _own(self) -> dict[str, Any]:
        beta1, beta2 = self.betas
        own = {"adamw": list(self.adamw), "beta1": beta1, "beta2": beta2, "eps": self.eps}
        return {"momentum": self.momentum, "nesterov": self.nesterov, **own}


Rule: TypeAlias = SGD | Adam | AdamW | Lion | RMSprop | LAMB | Muon


@dataclass(frozen=True, kw_only=True)
class _Curve:
    warmup: int = 0
    """Updates over which the learning rate rises linearly from 0 to the curve."""
    per: Literal["update", "epoch"] = "update"
    """How often the factor changes."""

    _name: ClassVar[str]

    def section(self) -> dict[str, Any]:
        """Return the spec's ``schedule`` section with the same meaning."""
        warmup = {"epochs": None, "updates": self.warmup, "momentum_from": None} if self.warmup else None
        own = {each.name: getattr(self, each.name) for each in fields(self) if each.name not in ("warmup", "per")}
        return {"name": self._name, "per": self.per, "warmup": warmup, **own}


@_value
class Constant(_Curve):
    """The learning rate stays as it is."""

    _name = "constant"


@_value
class Linear(_Curve):
    """The learning rate falls linearly to ``final_factor`` times itself at the end of the loop."""

    _name = "linear"
    final_factor: float = 0.0


@_value
class Cosine(_Curve):
    """The learning rate falls to ``final_factor`` times itself along half a cosine (Loshchilov and Hutter 2016)."""

    _name = "cosine"
    final_factor: float = 0.0


@_value
class Polynomial(_Curve):
    """The learning rate falls to ``final_factor`` times itself, as the remaining share of the loop to the power ``power``."""

    _name = "polynomial"
    power: float = 0.9
    final_factor: float = 0.0


@_value
class Exponential(_Curve):
    """The learning rate falls by the same factor in each epoch, to ``final_factor`` times itself at the end of the loop."""

    _name = "exponential"
    final_factor: float = 0.01


@_value
class Step(_Curve):
    """The learning rate is multiplied by ``gamma`` after each of the epochs ``milestones``."""

    _name = "step"
    milestones: Sequence[float] = field(default_factory=tuple)
    gamma: float = 0.1

    def section(self) -> dict[str, Any]:
        """See ``_Curve.section``.

        Raises:
            ScriptError: there are no milestones.
        """
        if not self.milestones:
            raise ScriptError("mtrain.Step: no milestones given; name the epochs, e.g. Step(milestones=[30, 60])")
        return {**super().section(), "milestones": list(self.milestones)}


@_value
class OneCycle(_Curve):
    """The learning rate rises to its value at ``peak`` of the loop and falls to ``final_factor`` (Smith and Topin 2017).

    It is that of torch's ``OneCycleLR`` with ``pct_start=peak`` and ``cycle_momentum=False``: momentum stays as it is.
    """

    _name = "one_cycle"
    peak: float = 0.3
    final_factor: float = 4e-6
    """Of the learning rate at the peak; the default is torch's 1 / (div_factor * final_div_factor)."""


Curve: TypeAlias = Constant | Linear | Cosine | Polynomial | Exponential | Step | OneCycle
RateOf: TypeAlias = Callable[[int], float]
"""Maps the number of an update (0-based) to the learning rate, in place of a curve."""
