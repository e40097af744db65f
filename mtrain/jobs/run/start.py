"""Start a job from a loaded spec: the functions that ``train``, ``evaluate`` and ``predict`` share."""

import dataclasses
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from mtrain.errors import UsageError
from mtrain.jobs.brief import TRIAL, Brief
from mtrain.jobs.plan.host_ranks import TYPED
from mtrain.jobs.plan.machine import Machine
from mtrain.jobs.plan.plan import Plan, make_plan
from mtrain.jobs.resume import find
from mtrain.jobs.resume.find import IF_ANY, Resume
from mtrain.rank.script.settings import described_script
from mtrain.spec import outputs, terminal
from mtrain.spec.addresses import is_address
from mtrain.spec.identifiers import checked_run_name
from mtrain.spec.yaml_reader import dump
from mtrain.system import described, environment, job_secret, names, placement, runfolder
from mtrain.system.runfolder import RunFolder

if TYPE_CHECKING:
    from mtrain.jobs.run.supervisor import Result
    from mtrain.spec.config import Loaded


@dataclass(frozen=True, kw_only=True, slots=True)
class Where:
    """The folder of a run, and the checkpoint it starts from."""

    run_dir: Path
    checkpoint: Path | None
    fixed: bool = False
    """The run has exactly this folder, whether it exists or not."""
    held: bool = False
    """This process has locked the folder."""


def run_name(loaded: "Loaded") -> str:
    """Return the name of a new run: ``report.name``, else the name of the spec's file.

    Raises:
        UsageError: no folder can have the file's name.
    """
    return checked_run_name(loaded.spec.report.name or loaded.name)


def evaluation_name(loaded: "Loaded", name: str) -> str:
    """Return the name of an evaluation's folder: the one that was typed, else one made of the name of the run."""
    if loaded.spec.report.name and loaded.origin("report.name").kind in TYPED:
        return loaded.spec.report.name
    return f"{name}-evaluate"


def run_name_for(loaded: "Loaded", *, resume: str | None) -> str:
    """Return the name of the run that a job starts or, with ``--resume if-any``, continues.

    In a scheduler's job, a run without ``report.name`` is then named after that job too, so that two jobs of one spec,
    or of one array, do not continue each other's run.
    """
    from mtrain.jobs.hosts import allocation

    environ, registry = environment.caller(), loaded.registry
    job = allocation.job_id(environ, registry=registry) if resume == IF_ANY and not loaded.spec.report.name else None
    return run_name(loaded) if job is None else f"{run_name(loaded)}-{job}"


def locate(loaded: "Loaded", *, resume: str | None) -> Where:
    """Return where a job would run: the folder of the resumed run, else the next free name.

    It creates nothing, unless ``resume`` leads to copies at an address: these are fetched into the run folder.

    Raises:
        CheckpointError: there is nothing intact to resume from.
    """
    base, name = Path(loaded.spec.report.dir), run_name(loaded)
    if resume is None:
        return Where(run_dir=runfolder.next_name(base, name), checkpoint=None)
    resumption = resolve_resume(loaded, resume=resume)
    return Where(run_dir=resumption.run, checkpoint=resumption.checkpoint, fixed=resume == IF_ANY)


@contextmanager
def hold_place(brief: Brief) -> Iterator[Where]:
    """Return where a job on this host will run; the folder of a resumed run is locked before its checkpoint is chosen.

    Raises:
        UsageError: another job runs in the folder.
        CheckpointError: there is nothing intact to resume from.
    """
    loaded, resume = brief.loaded, brief.resume
    if resume is None:
        run_dir = runfolder.next_name(Path(brief.spec.report.dir), brief.name)
        yield Where(run_dir=run_dir, checkpoint=brief.start_from)
        return
    locks: list[Path] = []
    with ExitStack() as stack:

        def hold(run: Path) -> None:
            stack.enter_context(runfolder.take_folder(RunFolder(run)))
            locks.append(run)

        found = find.choose_under_lock(lambda: resolve_resume(loaded, resume=resume), hold)
        yield Where(run_dir=found.run, checkpoint=found.checkpoint, fixed=resume == IF_ANY, held=found.run in locks)


