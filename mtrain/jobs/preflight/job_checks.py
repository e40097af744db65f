"""Check data, classes, sizes and plugins of a job before any rank starts. Imports no framework."""

import os
import sys
from math import prod
from pathlib import Path

from mtrain.core.checkpoint.format import MANIFEST, read_description, size_of
from mtrain.core.checkpoint.store import progress_of, reusable_bytes
from mtrain.core.interfaces import Evaluator, TaskData
from mtrain.core.samples import resumed_samples
from mtrain.core.samples.sampler import Shuffled
from mtrain.core.update.cadence import check_continues
from mtrain.core.update.recipe import check_frozen, is_frozen, make_recipe
from mtrain.core.update.schedule import total_updates
from mtrain.errors import CheckpointError, SpecError
from mtrain.jobs.resume.check import check_resume, checkpoint_bytes
from mtrain.jobs.run import metrics
from mtrain.rank.spec.assembly import blocks_to_recompute, make_augmented, open_task
from mtrain.rank.spec.teaching import check_teacher
from mtrain.spec.model import Spec
from mtrain.spec.resolved import Resolved
from mtrain.spec.suggest import hint
from mtrain.system import build_locks, disk, environment, interpreter, placement, plugin_packages
from mtrain.weights.backup.place import StorageFolder
from mtrain.weights.models import check_start
from mtrain.weights.names import COUNTER
from mtrain.weights.outline import SpecOutline


def _check_port(job: Resolved) -> None:
    """Refuse a port that the spec sets and that is in use on this machine."""
    spec, port = job.spec, job.spec.cluster.master_port
    if job.backend.rendezvous != "none" and port != "auto":
        placement.check_port(spec.cluster.master_addr or next(iter(spec.cluster.ips), placement.LOOPBACK), port)


def _check_score(spec: Spec, evaluator: Evaluator) -> None:
    """Refuse an ``evaluate.score`` that the evaluation does not produce."""
    score = spec.evaluate.score
    if score is not None and score.partition("/")[0] not in evaluator.metrics:
        raise SpecError(
            f"evaluate.score: {score!r} given, expected a metric of this job's evaluation"
            f"{hint(score, evaluator.metrics)}"
        )


def _check_freeze(spec: Spec, outline: SpecOutline) -> list[str]:
    """Refuse patterns of ``train.freeze`` that freeze nothing, or everything; return a sentence about what is frozen."""
    if not spec.train.freeze or outline.state is None:  # Without an outline of the model, the ranks check it later.
        return []
    names = [name for name in outline.state if name.rpartition(".")[2] not in ("running_mean", "running_var", COUNTER)]
    check_frozen(names, spec.train.freeze)
    sizes = {name: prod(outline.state[name].shape) for name in names}
    frozen = {name: size for name, size in sizes.items() if is_frozen(name, spec.train.freeze)}
    if len(frozen) == len(names):
        raise SpecError(f"train.freeze: {spec.train.freeze} leaves no parameter to train; freeze fewer")
    share = sum(frozen.values()) / sum(sizes.values())
    return [f"train.freeze: {len(frozen)} of {len(names)} arrays, {share:.1%} of their numbers, are not trained"]


def check(job: Resolved, *, size: int, training: bool = True, resumed: Path | None = None) -> list[str]:
    """Open the data, read everything in it that may be unreadable, and check all settings for ``size`` ranks.

    ``resumed``: the checkpoint from which training goes on, or which is evaluated. Returns sentences for the user about
    oddities in the data and about differences from the run of the checkpoint.

    Raises:
        UsageError: something does not fit; the message says what to do. All unreadable images are named at once.
    """
    spec = job.spec
    if resumed is not None and not (resumed / MANIFEST).is_file():
        raise CheckpointError(f"{resumed}: no checkpoint on {os.uname().nodename}, where rank 0 is; copy it there")
    make_recipe(spec, size=size)
    # What is missing in the interpreter would make the messages below misleading, so it is told first.
    interpreter.check(job)
    plugin_packages.check(job)
    _check_port(job)
    if training:
        _check_copies(spec)
        metrics.check(spec)
    # Users' code may import a framework, which this process must not.
    if job.task.in_ranks:
        return _check_in_ranks(job, training=training, resumed=resumed)
    task = open_task(job, training=training)
    task.verify()  # All unreadable images are named at once; a rank would fail at the first one, maybe hours later.
    scored = spec.evaluate.enabled or not training
    if scored:
        _check_score(spec, task.evaluator())
    prepared = job.model.prepare_task(task.task(), {})
    if spec.backend.python in (None, sys.executable):
        job.model.check_libraries()
    if scored:
        make_augmented(job)
    classes = list(task.task().class_names)
    outline = SpecOutline(spec, classes=len(classes))
    notes = []
    if resumed is not None:
        job.model.check_resumed(prepared.details, (read_description(resumed).get("extra") or {}).get("details") or {})
        notes = check_resume(spec, resumed, outline, classes=classes, training=training)
    else:
        check_start(job, outline, classes=classes, training=training)
    if training:
        blocks_to_recompute(spec, job.model)
        check_teacher(job, classes)
        _check_room(spec, resumed, outline)
        notes += _check_freeze(spec, outline)
        order = Shuffled(task.length("train"), global_batch=spec.train.batch_size, seed=spec.train.seed)
        total_updates(spec, order.updates_per_epoch)
        task.sample_weights({})
        if resumed is not None:
            notes += _check_order(spec, task, resumed, order)
    unscored = "nothing is evaluated (evaluate.enabled is false): the last checkpoint counts as best"
    missing = plugin_packages.left_out(job) if training else []
    return [*notes, *task.report(), *([] if scored else [unscored]), *missing]


