"""One job from a loaded spec to its result: training or evaluation, on this host or on several.

The command line and the Python functions of ``mtrain`` are two ways to call these functions. Progress goes to the
display that the spec asks for. A job on several hosts that people start by hand also prints the lines to type there.
"""

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from mtrain.core.checkpoint import store
from mtrain.errors import CheckpointError
from mtrain.jobs import place
from mtrain.jobs.brief import PREFLIGHT_ONLY, TRIAL, Brief
from mtrain.jobs.hosts.only_host import OnlyHost
from mtrain.jobs.plan import means, micro_batch
from mtrain.jobs.plan.plan import Plan
from mtrain.jobs.preflight.findings import Finding
from mtrain.jobs.resume import find
from mtrain.jobs.resume.find import Where
from mtrain.jobs.run import closing
from mtrain.jobs.run.supervisor import Result
from mtrain.spec import terminal
from mtrain.system import placement

if TYPE_CHECKING:
    from mtrain.jobs.hosts.leader import Leader
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
        resume: a checkpoint, a run folder, or ``find.AUTO`` for the newest run of this name; None starts a new run.
        quiet: show no progress.

    Raises:
        UsageError: the job cannot be started; nothing was changed.
        LaunchError: ranks or hosts did not come up.
    """
    knows_mtrain = loaded.script is None or loaded.script.knows_mtrain
    brief = Brief(
        loaded=loaded,
        mode="train" if loaded.script is None else "script",
        name=place.run_name_for(loaded, resume=resume),
        resume=resume,
        quiet=quiet,
        notes=(f"spec: {loaded.source}",) if knows_mtrain else (),
    )
    result = run(brief)
    here = _folder_here(result)
    lines = (
        closing.closing_lines(result.summary, run_dir=here)
        if result.code == 0 and (knows_mtrain or result.summary)
        else []
    )
    if lines and here is None:
        lines.append(f"run folder: {result.first_host}:{result.run_dir}")
    return Outcome(code=result.code, run_dir=here, summary=result.summary, lines=lines)


def evaluate(loaded: "Loaded", *, resume: str | None = None, quiet: bool = False) -> Outcome:
    """Score weights on the evaluation split, in a run folder of its own.

    Of several hosts, the first one has the checkpoint, and sends it to those that lack it.

    Args:
        loaded: the spec.
        resume: a checkpoint or a run folder; None: ``model.weights``, else the best checkpoint of the newest run of the
            spec.
        quiet: show no progress.

    Raises:
        UsageError: there is nothing to evaluate, or the job cannot be started.
    """
    checkpoint, name = None, place.run_name(loaded)
    # Where another host leads, that one has the checkpoint, and says so where it has none.
    if (resume or not loaded.spec.model.weights) and not means.joins(loaded):
        source = _newest_run(loaded) if resume is None else place.resolve_resume(loaded, resume=resume)
        checkpoint = source.checkpoint if resume else store.best(source.run / "checkpoints") or source.checkpoint
        name = source.run.name
    brief = Brief(
        loaded=loaded,
        mode="evaluate",
        name=place.evaluation_name(loaded, name),
        start_from=checkpoint,
        latest=False,
        quiet=quiet,
        notes=(f"evaluates {checkpoint or loaded.spec.model.weights}",),
    )
    result = run(brief)
    summary = result.summary if result.code == 0 else {}
    lines = closing.metric_lines(summary, summary.get("metrics", {}))
    return Outcome(code=result.code, run_dir=_folder_here(result), summary=summary, lines=lines)


def run(
    brief: Brief, *, tell: Callable[[Sequence[Finding]], None] | None = None, stream: IO[str] | None = None
) -> Result:
    """Run a job to its end: on this host alone, as the leader of several hosts, or in the service of their leader.

    Args:
        brief: the job.
        tell: see ``Leader``.
        stream: receives all messages; None: the terminal.

    Raises:
        UsageError: the job cannot be started; nothing was changed.
        LaunchError: ranks or hosts did not come up.
    """
    hosts: OnlyHost | Leader | Result = OnlyHost(brief=brief, stream=stream)
    if means.is_several(brief.spec):
        from mtrain.jobs.hosts import many_hosts

        hosts = many_hosts.connect(brief, tell=tell, stream=stream)
    result = hosts if isinstance(hosts, Result) else hosts.lead(carry_out)
    if result.code == 0 and brief.mode == TRIAL and result.run_dir is not None:
        shutil.rmtree(result.run_dir, ignore_errors=True)
    return result


def carry_out(hosts: "OnlyHost | Leader") -> Result:
    """Take a job from its request to its verdict. One host is a gathering of one, so these steps are those of every job.

    Raises:
        UsageError: the job cannot be started; nothing was changed.
        LaunchError: ranks or hosts did not come up.
    """
    where = hosts.gather()
    plan = hosts.plan(where)
    hosts.check(plan)
    if hosts.brief.mode == PREFLIGHT_ONLY:
        return Result(code=0, text="")
    # On one host trials take minutes here, so what refuses the job comes before them. Several hosts have run theirs before they met.
    is_settled = _settle_micro_batch(hosts, plan)
    created = hosts.create(where)
    # The plan holds both, and ranks read the micro batch from the spec that is written with it.
    if is_settled or created.run != plan.run_dir:
        plan = hosts.plan(created)
    return hosts.run(plan, created)


def _settle_micro_batch(hosts: "OnlyHost | Leader", plan: Plan) -> bool:
    """Put the micro batch that fits on every host into the spec, where that leaves it to trials; return whether it does."""
    brief = hosts.brief
    if brief.mode not in ("train", "script") or not micro_batch.is_open(brief.loaded):
        return False

    def show(text: str) -> None:  # On one host, there is no display yet.
        if not brief.quiet:
            terminal.say(text, err=True)

    hosts.brief = replace(brief, loaded=hosts.settle(plan, show))
    return True


def _folder_here(result: Result) -> Path | None:
    """Return the run folder if this host has it."""
    return result.run_dir if not result.first_host or placement.is_here(result.first_address) else None


def _newest_run(loaded: "Loaded") -> Where:
    """Return the newest run of the spec.

    Raises:
        CheckpointError: there is none.
    """
    try:
        return place.resolve_resume(loaded, resume=find.AUTO)
    except CheckpointError as error:
        base, name = loaded.spec.report.dir, place.run_name(loaded)
        raise CheckpointError(
            f"nothing to evaluate: no run {name} with an intact checkpoint in {base}; train first, or name a run with "
            "`mtrain evaluate FOLDER`, or weights with -o model.weights=FILE"
        ) from error