def resolve_resume(loaded: "Loaded", *, resume: str) -> Resume:
    """Return the run and checkpoint that ``--resume`` names, see ``fetch.fetch_resume``; what only a copy has is fetched.

    ``auto``: the newest run of this name. ``if-any``: the run of exactly this name, which need not exist.
    """
    from mtrain.jobs.resume import fetch

    base, name = Path(loaded.spec.report.dir), run_name_for(loaded, resume=resume)
    given, copy_to = None if resume == find.AUTO else resume, loaded.spec.checkpoint.copy_to
    return fetch.fetch_resume(given, base=base, name=name, copy_to=copy_to)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainedWeights:
    """How trained weights are named: a run, a checkpoint, or a file of weights."""

    run: str | None = None
    checkpoint: str | None = None
    weights: str | None = None

    def fetched(self) -> "TrainedWeights":
        """Return the same as paths on this host: of an address, the best copy is restored into ``runs``.

        Raises:
            CheckpointError: there is no intact copy at an address, or it cannot be reached.
        """
        from mtrain.jobs.resume import fetch

        def local(address: str) -> Resume:
            return fetch.restore_run(address, Path("runs"), best=True)

        named = self
        if named.weights is not None and is_address(named.weights):
            named = TrainedWeights(run=named.run, checkpoint=named.weights)
        if named.run is not None and is_address(named.run):
            named = dataclasses.replace(named, run=str(local(named.run).run))
        if named.checkpoint is not None and is_address(named.checkpoint):
            named = dataclasses.replace(named, checkpoint=str(local(named.checkpoint).checkpoint))
        return named


def framework_of(loaded: "Loaded") -> str:
    """Return the framework of the spec's backend, which is installed where its run was made."""
    return loaded.job.backend.framework


def one_process(framework: str, *, device: str) -> dict[str, Any]:
    """Return the values of a spec, by dotted path, with which one process on this host uses trained weights."""
    return {
        "backend.name": "solo",
        "backend.options": {"device": device, "framework": framework},
        "cluster.ips": [],
        "cluster.slots": None,
        "cluster.devices": None,
        "cluster.name": "auto",
        "cluster.nproc_per_node": 1,
        "cluster.log_dir": None,
        "cluster.max_restarts": 0,
        "launcher.name": "auto",
        "parallel.replicate": 1,
        "parallel.shard": None,
        "parallel.tensor": 1,
        "parallel.pipeline": 1,
        "parallel.sequence": False,
        "parallel.plan": {},
        "model.weights": None,
        "train.distil": None,
    }


def here(loaded: "Loaded") -> Machine:
    """Return a description of this machine, as the ranks of a job will see it."""
    environ = environment.clean(environment.caller())
    return Machine.here(environ=environ, python=loaded.spec.backend.python or sys.executable, line=typed_line())


def typed_line() -> list[str]:
    """Return the running command as it would be typed on another host.

    For ``plan`` and ``--dry-run``, the planned command.
    """
    program = Path(sys.argv[0])
    start = [sys.executable, "-m", "mtrain"] if program.name == "__main__.py" else [program.name]
    words = sys.argv[1:]
    if words[:1] == ["plan"]:
        words = ["train", *(word for word in words[1:] if word != "--json")]
    return [*start, *(word for word in words if word.replace("_", "-") != "--dry-run")]


def plan_job(loaded: "Loaded", where: Where, *, mode: str = "train", machine: Machine | None = None) -> Plan:
    """Return the plan of a job; ``machine``: None, this one."""
    machine = machine or here(loaded)
    return make_plan(loaded, run_dir=where.run_dir, resume=where.checkpoint, machine=machine, mode=mode)


def own_node(loaded: "Loaded", *, note: Callable[[str], None] | None = None) -> int:
    """Return this machine's index among the hosts, waiting for names that are not known yet.

    ``note`` receives a sentence on such names; None: it is printed to standard error.

    Raises:
        UsageError: it is none of them, or a name does not become known in the time that hosts have to join, or
            ``--node-rank`` is given without hosts.
    """
    cluster = loaded.spec.cluster
    if not cluster.ips:
        if cluster.node_rank:
            raise UsageError(
                f"--node-rank {cluster.node_rank}: no host is named; give all of them with --ips A,B or --hostfile"
            )
        return 0
    own = placement.own_addresses()
    if cluster.node_rank is not None:
        return placement.find_node_rank(cluster.ips, own, node_rank=cluster.node_rank)
    return names.find_node_rank(
        cluster.ips,
        own,
        timeout_s=cluster.joining_s,
        note=note or (lambda text: terminal.say(text, err=True)),
    )


def write_folder(loaded: "Loaded", plan: Plan) -> dict[str, str]:
    """Write the request files into the run folder: spec, plan, environment.

    Returns the files that ranks spec_file: name -> text.

    A resumed job writes pending files beside the existing ones (``spec.next.yml`` ...). Rank 0 replaces the existing
    ones once the checkpoint is restored, so a job that is refused changes nothing.

    Raises:
        UsageError: the folder cannot be written to.
    """
    run = RunFolder(plan.run_dir, plan.log_dir)
    place = runfolder.pending if resumes(plan) else _directly
    try:
        runfolder.keep_private()
        run.make()
        for path, text in _request_texts(loaded, plan, run).items():
            if place is _directly:
                runfolder.pending(path).unlink(missing_ok=True)
            outputs.write_text(place(path), text)
    except OSError as error:
        raise UsageError(f"{plan.run_dir}: cannot be written to: {error.strerror or error}") from error
    spec_file = place(run.spec_json)
    return {spec_file.name: spec_file.read_text(encoding="utf-8")}


