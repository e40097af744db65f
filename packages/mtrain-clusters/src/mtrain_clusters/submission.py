"""Give a job to the queue of a scheduler, and find it again later.

Everything that was handed over is kept in ``<report.dir>/.submitted/NAME``: the spec as it was then, the request, and the
job's id. The spec is kept because a job may wait for hours, in which its file may be edited.
"""

import contextlib
import dataclasses
import json
import logging
import os
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mtrain.core.checkpoint import store
from mtrain.core.interfaces import Cluster
from mtrain.core.interfaces.queue import Queue, QueuedJob, Submission
from mtrain.errors import MtrainError, UsageError
from mtrain.jobs.resume.find import find_resume
from mtrain.jobs.resume.load import typed_anew
from mtrain.spec import outputs, references
from mtrain.spec.addresses import is_address
from mtrain.spec.files import parse_json, read_text
from mtrain.spec.plugin_kinds import SELECTORS, SINGULAR
from mtrain.spec.registry import Registry
from mtrain.spec.resolved import AUTO
from mtrain.spec.yaml_reader import dump
from mtrain.system import runfolder

if TYPE_CHECKING:
    from mtrain.jobs.plan.plan import Plan
    from mtrain.spec.config import Loaded

log = logging.getLogger(__name__)
FOLDER = ".submitted"
"""Folder of the records, in the folder of the runs."""
MAX_RECORD_BYTES = 8 << 20
RECORD = "job.json"
SPEC = "spec.yml"


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """A job that can be submitted, and what would be handed over."""

    queue: Queue
    submission: Submission
    request: str
    """Text of the file for the scheduler."""
    standalone: str
    """The same text for somebody who keeps it, see ``Queue.standalone_request``."""
    cluster: str
    """Name of the cluster plugin."""
    options: Mapping[str, Any]
    """The options of the cluster plugin."""


def queue_of(loaded: "Loaded") -> Queue:
    """Return the queue of the scheduler that the spec chooses.

    Raises:
        UsageError: the spec chooses none, or its cluster has no queue.
    """
    name = loaded.spec.cluster.name
    if name == AUTO:
        raise UsageError(f"no scheduler is named; choose one with --cluster: {', '.join(with_queue(loaded))}")
    cluster = loaded.job.cluster
    assert cluster is not None
    queue = cluster.queue()
    if queue is None:
        instead = (
            f"submit it with `{cluster.submits}`" if cluster.submits else "start the job with `mtrain train` instead"
        )
        raise UsageError(
            f"cluster.name: {name!r} given, which has no queue; `mtrain submit` needs one of "
            f"{', '.join(with_queue(loaded))}; {instead}"
        )
    return queue


def with_queue(loaded: "Loaded") -> list[str]:
    """Return the names of the installed clusters that have a queue."""
    names = []
    for entry in loaded.registry.names("clusters"):
        with contextlib.suppress(MtrainError):
            if loaded.registry.load("clusters", entry.name).queue is not Cluster.queue:
                names.append(entry.name)
    return names


def prepare(loaded: "Loaded") -> Prepared:
    """Check a job, and make the request for it. Writes nothing.

    The scheduler is asked only whether an earlier job with the given name has ended.

    Raises:
        UsageError: the job cannot be planned, or cannot be submitted in this way.
    """
    queue = queue_of(loaded)
    if loaded.spec.cluster.ips:
        raise UsageError(
            f"--ips {','.join(loaded.spec.cluster.ips)}: the scheduler chooses the hosts of a job that is submitted; "
            "give their number with --nnodes"
        )
    plan = _plan(loaded)
    submission = _submission(loaded, _name(loaded), plan)
    cluster = loaded.spec.cluster
    return Prepared(
        queue=queue,
        submission=submission,
        request=queue.request(submission),
        standalone=queue.standalone_request(submission),
        cluster=cluster.name,
        options=cluster.options,
    )


