"""A user's own model and data as a kind of task: connect a job to them. The work is done in other modules."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from mtrain.core.interfaces import Array, Collective, Remark, Table, Task
from mtrain.errors import DataError, SpecError
from mtrain.spec import references
from mtrain.spec.section import Section, narrowed
from mtrain.tasks.base import TaskBase
from mtrain.tasks.own.section import (
    OwnDataSpec,
    OwnEvaluateSpec,
    OwnModelSpec,
    OwnOptimizerSpec,
    OwnScheduleSpec,
    OwnTrainSpec,
)

if TYPE_CHECKING:
    from mtrain.spec.model import Spec
    from mtrain.tasks.datasets import OpenData
    from mtrain.tasks.own.evaluator import Metric, OwnEvaluator
    from mtrain.tasks.own.source import OwnSource


class OwnTask(TaskBase):
    """The user's side of a job. Implements ``TaskData`` of ``core.interfaces``; the class itself is a ``TaskKind``."""

    sections: ClassVar[Mapping[str, type[Section]]] = {
        "model": OwnModelSpec,
        "data": OwnDataSpec,
        "train": OwnTrainSpec,
        "optimizer": OwnOptimizerSpec,
        "schedule": OwnScheduleSpec,
        "evaluate": OwnEvaluateSpec,
    }
    in_ranks: ClassVar[bool] = True

    def __init__(self, spec: "Spec", data: "OpenData", *, training: bool = True) -> None:
        self._spec = spec
        self._data = data
        self._training = training
        self._section = narrowed(spec.data, OwnDataSpec, where="data")
        self._scoring = narrowed(spec.evaluate, OwnEvaluateSpec, where="evaluate")
        self._score = spec.evaluate.enabled or not training
        self._collective: Collective | None = None
        if self._score and not self._scoring.metrics:
            raise SpecError(
                "evaluate.metrics: none given, so nothing can be scored; name at least one, such as "
                "metrics: [sklearn.metrics:accuracy_score]"
            )
        if self._score:
            self._metrics  # noqa: B018 - a metric that cannot be made is reported before the ranks join

    @classmethod
    def own_code(cls, spec: "Spec") -> dict[str, str]:
        """Return the references to model, data set and metrics, by the key of the spec that names each."""
        scoring = narrowed(spec.evaluate, OwnEvaluateSpec, where="evaluate")
        named = {f"metric {text.rpartition(':')[2]}": text for text in scoring.metrics}
        return {"model": spec.model.name, "data": spec.data.format, **named}

    @classmethod
    def refuse(cls, spec: "Spec", *, framework: str) -> None:
        """Refuse another framework, options that a class does not take, and keys that mean nothing to own data."""
        from mtrain.core.network.quantising import OF_OWN_MODEL
        from mtrain.tasks.own import calls
        from mtrain.tasks.own.dataset import OFFERED

        code = {key: references.parse(_referring(text, key)) for key, text in cls.own_code(spec).items()}
        wanted = spec.model.declared_framework
        if wanted not in (None, framework):
            raise SpecError(
                f"model.framework: {wanted}, but backend.name: {spec.backend.name} is on {framework}; choose a backend on {wanted}"
            )
        set_keys = [key for key in ("train", "val", "images", "names") if getattr(spec.data, key) is not None]
        if set_keys:
            raise SpecError(
                f"data.{set_keys[0]}: means nothing to a data set of your own; give it what it needs in data.options"
            )
        if spec.data.workers not in ("auto", 0):
            raise SpecError(
                f"data.workers: {spec.data.workers} given, but a data set of your own is read in the process of each rank; leave "
                "it out"
            )
        if spec.train.quantise is not None:
            raise SpecError(OF_OWN_MODEL)
        calls.refuse_unknown(code["model"], spec.model.options, frozenset(), path="model.options")
        calls.refuse_unknown(code["data"], spec.data.options, OFFERED, path="data.options")
        for key, reference in code.items():
            if key not in ("model", "data"):
                references.look(reference)

    @classmethod
    def images(cls, spec: "Spec", files: Sequence[Path], labels: Mapping[str, Any]) -> Any:
        """Refuse to predict on images: only the user's data set knows how a file becomes a sample.

        Raises:
            DataError: always.
        """
        raise DataError(
            "predict: images cannot be given to a model of your own, because only your data set knows how a file becomes a "
            "sample; score a split with `mtrain evaluate`, or load the weights in your code (`mtrain weights export RUN --to x.pt`)"
        )

    def task(self) -> Task:
        """Return the facts that a model needs before it is built."""
        from mtrain.tasks.own.model import OwnFacts

        return OwnFacts(
            kind="own",
            class_names=(),
            image_size=0,
            global_batch=self._spec.train.batch_size,
            scored=self._score,
            seed=self._spec.train.seed,
        )

    def sources(self) -> "Mapping[str, OwnSource]":
        """Return the sources: ``train`` (only for training) and ``val`` (only for evaluation)."""
        return self._sources

    @cached_property
    def _sources(self) -> "dict[str, OwnSource]":
        from mtrain.tasks.own.source import OwnSource

        floats = "float64" if self._spec.train.precision == "fp64" else None
        reference, seed = references.parse(self._spec.data.format), self._spec.train.seed
        return {
            name: OwnSource(split.dataset, reference, split=name, seed=seed, floats=floats)
            for name, split in self._splits().items()
        }

    def entered(self, *, collective: Collective, seed_framework: Callable[[int], None]) -> None:
        """Check that samples repeat, and that all ranks read the same ones.

        Raises:
            DataError: they do not.
        """
        from mtrain.tasks.own.source import check_equal_data

        self._collective = collective
        for source in self._sources.values():
            source.seed_framework = seed_framework
        if self._training and self._section.nondeterministic == "refuse":
            self._sources["train"].check_repeatable()
        check_equal_data(self._sources, collective, values=self._section.nondeterministic == "refuse")

    def verify(self) -> str:
        """Count the samples; only the first of each split is read."""
        return ", ".join(f"{len(split)} samples in {name}" for name, split in self._splits().items())

    def length(self, split: str) -> int:
        """Return the number of samples of ``train`` or ``val``; 0 if a split is not used."""
        splits = self._splits()
        return len(splits[split]) if split in splits else 0

    def statistics(self) -> Mapping[str, Any]:
        """Return no statistics: a user's model is built from its options alone."""
        return {}

    @cached_property
    def _metrics(self) -> "list[Metric]":
        from mtrain.tasks.own.evaluator import metric

        options = self._scoring.metric_options
        named = [references.parse(_referring(text, "evaluate.metrics")) for text in self._scoring.metrics]
        return [metric(reference, options.get(reference.name, {})) for reference in named]

    def evaluator(self) -> "OwnEvaluator":
        """Create an evaluator for the evaluation split."""
        from mtrain.tasks.own.evaluator import OwnEvaluator

        return OwnEvaluator(self._metrics, self._collective, lower_is_better=self._scoring.lower_is_better)

    def labels(self) -> dict[str, Any]:
        """Return nothing but an empty list of classes: a user's data set has none that mtrain knows."""
        return {"class_names": []}

    def report(self) -> list[str]:
        """Return no sentences: nothing is known about the content."""
        return []

    def describe(self) -> list[Table | Remark]:
        """Describe the number of samples of each split, and the content of the first one."""
        from mtrain.tasks.own.source import outline

        return [
            Remark(text=f"{name}: {len(split)} samples, each {outline(self._sources[name].sample(0, 0)[1])}")
            for name, split in self._splits().items()
        ]

    def views(self, *, limit: int) -> Iterator[tuple[str, str, Array]]:
        """Yield no images: a sample need not be one."""
        yield from ()

    def draw(self, partial: Mapping[int, Any], path: Path) -> None:
        """Draw nothing: a sample need not be an image."""
        return

    def _splits(self) -> dict[str, Any]:
        names = [name for name, used in (("train", self._training), ("val", self._score)) if used]
        return {name: getattr(self._data, name) for name in names}


def _referring(text: str, key: str) -> str:
    """Return ``text`` if it refers to code.

    Raises:
        SpecError: it is the name of a plugin.
    """
    if not references.is_reference(text):
        raise SpecError(f"{key}: given {text!r}, {references.FORM}")
    return text