def write_spec(loaded: "Loaded", folder: Path) -> None:
    """Write the spec and the environment into the folder of a run without ranks.

    Raises:
        UsageError: the folder cannot be written to.
    """
    try:
        for path, text in _spec_texts(loaded, RunFolder(folder)).items():
            outputs.write_text(path, text)
    except OSError as error:
        raise UsageError(f"{folder}: cannot be written to: {error.strerror or error}") from error


def resumes(plan: Plan) -> bool:
    """Return whether the job continues in the folder of the run that wrote its checkpoint."""
    run = RunFolder(plan.run_dir)
    return plan.resume is not None and run.checkpoints in plan.resume.parents and run.spec_yml.exists()


def _directly(path: Path) -> Path:
    return path


def _request_texts(loaded: "Loaded", plan: Plan, run: RunFolder) -> dict[Path, str]:
    """Return the text of each of ``runfolder.REQUEST_FILES``: path -> text."""
    from mtrain.core.record_files import json_text
    from mtrain.jobs.resume import choices

    return {
        **_spec_texts(loaded, run),
        run.path / runfolder.CHOSEN: json_text(choices.describe(loaded, framework=framework_of(loaded))),
        run.path / "plan.txt": plan.text(),
        run.path / "plan.json": json_text(plan.as_json()),
    }


def _spec_texts(loaded: "Loaded", run: RunFolder) -> dict[Path, str]:
    """Return the text of the files that hold the spec and the environment of the command: path -> text."""
    from mtrain.core.record_files import json_text
    from mtrain.spec import config

    environ = environment.redact(environment.clean(environment.caller()))
    argv = environment.redacted_words(sys.argv)
    values = loaded.values if loaded.script is None else described_script(loaded.values)
    return {
        run.spec_json: config.resolved_json(loaded.spec) if loaded.script is None else json_text(values),
        run.spec_yml: dump(values),
        run.path / "environment.json": json_text(described.describe_environment(environ, argv=argv)),
    }


def run_job(
    loaded: "Loaded",
    where: Where,
    *,
    mode: str = "train",
    quiet: bool = False,
    stream: IO[str] | None = None,
) -> "Result":
    """Run a job on this host alone in a folder that exists, without the checks of one that a user has asked for.

    ``stream`` receives all messages; None: the terminal.

    Raises:
        LaunchError: the job could not be started.
        UsageError: a package of a plugin is missing.
    """
    brief = Brief(loaded=loaded, mode=mode, name=where.run_dir.name, machine=here(loaded), quiet=quiet)
    return run_plan(brief, plan_job(loaded, where, mode=mode, machine=brief.machine), where, stream=stream)


def run_plan(brief: Brief, plan: Plan, where: Where, *, stream: IO[str] | None = None) -> "Result":
    """Write the run folder, run a plan on this host alone, and show its progress; see ``run_job``."""
    from mtrain.jobs.hosts import this_host
    from mtrain.records.console import make_display
    from mtrain.system import plugin_packages

    if brief.mode != TRIAL:
        plugin_packages.check(brief.job, is_script=brief.loaded.script is not None)
    write_folder(brief.loaded, plan)
    display = make_display(brief.display, title=plan.title, stream=stream)
    for note in (*brief.loaded.notes, *brief.notes):
        display.note(note)
    job = this_host.Job(
        display=display,
        environ=environment.clean(environment.caller()) | job_secret.draw_secret(),
        replan=_replanner(brief.loaded, where, brief.mode),
        limits=dataclasses.replace(this_host.LIMITS, grace_s=brief.spec.cluster.grace_s),
        stream=stream or sys.stderr,
        holds_folder=where.held,
    )
    return this_host.run(plan, job)


def _replanner(loaded: "Loaded", where: Where, mode: str) -> Callable[[Path | None], Plan]:
    """Return a function that plans the next attempt, from a checkpoint."""

    def replan(checkpoint: Path | None) -> Plan:
        return plan_job(loaded, dataclasses.replace(where, checkpoint=checkpoint or where.checkpoint), mode=mode)

    return replan


def create_place(brief: Brief, where: Where) -> Where:
    """Return ``where`` with an existing run folder: the resumed one, or a new one with the next free name."""
    if where.fixed:
        runfolder.make(where.run_dir)
        return where
    if brief.resume is not None:
        runfolder.point_latest(where.run_dir)
        return where
    run_dir = runfolder.create(Path(brief.spec.report.dir), brief.name, latest=brief.latest)
    return dataclasses.replace(where, run_dir=run_dir)