def resumed_run(resume: str) -> Path:
    """Return the folder of the run that a job in a queue is to continue from its newest intact checkpoint.

    Raises:
        UsageError: it is no folder here, or a job is running in it.
        CheckpointError: it has no intact checkpoint.
    """
    path = Path(resume)
    if is_address(resume):
        raise UsageError(
            f"--resume {resume}: is no folder here; restore the run first with `mtrain train --resume {resume}`, or submit "
            "the job with --name and checkpoint.copy_to, which restores it on the hosts"
        )
    found = find_resume(resume, base=path.parent, name=path.name)
    runfolder.refuse_running(found.run)
    newest = store.newest(found.run / "checkpoints")
    if found.checkpoint is not None and newest is not None and found.checkpoint.resolve() != newest.resolve():
        raise UsageError(
            f"--resume {resume}: a submitted job goes on from the newest checkpoint, {newest.name}; give the run folder, or "
            f"begin a new run with -o model.weights={resume}"
        )
    return found.run


def submit(prepared: Prepared) -> QueuedJob:
    """Hand a prepared job to the scheduler, and write its record.

    Raises:
        UsageError: the scheduler refuses it, or its files cannot be written, and nothing was submitted; or the record
            cannot be written, and the message has the job's id.
    """
    submission, record = prepared.submission, prepared.submission.spec_path.parent
    request = record / f"job{prepared.queue.suffix}"
    try:
        runfolder.keep_private()
        record.mkdir(parents=True)
        for path, text in ((submission.spec_path, submission.spec), (request, prepared.request)):
            outputs.write_text(path, text)
    except OSError as error:
        raise UsageError(f"{record}: cannot be written to: {error.strerror or error}") from error
    try:
        number = prepared.queue.submit(submission, request)
    # A refused job leaves no record: `mtrain status` would ask the scheduler for a job that it never had.
    except BaseException:
        for path in (submission.spec_path, request):
            path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            record.rmdir()
        raise
    job = QueuedJob(
        cluster=prepared.cluster,
        id=number,
        name=submission.name,
        folder=submission.folder,
        request=request,
        options=prepared.options,
        submitted=time.time(),
    )
    try:
        runfolder.write_once(record / RECORD, _json(job))
    except OSError as error:
        raise UsageError(
            f"job {number} was submitted to {job.cluster}, but {record / RECORD} cannot be written "
            f"({error.strerror or error}), so `mtrain status` will not know it; end it with the scheduler's own command"
        ) from error
    return job


def jobs(base: Path) -> list[QueuedJob]:
    """Return the jobs that were submitted with runs in ``base``, the oldest first.

    Records that are damaged are left out; a warning names each.
    """
    found, problems = _records(base)
    for problem in problems:
        log.warning("left out: %s", problem)
    return found


def _records(base: Path) -> tuple[list[QueuedJob], list[str]]:
    """Return the jobs whose record can be used, the oldest first, and what is wrong with the other records."""
    found, problems = [], []
    for path in sorted((base / FOLDER).glob(f"*/{RECORD}")):
        try:
            found.append(_job(parse_json(read_text(path, limit=MAX_RECORD_BYTES))))
        except (OSError, ValueError, TypeError, KeyError, UsageError) as error:
            problems.append(f"{path} is no record of a job: {error}")
    return sorted(found, key=lambda job: job.submitted), problems


def find(base: Path, number: str | None) -> QueuedJob:
    """Return the submitted job with this id or run name; None: the newest one.

    Raises:
        UsageError: there is none, or a record is damaged and may be that of the job.
    """
    known, problems = _records(base)
    matching = [job for job in known if number is None or number in (job.id, job.name)]
    if problems and (number is None or not matching):
        remedy = "remove it, or give the id of a job" if known else "remove it"
        raise UsageError(f"{problems[0]}; {remedy}")
    if not matching:
        where = f"{base / FOLDER}"
        if not known:
            raise UsageError(f"no job was submitted from here ({where} has none); submit one with `mtrain submit`")
        listed = ", ".join(f"{job.id} ({job.name})" for job in known[-5:])
        raise UsageError(f"{number}: no such job in {where}; the newest are {listed}")
    return matching[-1]


