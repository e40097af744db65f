"""Outline models: find names, shapes and types of a model's state without a framework.

Models are written on ``core.nn`` and ``core.ops``, which are empty until they are bound to a framework's layers and
functions. Here they are bound to layers that consist of names and shapes only. That happens in a process of its own,
because a process can bind them only once: ``python -m mtrain.weights.outline`` reads questions as JSON from standard
input and prints the answers as JSON.
"""

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from types import ModuleType
from typing import TYPE_CHECKING, Any

from mtrain.core.interfaces import Task
from mtrain.errors import UnboundError
from mtrain.weights.matching import EntryType

if TYPE_CHECKING:
    from mtrain.spec.model import Spec

_TIMEOUT_S = 600
"""Seconds after which a model counts as one that cannot be outlined: on a busy host imports alone take a minute."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """A model to outline, as a job would build it."""

    model: str
    classes: int = 1
    image_size: int = 640
    """Side of the images in pixels; a transformer's positions depend on it."""
    options: Mapping[str, Any] = field(default_factory=dict)
    policy: str | None = None
    """The ``plugins.toml`` of the spec."""
    pruned: Mapping[str, Sequence[int]] | None = None
    """The sizes of a pruned network, see ``core.network.pruned``."""


def question_of(spec: "Spec", *, classes: int) -> Question:
    """Return the question for the model of ``spec`` for data with ``classes`` classes."""
    return Question(
        model=spec.model.name,
        classes=classes,
        image_size=spec.data.input_side,
        options=spec.model.options,
        policy=spec.plugins,
        pruned=spec.model.pruned,
    )


class SpecOutline:
    """The outline of a spec's model, made when its state is first read and then cached, because it starts a process."""

    def __init__(self, spec: "Spec", *, classes: int) -> None:
        """Describe the model of ``spec`` for data with ``classes`` classes; nothing is built yet."""
        self._question = question_of(spec, classes=classes)

    @cached_property
    def state(self) -> Mapping[str, EntryType] | None:
        """Required shape and type of each entry by name; None if the model cannot be outlined without its framework."""
        return outlines([self._question])[0]


def outlines(questions: Sequence[Question]) -> list[dict[str, EntryType] | None]:
    """Outline each model: shape and type of each entry by name, or None if building it needs more than layers."""
    command = [sys.executable, "-m", "mtrain.weights.outline"]
    request = json.dumps([asdict(question) for question in questions])
    try:
        # A process of its own, because layers can be bound only once in one; a single one for all questions.
        process = subprocess.run(  # noqa: S603  # this interpreter, our own module
            command, input=request, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True
        )
        # The last line: a plugin may print while it is imported.
        answers = json.loads(process.stdout.splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return [None] * len(questions)
    return [
        None
        if answer is None
        else {name: EntryType(shape=tuple(shape), dtype=dtype) for name, (shape, dtype) in answer.items()}
        for answer in answers
    ]


def classes_in(
    shapes: Mapping[str, tuple[int, ...]], one: Mapping[str, EntryType], two: Mapping[str, EntryType]
) -> int | None:
    """Infer a file's number of classes from the model's outlines for one and for two classes.

    Sizes grow linearly with the number of classes, so each size that differs between the outlines votes for a number.

    Returns:
        The number with the most votes; None if no array of the file depends on it.
    """
    votes: Counter[int] = Counter()
    for name, shape in shapes.items():
        if name in one and len(shape) == len(one[name].shape):
            for size, first, second in zip(shape, one[name].shape, two[name].shape, strict=True):
                if first != second and (size - first) % (second - first) == 0:
                    votes[1 + (size - first) // (second - first)] += 1
    likely = [count for count, _ in votes.most_common() if count > 0]
    return likely[0] if likely else None


def _answer(question: Question) -> dict[str, tuple[tuple[int, ...], str]] | None:
    from mtrain.core.collective import OneRank
    from mtrain.core.network import pruned
    from mtrain.spec.registry import Registry

    plugin = Registry.read(question.policy).make("models", question.model, question.options, path="model.options")
    names = [str(i) for i in range(question.classes)]
    task = Task(kind=plugin.kind, class_names=names, image_size=question.image_size, global_batch=1)
    if plugin.native:
        entries: Mapping[str, tuple[tuple[int, ...], str]] | None = plugin.entries(task)
        return None if entries is None else dict(entries)  # None: a user's own code, which runs in ranks alone
    network = pruned.build(plugin, task, OneRank(), question.pruned)
    return {name: (entry.shape, entry.dtype) for name, entry in network.state()}


def _bind() -> None:
    from mtrain.core import ops
    from mtrain.core.binding import bind
    from mtrain.weights import outline_nn

    inert = ModuleType("mtrain.weights.outline_ops")
    vars(inert).update(dict.fromkeys(ops.NAMES, _computes_nothing))
    bind(outline_nn, inert)


def _computes_nothing(*_: Any, **__: Any) -> Any:
    raise UnboundError("an outline computes nothing")


def main() -> None:
    """Read questions from standard input and print the answers."""
    _bind()
    answers: list[Any] = []
    for fields in json.load(sys.stdin):
        try:
            answers.append(_answer(Question(**fields)))
        except Exception:  # a plugin's model may fail in any way on layers that compute nothing
            answers.append(None)
    print(json.dumps(answers))


if __name__ == "__main__":
    main()
