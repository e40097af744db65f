"""The teacher of a job: a trained model that the job's model imitates, as ``train.distil`` of the spec says."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mtrain.core.interfaces import Array, Collective, Imitation, JobData, Model, Module
from mtrain.core.network import pruned
from mtrain.core.state.digest import digest
from mtrain.errors import CheckpointError, SpecError
from mtrain.spec.resolved import Resolved
from mtrain.spec.training import DistilSpec
from mtrain.weights.matching import EntryType, entry_types, match
from mtrain.weights.outline import Question, outlines
from mtrain.weights.reading import Weights, read

KEY = "train.distil"


@dataclass(frozen=True, kw_only=True, slots=True)
class Teacher:
    """A trained model, read but not yet built."""

    plugin: Model
    name: str
    """Name of the model's plugin."""
    options: Mapping[str, Any]
    weights: Weights
    pruned: Mapping[str, Sequence[int]] | None
    """Sizes of the layers of a pruned network; None: as the model has them."""

    def values(self, state: Mapping[str, EntryType]) -> dict[str, Array]:
        """Return the weights for a network of this model whose state has these names and shapes, but for counters.

        Raises:
            CheckpointError: the weights do not fit the model.
        """
        result = match(self.weights, state, self.plugin.published)
        if result.left_over:
            raise CheckpointError(
                f"{KEY}.teacher: {result.summary()}: {'; '.join(result.warnings())}; give the whole weights of a model of "
                "this data's classes"
            )
        return result.matched


def read_teacher(job: Resolved) -> Teacher | None:
    """Read the teacher that the spec of ``job`` names; None if it names none.

    Raises:
        SpecError: the teacher is of no use to the job's model.
        CheckpointError: its weights cannot be read.
        PluginError: its model is not installed.
    """
    distil = job.spec.train.distil
    if distil is None:
        return None
    if not distil.teacher:
        raise SpecError(
            f"{KEY}.teacher: missing; name a run folder, a checkpoint or a file of weights, or set {KEY}: null"
        )
    path = Path(distil.teacher)
    if not path.exists():
        raise SpecError(
            f"{KEY}.teacher: {path}: no such file or folder; give a run folder such as runs/digits, a checkpoint, or a file "
            "of weights"
        )
    try:
        weights = read(path)
    except CheckpointError as error:
        raise CheckpointError(f"{KEY}.teacher: {error}") from error
    name = distil.model or weights.model
    if name is None:
        raise SpecError(
            f"{KEY}.model: {path} is a file of weights, which does not say its model; give it, such as {KEY}.model: yolov5s"
        )
    raw_options = distil.options if distil.model else weights.options
    kind: Any = job.registry.load("models", name)
    options = job.registry.options("models", name, raw_options, path=f"{KEY}.options")
    _check_pair(distil, student=(job.spec.model.name, job.model_class), teacher=(name, kind))
    return Teacher(
        plugin=kind(options),
        name=name,
        options=raw_options,
        weights=weights,
        pruned=None if distil.model else weights.pruned,
    )


def _check_pair(distil: DistilSpec, *, student: tuple[str, type[Model]], teacher: tuple[str, type[Model]]) -> None:
    """Refuse a pair of models of which one cannot imitate the other.

    Raises:
        SpecError: they are for different tasks, or one of them cannot show what the spec asks for.
    """
    if student[1].kind != teacher[1].kind:
        raise SpecError(
            f"{KEY}.teacher: {teacher[0]} is for {teacher[1].kind}, but model.name: {student[0]} is for {student[1].kind}; "
            "give a teacher of the same task"
        )
    for what, gain in (("outputs", distil.outputs), ("features", distil.features)):
        for role, (name, kind) in (("student", student), ("teacher", teacher)):
            if gain > 0 and what not in kind.imitates:
                able = f"its {' and '.join(kind.imitates)}" if kind.imitates else "nothing"
                raise SpecError(
                    f"{KEY}.{what}: {gain:g} given, but {name} as {role} can share {able}; "
                    + (f"set {KEY}.{what}: 0" if kind.imitates else "take another model")
                )


def check_teacher(job: Resolved, class_names: list[str]) -> None:
    """Check before any rank starts that the teacher exists and fits the job and its data.

    Raises:
        UsageError: it does not; see ``read_teacher``.
    """
    teacher = read_teacher(job)
    if teacher is None:
        return
    known = teacher.weights.labels.get("class_names")
    # The order counts too: outputs are compared place by place.
    if known is not None and list(known) != class_names:
        raise SpecError(
            f"{KEY}.teacher: {teacher.weights.path} was trained for {_show(list(known))}, but this job's classes are "
            f"{_show(class_names)}; give a teacher of the same classes in the same order"
        )
    question = Question(
        model=teacher.name,
        classes=len(class_names),
        image_size=job.spec.data.input_side,
        options=teacher.options,
        policy=job.spec.plugins,
        pruned=teacher.pruned,
    )
    state = outlines([question])[0]
    # None: the model's shapes are known to its framework alone, so the ranks find out.
    if state is not None:
        teacher.values(state)


def attach(job: Resolved, network: Module, data: JobData, collective: Collective) -> str | None:
    """Build the teacher of the job, if there is one, and let ``network`` imitate it; return the digest of its weights.

    The framework is bound, and ``network`` is placed on its device.

    Raises:
        UsageError: see ``read_teacher``.
    """
    teacher = read_teacher(job)
    distil = job.spec.train.distil
    if teacher is None or distil is None:
        return None
    from mtrain.core import nn

    task = data.task()
    details = teacher.weights.labels.get("details")
    task = teacher.plugin.prepare_task(task, data.statistics()) if details is None else replace(task, details=details)

    def values(state: Mapping[str, Array]) -> Mapping[str, Array]:
        return {**state, **teacher.values(entry_types(state))}

    whole: Any = network
    whole.imitation = Imitation(
        teacher=nn.frozen(pruned.build(teacher.plugin, task, collective, teacher.pruned), values, like=network),
        labels=distil.labels,
        outputs=distil.outputs,
        features=distil.features,
        temperature=distil.temperature,
    )
    return digest(teacher.weights.arrays)


def _show(names: list[str]) -> str:
    return f"{len(names)} classes ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''})"