def progress(job: QueuedJob, base: Path) -> dict[str, Any]:
    """Return how far the run of a job has come, if its folder is here: update, total_updates, run_dir, participants, hangs and copied.

    ``participants``: see ``HostLog.read``; empty for a job on one host. ``hangs``: see ``HangLog.read``.
    ``copied``: the record of the newest copy of a checkpoint; empty if there is none.
    """
    from mtrain.jobs.hosts.host_log import HostLog
    from mtrain.jobs.watch.hang_log import HangLog
    from mtrain.records.history import read_history

    run = base / job.name
    if not run.is_dir():
        return {}
    history = read_history(run / "metrics.jsonl", most_updates=1)
    done = max([0, *(update + 1 for update in history.updates), int((history.end or {}).get("update") or 0)])
    return {
        "run_dir": str(run),
        "update": done,
        "total_updates": history.start.get("total_updates"),
        "participants": HostLog(run).read(),
        "hangs": HangLog(run).read(),
        "copied": dict(history.copied),
    }


def queue_of_job(job: QueuedJob, *, registry: Registry | None = None) -> Queue:
    """Return the queue to which ``job`` was given.

    Raises:
        UsageError: its cluster is not installed here, or has no queue any more.
    """
    registry = Registry.read() if registry is None else registry
    cluster: Cluster = registry.make("clusters", job.cluster, job.options, path="cluster.options")
    queue = cluster.queue()
    if queue is None:
        raise UsageError(f"job {job.id} was given to {job.cluster}, which has no queue here")
    return queue


def _plan(loaded: "Loaded") -> "Plan":
    """Plan the job on as many hosts as it asks for, so that what cannot work is refused before it waits in a queue.

    Raises:
        UsageError: the job cannot be planned.
    """
    from mtrain.jobs.place import run_name
    from mtrain.jobs.plan.machine import here
    from mtrain.jobs.plan.plan import make_plan

    cluster = loaded.spec.cluster
    # Names with a dot, since Paddle's launcher refuses others.
    hosts = [f"host-{number + 1}.cluster" for number in range(cluster.nodes or 1)]
    several = {"ips": hosts if len(hosts) > 1 else [], "name": AUTO, "options": {}}
    spec = loaded.spec.model_copy(update={"cluster": cluster.model_copy(update=several)})
    machine = here(loaded)
    ranks = 1 if cluster.nproc_per_node == "auto" else cluster.nproc_per_node
    # The devices of the hosts are unknown here; a job that asks for devices gets as many as it has ranks.
    devices = ranks if spec.backend.options.get("device", "auto") not in ("auto", "cpu") else 0
    machine = dataclasses.replace(machine, devices=devices, devices_of=[devices] * len(hosts), hidden=False)
    run_dir = _base(loaded) / run_name(loaded)
    return make_plan(dataclasses.replace(loaded, spec=spec), run_dir=run_dir, machine=machine)


def _submission(loaded: "Loaded", name: str, plan: "Plan") -> Submission:
    cluster = loaded.spec.cluster
    base = _base(loaded) / FOLDER
    record = base / runfolder.free_name(name, runfolder.names_like(base, name))
    return Submission(
        name=name,
        spec=dump(_values(loaded)),
        spec_path=record / SPEC,
        hosts=cluster.nodes or 1,
        ranks_per_host=None if cluster.nproc_per_node == "auto" else cluster.nproc_per_node,
        backend=loaded.spec.backend.name,
        elastic=cluster.min_nodes is not None,
        python=sys.executable,
        folder=Path.cwd(),
        arguments=() if loaded.script is None else (str(loaded.script.path), *loaded.script.arguments),
        code={reference.text: reference.file for reference in plan.own_code},
        typed=typed_anew(loaded, _base(loaded) / name),
        local_plugins=_local_plugins(loaded),
    )


