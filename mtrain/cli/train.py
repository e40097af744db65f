"""``mtrain train``: check, plan, start, watch."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mtrain.cli.options import JobCommand, job_options, load_job
from mtrain.jobs import closing

if TYPE_CHECKING:
    from mtrain.cluster.start import Where
    from mtrain.spec.config import Loaded
    from mtrain.system.runfolder import Resume


@click.command("train", cls=JobCommand)
@job_options
@click.pass_context
def train(context: click.Context, /, **params: Any) -> None:
    """Train what a spec describes, from the beginning or from a checkpoint."""
    from mtrain.cluster import many_hosts, start

    resume = start.latest_run(params.get("config"), params.get("resume"))
    params["config"] = start.resumed_config(params.get("config"), resume)
    loaded = load_job(params)
    if not params.get("dry_run"):
        start.refuse_copies(loaded, nnodes=params.get("nnodes"))
    if many_hosts.is_several(loaded) and not params.get("dry_run"):
        context.exit(train_on_hosts(loaded, resume))
    where = start.locate(loaded, resume=resume)
    if params.get("dry_run"):
        click.echo(start.planned(loaded, where).text(), nl=False)
        return
    context.exit(train_now(loaded, where))


def train_now(loaded: "Loaded", where: "Where") -> int:
    """Check the data, then train. Returns the exit code."""
    from mtrain.cluster import start
    from mtrain.jobs import preflight

    start.own_node(loaded)
    size = start.planned(loaded, where).size
    notes = [f"spec: {loaded.source}", *preflight.check(loaded.spec, size=size, resumed=where.checkpoint)]
    where = start.created(loaded, where)
    notes.append(f"run folder: {where.run_dir}")
    if where.checkpoint is not None:
        notes.append(f"goes on from {where.checkpoint}")
    code = start.run_job(loaded, where, notes=notes)
    for line in closing.closing_lines(where.run_dir, done=code == 0):
        click.echo(line)
    return code


def train_on_hosts(loaded: "Loaded", resume: str | None) -> int:
    """Lead the job, or serve the host that does. Returns the exit code."""
    from mtrain.cluster import many_hosts, start

    brief = many_hosts.Brief(
        loaded=loaded,
        mode="train",
        name=start.run_name(loaded),
        machine=start.here(loaded),
        resume=resume,
        by_hand=many_hosts.carried(loaded) is None,
    )
    result = many_hosts.run(brief, notes=[f"spec: {loaded.source}", *loaded.notes])
    if isinstance(result, int):
        return result
    if result.run_dir is not None:
        for line in many_hosts.closing_lines(loaded, result):
            click.echo(line)
    return result.code


def evaluate_only(loaded: "Loaded", resume: str | None) -> int:
    """Score a checkpoint, without ``--resume`` the best of the newest run, in a run folder of its own."""
    from mtrain.cluster import many_hosts, start
    from mtrain.core.checkpoint import store
    from mtrain.jobs import preflight
    from mtrain.system.runfolder import read_summary

    if many_hosts.joins(loaded):  # the first host has the checkpoint, and says so where it has none
        return evaluate_on_hosts(loaded, start.run_name(loaded), None)
    wanted = resume or (None if loaded.spec.model.weights else start.AUTO)
    checkpoint, name = None, start.run_name(loaded)
    if wanted:
        found = _to_evaluate(loaded, wanted) if resume is None else start.find_resume(loaded, resume=wanted)
        checkpoint = found.checkpoint if resume else store.best(found.run / "checkpoints") or found.checkpoint
        name = found.run.name
    where = start.Where(run_dir=Path(name), checkpoint=checkpoint)
    if many_hosts.is_several(loaded):
        return evaluate_on_hosts(loaded, name, checkpoint)
    size = start.planned(loaded, where).size
    checked = preflight.check(loaded.spec, size=size, training=False, resumed=checkpoint)
    where = start.created(loaded, where, name=f"{name}-evaluate")
    notes = [*checked, f"evaluates {checkpoint or loaded.spec.model.weights}", f"run folder: {where.run_dir}"]
    code = start.run_job(loaded, where, mode="evaluate", notes=notes)
    summary = read_summary(where.run_dir) if code == 0 else {}
    for line in closing.figure_lines(summary, summary.get("figures", {})):
        click.echo(line)
    return code


def _to_evaluate(loaded: "Loaded", wanted: str) -> "Resume":
    """The newest run of the spec.

    Raises:
        CheckpointError: there is none.
    """
    from mtrain.cluster import start
    from mtrain.errors import CheckpointError

    try:
        return start.find_resume(loaded, resume=wanted)
    except CheckpointError as error:
        base, name = loaded.spec.report.dir, start.run_name(loaded)
        raise CheckpointError(
            f"nothing to evaluate: no run {name} with an intact checkpoint in {base}; train first, or name a run with "
            "`mtrain evaluate --run FOLDER`, or weights with -o model.weights=FILE"
        ) from error


def evaluate_on_hosts(loaded: "Loaded", name: str, checkpoint: Path | None) -> int:
    """``evaluate_only`` on several hosts; the first one has the checkpoint, and gives it to those that have not."""
    from mtrain.cluster import many_hosts, start

    brief = many_hosts.Brief(
        loaded=loaded,
        mode="evaluate",
        name=f"{name}-evaluate",
        machine=start.here(loaded),
        start_from=checkpoint,
        by_hand=many_hosts.carried(loaded) is None,
        latest=False,
    )
    result = many_hosts.run(brief, notes=[f"evaluates {checkpoint or loaded.spec.model.weights}"])
    if isinstance(result, int):
        return result
    summary = dict(result.summary or {}) if result.code == 0 else {}
    for line in closing.figure_lines(summary, summary.get("figures", {})):
        click.echo(line)
    return result.code
