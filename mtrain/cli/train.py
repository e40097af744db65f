"""``mtrain train``: check, plan, start, watch."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mtrain.cli import closing
from mtrain.cli.options import JobCommand, job_options, load_job

if TYPE_CHECKING:
    from mtrain.cli.starting import Where
    from mtrain.core.config import Loaded
    from mtrain.core.runfolder import Resume


@click.command("train", cls=JobCommand)
@job_options
@click.pass_context
def train(context: click.Context, /, **params: Any) -> None:
    """Train what a spec describes, from the beginning or from a checkpoint."""
    from mtrain.cli import several, starting

    resume = starting.latest_run(params.get("config"), params.get("resume"))
    params["config"] = starting.resumed_config(params.get("config"), resume)
    loaded = load_job(params)
    if not params.get("dry_run"):
        starting.refuse_copies(loaded, nnodes=params.get("nnodes"))
    if several.is_several(loaded) and not params.get("dry_run"):
        context.exit(train_on_hosts(loaded, resume))
    where = starting.locate(loaded, resume=resume)
    if params.get("dry_run"):
        click.echo(starting.planned(loaded, where).text(), nl=False)
        return
    context.exit(train_now(loaded, where))


def train_now(loaded: "Loaded", where: "Where") -> int:
    """Check the data, then train. Returns the exit code."""
    from mtrain import preflight
    from mtrain.cli import starting

    starting.own_node(loaded)
    size = starting.planned(loaded, where).size
    notes = [f"spec: {loaded.source}", *preflight.check(loaded.spec, size=size, resumed=where.checkpoint)]
    where = starting.created(loaded, where)
    notes.append(f"run folder: {where.run_dir}")
    if where.checkpoint is not None:
        notes.append(f"goes on from {where.checkpoint}")
    code = starting.run_job(loaded, where, notes=notes)
    for line in closing.closing_lines(where.run_dir, done=code == 0):
        click.echo(line)
    return code


def train_on_hosts(loaded: "Loaded", resume: str | None) -> int:
    """Lead the job, or serve the host that does. Returns the exit code."""
    from mtrain.cli import several, starting

    brief = several.Brief(
        loaded=loaded,
        mode="train",
        name=starting.run_name(loaded),
        machine=starting.here(loaded),
        resume=resume,
        by_hand=several.carried(loaded) is None,
    )
    result = several.run(brief, notes=[f"spec: {loaded.source}", *loaded.notes])
    if isinstance(result, int):
        return result
    if result.run_dir is not None:
        for line in several.closing_lines(loaded, result):
            click.echo(line)
    return result.code


def evaluate_only(loaded: "Loaded", resume: str | None) -> int:
    """Score a checkpoint, without ``--resume`` the best of the newest run, in a run folder of its own."""
    from mtrain import preflight
    from mtrain.cli import several, starting
    from mtrain.core import checkpoint as store

    if several.joins(loaded):  # the first host has the checkpoint, and says so where it has none
        return evaluate_on_hosts(loaded, starting.run_name(loaded), None)
    wanted = resume or (None if loaded.spec.model.weights else starting.AUTO)
    checkpoint, name = None, starting.run_name(loaded)
    if wanted:
        found = _to_evaluate(loaded, wanted) if resume is None else starting.find_resume(loaded, resume=wanted)
        checkpoint = found.checkpoint if resume else store.best(found.run / "checkpoints") or found.checkpoint
        name = found.run.name
    where = starting.Where(run_dir=Path(name), checkpoint=checkpoint)
    if several.is_several(loaded):
        return evaluate_on_hosts(loaded, name, checkpoint)
    size = starting.planned(loaded, where).size
    checked = preflight.check(loaded.spec, size=size, training=False, resumed=checkpoint)
    where = starting.created(loaded, where, name=f"{name}-evaluate")
    notes = [*checked, f"evaluates {checkpoint or loaded.spec.model.weights}", f"run folder: {where.run_dir}"]
    code = starting.run_job(loaded, where, mode="evaluate", notes=notes)
    summary = starting.read_summary(where.run_dir) if code == 0 else {}
    for line in closing.figure_lines(summary, summary.get("figures", {})):
        click.echo(line)
    return code


def _to_evaluate(loaded: "Loaded", wanted: str) -> "Resume":
    """The newest run of the spec.

    Raises:
        CheckpointError: there is none.
    """
    from mtrain.cli import starting
    from mtrain.core.errors import CheckpointError

    try:
        return starting.find_resume(loaded, resume=wanted)
    except CheckpointError as error:
        base, name = loaded.spec.report.dir, starting.run_name(loaded)
        raise CheckpointError(
            f"nothing to evaluate: no run {name} with an intact checkpoint in {base}; train first, or name a run with "
            "`mtrain evaluate --run FOLDER`, or weights with -o model.weights=FILE"
        ) from error


def evaluate_on_hosts(loaded: "Loaded", name: str, checkpoint: Path | None) -> int:
    """``evaluate_only`` on several hosts; the first one has the checkpoint, and gives it to those that have not."""
    from mtrain.cli import several, starting

    brief = several.Brief(
        loaded=loaded,
        mode="evaluate",
        name=f"{name}-evaluate",
        machine=starting.here(loaded),
        start_from=checkpoint,
        by_hand=several.carried(loaded) is None,
        latest=False,
    )
    result = several.run(brief, notes=[f"evaluates {checkpoint or loaded.spec.model.weights}"])
    if isinstance(result, int):
        return result
    summary = dict(result.summary or {}) if result.code == 0 else {}
    for line in closing.figure_lines(summary, summary.get("figures", {})):
        click.echo(line)
    return result.code