def _values(loaded: "Loaded") -> dict[str, Any]:
    """Return the values of the spec for the job itself, which knows the folder of its runs wherever it is started.

    For a script these are the values that its user has set; the rest is the script's to decide.
    """
    from mtrain.rank.script.settings import PLAIN, plain_values

    values = dict(loaded.values)
    if loaded.script is not None:
        _, plain_files = plain_values()
        origins = loaded.provenance.items()
        # Values that nobody set are the script's to decide, which may have changed by the time the job starts.
        base = {"_BASE_": PLAIN} if any(origin.file in plain_files for _, origin in origins) else {}
        values = base | _set_by_user(values, {path for path, origin in origins if origin.file not in plain_files})
    values["report"] = {**values.get("report", {}), "dir": str(_base(loaded))}
    return values


def _set_by_user(values: Mapping[str, Any], paths: Collection[str], prefix: str = "") -> dict[str, Any]:
    """Return the part of ``values`` at dotted ``paths``; a list is taken whole."""
    found = {}
    for key, value in values.items():
        path = f"{prefix}{key}"
        if isinstance(value, dict) and value:
            if part := _set_by_user(value, paths, f"{path}."):
                found[key] = part
        elif path in paths:
            found[key] = value
    return found


def _local_plugins(loaded: "Loaded") -> list[str]:
    """Return the plugins of the job that only a ``plugins.toml`` declares."""
    chosen = [(selector.kind, _at(loaded.values, selector.path)) for selector in SELECTORS]
    chosen += [("reporters", name) for name, options in loaded.spec.report.reporters.items() if options is not False]
    named = [(kind, name) for kind, name in chosen if name not in (None, AUTO) and not references.is_reference(name)]
    entries = [loaded.registry.find(kind, name) for kind, name in named]
    return [f"{SINGULAR[entry.kind]} {entry.name}" for entry in entries if entry.is_local]


def _at(values: Mapping[str, Any], path: Sequence[str]) -> Any:
    node: Any = values
    for key in path:
        node = node[key]
    return node


def _base(loaded: "Loaded") -> Path:
    return Path(loaded.spec.report.dir).absolute()


def _name(loaded: "Loaded") -> str:
    """Return the name of the run: as given, else one that neither a run nor a submitted job has.

    With the name of a job that has ended, its run is continued.

    Raises:
        UsageError: the job with the given name has not ended.
    """
    from mtrain.jobs.place import run_name

    base, name = _base(loaded), run_name(loaded)
    if not loaded.spec.report.name:
        names = {*runfolder.names_like(base, name), *runfolder.names_like(base / FOLDER, name)}
        return runfolder.free_name(name, names)
    for job in (job for job in jobs(base) if job.name == name):
        state = queue_of_job(job, registry=loaded.registry).state(job)
        if state.phase in ("waiting", "running"):
            raise UsageError(
                f"--name {name}: job {job.id} ({job.cluster}) has this name and is {state.phase} [{state.text}]; give "
                f"another name, or end it with `mtrain cancel {job.id}`"
            )
    return name


def _json(job: QueuedJob) -> str:
    fields = dataclasses.asdict(job)
    return json.dumps({key: os.fspath(value) if isinstance(value, Path) else value for key, value in fields.items()})


def _job(fields: Mapping[str, Any]) -> QueuedJob:
    paths = {key: Path(fields[key]) for key in ("folder", "request")}
    if not (isinstance(fields["cluster"], str) and isinstance(fields["submitted"], int | float)):
        raise TypeError("cluster or submitted is of another type")
    if not isinstance(fields["options"], Mapping):
        raise TypeError("options is no mapping")
    return QueuedJob(**{**fields, **paths})


def summary_lines(known: Sequence[QueuedJob]) -> list[str]:
    """Return one line per submitted job: id, cluster, name and time."""
    return [
        f"{job.id:<16}{job.cluster:<12}{job.name:<24}{time.strftime('%Y-%m-%d %H:%M', time.localtime(job.submitted))}"
        for job in known
    ]