def _check_order(spec: Spec, task: TaskData, resumed: Path, order: Shuffled) -> list[str]:
    """Refuse to go on with other samples than those of the checkpoint's run; return a sentence on another order of them."""
    progress, body = progress_of(resumed), read_description(resumed)
    now = resumed_samples.facts(count=task.length("train"), digest=task.samples_digest())
    resumed_samples.check_same(now, body, spec=spec, progress=progress)
    check_continues(progress, updates_per_epoch=order.updates_per_epoch, global_batch=spec.train.batch_size)
    return resumed_samples.find_reordered(body.get("spec") or {}, spec, progress)


def _check_in_ranks(job: Resolved, *, training: bool, resumed: Path | None) -> list[str]:
    """Check what can be checked of a job whose model and data are the user's own code, which runs in ranks alone."""
    spec, notes = job.spec, []
    outline = SpecOutline(spec, classes=0)
    if resumed is not None:
        notes = check_resume(spec, resumed, outline, classes=(), training=training)
    else:
        check_start(job, outline, classes=(), training=training)
    if training:
        blocks_to_recompute(spec, job.model)
        if spec.train.distil is not None:
            raise SpecError(
                "train.distil: given, but the model is your own code, whose loss mtrain does not know; compute the teacher's "
                "part in your model's own loss, and set train.distil: null"
            )
        _check_room(spec, resumed, outline)
        notes = [*notes, *plugin_packages.left_out(job)]
    return notes


def check_script(job: Resolved, *, resumed: Path | None = None) -> list[str]:
    """Check what can be checked of a job whose model and data are known to the user's script alone.

    ``resumed``: the checkpoint from which training goes on. Returns sentences for the user.

    Raises:
        UsageError: something does not fit; the message says what to do.
    """
    if resumed is not None and not (resumed / MANIFEST).is_file():
        raise CheckpointError(f"{resumed}: no checkpoint on {os.uname().nodename}, where rank 0 is; copy it there")
    interpreter.check(job)
    plugin_packages.check(job, is_script=True)
    _check_port(job)
    metrics.check(job.spec)
    _check_copies(job.spec)
    return [*plugin_packages.left_out(job), *_find_build_locks(job)]


def _find_build_locks(job: Resolved) -> list[str]:
    """Return a sentence on locks for which a script would wait for ever; mtrain's own jobs build no extension."""
    stale = build_locks.find_stale(environment.caller()) if job.backend.framework == "torch" else []
    return [f"{build_locks.describe(stale)}; {build_locks.remedy(stale)}"] if stale else []


def _check_copies(spec: Spec) -> None:
    """Refuse an address for copies whose package is missing. Ranks of another interpreter look for it themselves."""
    if spec.checkpoint.copy_to is not None and spec.backend.python is None:
        StorageFolder(spec.checkpoint.copy_to).check_package()


def _check_room(spec: Spec, resumed: Path | None, outline: SpecOutline) -> None:
    """Refuse a job whose checkpoints do not fit on the disk.

    Raises:
        UsageError: they do not fit.
    """
    if resumed is not None:
        existing_bytes = reusable_bytes(resumed.parent)
        disk.check_room(resumed.parent, spec.checkpoint, each_bytes=size_of(resumed), existing_bytes=existing_bytes)
        return
    folder = Path(spec.report.dir)
    # The size of the model takes a second to compute, and is not asked for where any model fits.
    if disk.free_bytes(folder) >= disk.AMPLE_BYTES:
        return
    each_bytes = checkpoint_bytes(spec, outline)
    if each_bytes is not None:
        disk.check_room(folder, spec.checkpoint, each_bytes=each_bytes, existing_bytes=0)
