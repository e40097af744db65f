"""One job from a loaded spec to its result: training or evaluation, on this host or on several.

The command line and the Python functions of ``mtrain`` are two ways to call these functions. Progress goes to the
display that the spec asks for. A job on several hosts that people start by hand also prints the lines to type there.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mtrain.cluster import exported_model, many_hosts, micro_batch, start
from mtrain.cluster.supervisor import Result
from mtrain.core.checkpoint import store
from mtrain.errors import CheckpointError, UsageError
from mtrain.jobs import closing, preflight
from mtrain.system.runfolder import Resume

if TYPE_CHECKING:
    from mtrain.spec.config import Loaded


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """How a job ended."""

    code: int
    """Exit code: 0 done, 1 failed, 130 or 143 ended from outside with the state saved."""
    run_dir: Path | None = None
    """The run folder on this host; None where another host has it."""
    summary: Mapping[str, Any] = field(default_factory=dict)
    """Content of ``summary.json``; empty where there is none. A resumed run that fails keeps that of its former part."""
    lines: Sequence[str] = ()
    """The result in words, for a terminal."""


def train(loaded: "Loaded", *, resume: str | None = None, quiet: bool = False) -> Outcome:
    """Train a spec, or run a user's script, from the beginning or from a checkpoint.

    Args:
        loaded: the spec, with the script if there is one.
        resume: a checkpoint, a run folder, or ``start.AUTO`` for the newest run of this name; None starts a new run.
        quiet: show no progress.

    Raises:
        UsageError: the job cannot be started; nothing was changed.
        LaunchError: ranks or hosts did not come up.
    """
    if many_hosts.is_several(loaded):
        return _train_on_hosts(loaded, resume, quiet=quiet)
    where = start.locate(loaded, resume=resume)
    start.own_node(loaded)
    plan = start.planned(loaded, where)
    remarks: Sequence[str] = ()
    if loaded.script is None:
        remarks = preflight.check(loaded.spec, size=plan.size, resumed=where.checkpoint)
    else:
        preflight.check_script(loaded.spec, resumed=where.checkpoint)
    notes = [f"spec: {loaded.source}", *remarks]
    loaded = micro_batch.settled(loaded, plan, note=_shown_unless(quiet=quiet))
    where = start.created(loaded, where)
    notes.append(f"run folder: {where.run_dir}")
    if where.checkpoint is not None:
        notes.append(f"goes on from {where.checkpoint}")
    return _trained(loaded, start.run_job(loaded, where, notes=notes, quiet=quiet))


def _shown_unless(*, quiet: bool) -> Callable[[str], None]:
    """Return a function that shows a sentence before there is a display."""

    def show(text: str) -> None:
        if not quiet:
            print(text, file=sys.stderr, flush=True)

    return show


def evaluate(loaded: "Loaded", *, resume: str | None = None, quiet: bool = False) -> Outcome:
    """Score weights on the evaluation split, in a run folder of its own.

    Args:
        loaded: the spec.
        resume: a checkpoint or a run folder; None: ``model.weights``, else the best checkpoint of the newest run of the
            spec.
        quiet: show no progress.

    Raises:
        UsageError: there is nothing to evaluate, or the job cannot be started.
    """
    if exported_model.is_exported(loaded.spec.model.weights):
        if resume is not None:
            raise UsageError(f"{resume} and --weights {loaded.spec.model.weights} are both given; keep one")
        folder, summary = exported_model.evaluate(loaded, quiet=quiet)
        lines = closing.figure_lines(summary, summary.get("figures", {}))
        return Outcome(code=0, run_dir=folder, summary=summary, lines=lines)
    if many_hosts.joins(loaded):  # the first host has the checkpoint, and says so where it has none
        return _evaluate_on_hosts(loaded, start.run_name(loaded), None, quiet=quiet)
    requested = resume or (None if loaded.spec.model.weights else start.AUTO)
    checkpoint, name = None, start.run_name(loaded)
    if requested:
        source = _newest_run(loaded) if resume is None else start.find_resume(loaded, resume=requested)
        checkpoint = source.checkpoint if resume else store.best(source.run / "checkpoints") or source.checkpoint
        name = source.run.name
    if many_hosts.is_several(loaded):
        return _evaluate_on_hosts(loaded, name, checkpoint, quiet=quiet)
    where = start.Where(run_dir=Path(name), checkpoint=checkpoint)
    size = start.planned(loaded, where).size
    remarks = preflight.check(loaded.spec, size=size, training=False, resumed=checkpoint)
    where = start.created(loaded, where, name=f"{name}-evaluate")
    notes = [*remarks, f"evaluates {checkpoint or loaded.spec.model.weights}", f"run folder: {where.run_dir}"]
    return _evaluated(loaded, start.run_job(loaded, where, mode="evaluate", notes=notes, quiet=quiet))


def _train_on_hosts(loaded: "Loaded", resume: str | None, *, quiet: bool) -> Outcome:
    """Train on several hosts: lead the job, or serve the host that leads it."""
    brief = many_hosts.Brief(
        loaded=loaded,
        # The other hosts choose their preflight by it.
        mode="train" if loaded.script is None else "script",
        name=start.run_name_for(loaded, resume=resume),
        machine=start.here(loaded),
        resume=resume,
        by_hand=many_hosts.is_by_hand(loaded),
        quiet=quiet,
    )
    result = many_hosts.run(brief, notes=[f"spec: {loaded.source}", *loaded.notes])
    return _trained(loaded, result)


def _evaluate_on_hosts(loaded: "Loaded", name: str, checkpoint: Path | None, *, quiet: bool) -> Outcome:
    """Evaluate on several hosts; the first one has the checkpoint, and sends it to those that lack it."""
    brief = many_hosts.Brief(
        loaded=loaded,
        mode="evaluate",
        name=f"{name}-evaluate",
        machine=start.here(loaded),
        start_from=checkpoint,
        by_hand=many_hosts.is_by_hand(loaded),
        quiet=quiet,
        latest=False,
    )
    notes = [*loaded.notes, f"evaluates {checkpoint or loaded.spec.model.weights}"]
    result = many_hosts.run(brief, notes=notes)
    return _evaluated(loaded, result)


def _trained(loaded: "Loaded", result: Result) -> Outcome:
    here = _folder_here(loaded, result)
    lines = closing.closing_lines(result.summary, run_dir=here) if result.code == 0 else []
    if lines and here is None:
        lines.append(f"run folder: {result.first_host}:{result.run_dir}")
    return Outcome(code=result.code, run_dir=here, summary=result.summary, lines=lines)


def _evaluated(loaded: "Loaded", result: Result) -> Outcome:
    summary = result.summary if result.code == 0 else {}
    lines = closing.figure_lines(summary, summary.get("figures", {}))
    return Outcome(code=result.code, run_dir=_folder_here(loaded, result), summary=summary, lines=lines)


def _folder_here(loaded: "Loaded", result: Result) -> Path | None:
    """Return the run folder if this host has it."""
    is_here = not result.first_host or many_hosts.is_here(result.first_address)
    return result.run_dir if is_here else None


def _newest_run(loaded: "Loaded") -> Resume:
    """Return the newest run of the spec.

    Raises:
        CheckpointError: there is none.
    """
    try:
        return start.find_resume(loaded, resume=start.AUTO)
    except CheckpointError as error:
        base, name = loaded.spec.report.dir, start.run_name(loaded)
        raise CheckpointError(
            f"nothing to evaluate: no run {name} with an intact checkpoint in {base}; train first, or name a run with "
            "`mtrain evaluate --run FOLDER`, or weights with -o model.weights=FILE"
        ) from error
