"""The sections of a spec for a model and data of the user's own. Imports no framework.

The defaults of training are those of a plain loop: no clipping, no average, no warm-up, one learning rate for all parameters.
"""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from mtrain.spec.model import DataSpec, EvaluateSpec, ModelSpec
from mtrain.spec.references import May
from mtrain.spec.section import Positive
from mtrain.spec.training import EmaSpec, GroupSpec, OptimizerSpec, ScheduleSpec, TrainSpec, WarmupSpec


class OwnModelSpec(ModelSpec):
    """A class or function that returns a native module."""

    framework: Literal["torch", "paddle"] | None = Field(default=None, description="framework of the model")

    @property
    def declared_framework(self) -> str | None:
        """See ``ModelSpec.declared_framework``."""
        return self.framework


class OwnDataSpec(DataSpec):
    """An object with a length and items."""

    nondeterministic: Literal["refuse", "allow"] = Field(
        default="refuse", description="allow: samples may differ when they are read again, also after a resume"
    )


class OwnEvaluateSpec(EvaluateSpec):
    """Metrics on the predictions of the model."""

    enabled: bool = Field(
        default=False,
        description="whether the evaluation split is scored; not given: if there are metrics. Without it the last "
        "checkpoint counts as best",
    )
    metrics: Annotated[list[str], May()] = Field(
        default_factory=list,
        description="PATH.py:Name: a function with parameters named like predictions and targets, or a class with "
        "update(predictions, targets) and compute()",
    )
    metric_options: dict[str, dict[str, Any]] = Field(
        default_factory=dict, description="options, by the metric's name without its path"
    )
    lower_is_better: bool = Field(default=False, description="whether the best checkpoint has the lowest first metric")

    @model_validator(mode="before")
    @classmethod
    def _metrics_enable(cls, values: Any) -> Any:
        if isinstance(values, dict) and "enabled" not in values:
            return {**values, "enabled": bool(values.get("metrics"))}
        return values

    @model_validator(mode="after")
    def _names_a_metric(self) -> "OwnEvaluateSpec":
        if self.enabled and not self.metrics:
            raise ValueError(
                "enabled is true and metrics is empty; name at least one, such as metrics: [sklearn.metrics:accuracy_score]"
            )
        return self


class OwnTrainSpec(TrainSpec):
    """Training with the defaults of a plain loop."""

    clip_norm: float | None = Field(
        default=None, gt=0, description="largest global L2 norm of the gradient; null: no limit"
    )
    ema: EmaSpec | None = Field(default=None, description="null: no average")
    channels_last: bool | Literal["auto"] = Field(
        default=False, description="memory layout of torch's convolutions; false: contiguous"
    )
    accumulate: Positive | Literal["auto"] = Field(
        default=1, description="micro batches per update; auto: as few as max_micro_batch allows"
    )


class OwnOptimizerSpec(OptimizerSpec):
    """One group of parameters, no momentum and no weight decay, unless they are given."""

    momentum: float = Field(
        default=0.0, ge=0, lt=1, description="sgd and rmsprop: momentum; others: beta1, which is 0.9 if it is not given"
    )
    nesterov: bool = Field(default=False, description="sgd: look ahead along the momentum")
    weight_decay: float = Field(default=0.0, ge=0, description="of the groups that do not give their own")
    groups: list[GroupSpec] = Field(
        default_factory=lambda: [GroupSpec(match="")], description="by name, the first match wins"
    )

    @model_validator(mode="before")
    @classmethod
    def _beta1(cls, values: Any) -> Any:
        if (
            isinstance(values, dict)
            and values.get("rule") in ("adam", "adamw", "lion", "lamb")
            and "momentum" not in values
        ):
            return {**values, "momentum": 0.9}
        return values


class OwnScheduleSpec(ScheduleSpec):
    """A constant learning rate, unless a curve is given."""

    name: Literal["cosine", "linear", "polynomial", "exponential", "step", "one_cycle", "constant"] = Field(
        default="constant", description="shape of the curve"
    )
    per: Literal["epoch", "update"] = Field(
        default="update", description="the factor changes at each epoch or each update"
    )
    warmup: WarmupSpec | None = Field(default=None, description="null: no warm-up")
