"""Language modelling as a kind of task: connect a job to texts. The work is done in other modules."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from mtrain.core.interfaces import Array, Collective, Evaluator, Remark, Table, Task
from mtrain.core.overriding import override
from mtrain.errors import DataError, SpecError
from mtrain.spec.section import Section
from mtrain.tasks.base import TaskBase
from mtrain.tasks.own.section import OwnOptimizerSpec, OwnScheduleSpec, OwnTrainSpec
from mtrain_language.section import GenerateSpec, LanguageDataSpec, data_of, has_conversations

if TYPE_CHECKING:
    from mtrain.spec.model import Spec
    from mtrain.tasks.datasets import OpenData
    from mtrain_language.chat import ChatTemplate
    from mtrain_language.packing import Rows
    from mtrain_language.source import RowSource


class LanguageTask(TaskBase):
    """The text side of a job. Implements ``TaskData`` of ``core.interfaces``; the class itself is a ``TaskKind``."""

    # Training has the defaults of a plain loop, as models of other libraries expect.
    sections: ClassVar[Mapping[str, type[Section]]] = {
        "data": LanguageDataSpec,
        "train": OwnTrainSpec,
        "optimizer": OwnOptimizerSpec,
        "schedule": OwnScheduleSpec,
        "generate": GenerateSpec,
    }

    def __init__(self, spec: "Spec", data: "OpenData", *, training: bool = True) -> None:
        self._spec, self._data, self._section = spec, data, data_of(spec)
        self._training = training
        self._scored = spec.evaluate.enabled or not training

    @classmethod
    @override
    def refuse(cls, spec: "Spec", *, framework: str) -> None:
        """Refuse keys of images, and a backend on another framework than that of the models."""
        from mtrain.core.network.quantising import OF_OWN_MODEL

        for key in ("images", "names"):
            if getattr(spec.data, key) is not None:
                raise SpecError(f"data.{key}: means nothing to texts; leave it out")
        if spec.train.quantise is not None:
            raise SpecError(OF_OWN_MODEL)
        if spec.evaluate.augment:
            raise SpecError("evaluate.augment: true given, but texts are not varied; set it to false")
        if spec.model.name == "hf" and framework != "torch":
            raise SpecError(
                f"model.name: hf is a model of torch, but backend.name: {spec.backend.name} is on {framework}; choose a "
                "backend on torch"
            )

    @classmethod
    @override
    def divided(cls, data: Any, read_all: Callable[[], Any]) -> tuple[Any, Any] | None:
        return None if data.split is None else read_all().divide(data.split, seed=data.split_seed)

    @classmethod
    @override
    def unreadable(cls, spec: "Spec", files: Sequence[Path]) -> dict[Path, str]:
        """Return the files that hold no text."""
        from mtrain_language.prediction import text_of

        reasons = {}
        for file in files:
            try:
                text_of(file)
            except DataError as error:
                reasons[file] = str(error)
        return reasons

    @classmethod
    def images(cls, spec: "Spec", files: Sequence[Path], labels: Mapping[str, Any]) -> Any:
        """Return the texts of files, to be continued; see ``TaskKind.images``."""
        from mtrain_language.prediction import LanguageTexts

        return LanguageTexts(spec, files)

    def task(self) -> Task:
        """Return the facts from which the model is built."""
        from mtrain_language.tokens import facts

        details = facts(self._tokenizer, self._section)
        batch_size = self._spec.train.batch_size
        return Task(kind="language", class_names=(), image_size=0, global_batch=batch_size, details=details)

    def statistics(self) -> Mapping[str, Any]:
        """Return nothing: a model is built from the facts on tokens alone."""
        return {}

    @cached_property
    def _tokenizer(self) -> Any:
        from mtrain_language.tokens import tokenizer_of

        return tokenizer_of(self._section)

    @cached_property
    def _template(self) -> "ChatTemplate | None":
        """What makes text of conversations; None: there are none, or no template."""
        from mtrain_language.chat import template_of

        return (
            template_of(self._section.tokenizer, self._section.chat_template)
            if has_conversations(self._section)
            else None
        )

    @cached_property
    def _rows(self) -> "dict[str, Rows]":
        """The packed rows of the splits that the job uses."""
        from mtrain_language.packing import pack

        return {
            name: pack(split.items, self._tokenizer, length=self._section.length, template=self._template)
            for name, split in self._splits().items()
        }

    def sources(self) -> "Mapping[str, RowSource]":
        """Return the sources: ``train`` (only for training) and ``val`` (only for evaluation)."""
        return self._sources

    @cached_property
    def _sources(self) -> "dict[str, RowSource]":
        from mtrain.core.samples.sampler import Shuffled
        from mtrain_language.source import RowSource

        rows, train = self._rows, self._spec.train
        sources = {}
        if self._training:
            order = Shuffled(len(rows["train"]), global_batch=train.batch_size, seed=train.seed)
            # Only training shuffles; an evaluation takes each row once, in its order.
            sources["train"] = RowSource(rows["train"], order=order)
        if self._scored:
            sources["val"] = RowSource(rows["val"])
        return sources

    @override
    def entered(self, *, collective: Collective, seed_framework: Callable[[int], None]) -> None:
        """Check that all ranks have read the same rows.

        Raises:
            DataError: They have not.
        """
        mine = {name: source.fingerprint for name, source in self._sources.items()}
        # Ranks tokenise by themselves: another version of a library, or another file, gives other rows.
        if len({tuple(sorted(each.items())) for each in collective.all_gather(mine)}) > 1:
            raise DataError(
                "data: the ranks have read different texts or tokens; give every host the same files, the same "
                "data.tokenizer, and for data.format: python_docs the same Python"
            )

    def verify(self) -> str:
        """Read and pack all documents."""
        return ", ".join(f"{name}: {self._count_tokens(rows)}" for name, rows in self._rows.items())

    def length(self, split: str) -> int:
        """Return the number of rows of ``train`` or ``val``; 0 if a split is not used."""
        return len(self._rows[split]) if split in self._rows else 0

    @override
    def samples_digest(self) -> str:
        return f"{self._sources['train'].fingerprint:08x}"

    @override
    def unit(self) -> tuple[str, int] | None:
        return "tokens", self._section.length

    def evaluator(self) -> Evaluator:
        """Create an evaluator for the evaluation split."""
        from mtrain_language.evaluator import TokenEvaluator

        return TokenEvaluator()

    def labels(self) -> dict[str, Any]:
        """Return an empty list of classes, because texts have none, and what reads and writes the tokens."""
        return {
            "class_names": [],
            "native": True,
            "tokenizer": self._section.tokenizer,
            "end_token": self._section.end_token,
            "chat_template": self._section.chat_template,
        }

    def report(self) -> list[str]:
        """Return a sentence on each split of which tokens are left over."""
        return [
            f"{name}: {rows.dropped} tokens at the end do not fill a row"
            for name, rows in self._rows.items()
            if rows.dropped
        ]

    def describe(self) -> list[Table | Remark]:
        """Tabulate documents, rows and tokens of each split."""
        rows = [
            (name, str(packed.documents), str(len(packed)), str(packed.tokens.size), str(int(packed.counts.sum())))
            for name, packed in self._rows.items()
        ]
        table = Table(columns=("split", "documents", "rows", "tokens", "tokens to learn"), rows=rows)
        words = f"{self._tokenizer.size} different tokens ({self._section.tokenizer}), {self._section.length} in a row"
        return [table, Remark(text=words)]

    def views(self, *, limit: int) -> Iterator[tuple[str, str, Array]]:
        """Yield no images: texts have none."""
        yield from ()

    def draw(self, partial: Mapping[int, Any], path: Path) -> None:
        """Draw nothing: texts have no images."""
        return

    def _count_tokens(self, rows: "Rows") -> str:
        return f"{rows.documents} documents in {len(rows)} rows of {self._section.length} tokens"

    def _splits(self) -> dict[str, Any]:
        names = [name for name, used in (("train", self._training), ("val", self._scored)) if used]
        return {name: getattr(self._data, name) for name in names}
