"""Give a job to the queue of a scheduler, and find it again later.

Everything that was handed over is kept in ``<report.dir>/.submitted/NAME``: the spec as it was then, the request, and the
job's id. The spec is kept because a job may wait for hours, in which its file may be edited.
"""

import contextlib
import dataclasses
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mtrain.core.interfaces import Cluster
from mtrain.core.queue import Queue, QueuedJob, Submission
from mtrain.errors import UsageError
from mtrain.jobs.chosen import AUTO, made_cluster
from mtrain.spec import former_keys, plugins
from mtrain.spec.yaml_reader import dumped
from mtrain.system import runfolder

if TYPE_CHECKING:
    from mtrain.spec.config import Loaded

FOLDER = ".submitted"
"""Folder of the records, in the folder of the runs."""
RECORD = "job.json"
SPEC = "spec.yml"


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """A job that can be submitted, and what would be handed over."""

    queue: Queue
    submission: Submission
    request: str
    """Text of the file for the scheduler."""
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
    cluster = made_cluster(name, former_keys.cluster_options(loaded.spec), policy=loaded.policy)
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
    from mtrain.errors import MtrainError

    names = []
    for entry in plugins.names("clusters", policy=loaded.policy):
        with contextlib.suppress(MtrainError):
            if plugins.load("clusters", entry.name, policy=loaded.policy).queue is not Cluster.queue:
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
    _refuse_what_cannot_work(loaded)
    submission = _submission(loaded, _name(loaded))
    cluster = loaded.spec.cluster
    return Prepared(
        queue=queue,
        submission=submission,
        request=queue.request(submission),
        cluster=cluster.name,
        options=cluster.options,
    )


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
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{record}: cannot be written to: {error.strerror or error}") from error
    try:
        number = prepared.queue.submit(submission, request)
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
        runfolder.write_once(record / RECORD, _json(job), writer=0)
    except OSError as error:
        raise UsageError(
            f"job {number} was submitted to {job.cluster}, but {record / RECORD} cannot be written "
            f"({error.strerror or error}), so `mtrain status` will not know it; end it with the scheduler's own command"
        ) from error
    return job


def jobs(base: Path) -> list[QueuedJob]:
    """Return the jobs that were submitted with runs in ``base``, the oldest first. Records that are damaged are left out."""
    found = []
    for path in (base / FOLDER).glob(f"*/{RECORD}"):
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
            found.append(_job(json.loads(path.read_text(encoding="utf-8"))))
    return sorted(found, key=lambda job: job.submitted)


def find(base: Path, number: str | None) -> QueuedJob:
    """Return the submitted job with this id or run name; None: the newest one.

    Raises:
        UsageError: there is none.
    """
    known = jobs(base)
    matching = [job for job in known if number is None or number in (job.id, job.name)]
    if not matching:
        where = f"{base / FOLDER}"
        if not known:
            raise UsageError(f"no job was submitted from here ({where} has none); submit one with `mtrain submit`")
        listed = ", ".join(f"{job.id} ({job.name})" for job in known[-5:])
        raise UsageError(f"{number}: no such job in {where}; the newest are {listed}")
    return matching[-1]


def progress(job: QueuedJob, base: Path) -> dict[str, Any]:
    """Return how far the run of a job has come, if its folder is here: update, total_updates, run_dir, participants and copied.

    ``participants``: see ``HostLog.read``; empty for a job on one host. ``copied``: the record of the newest copy of a
    checkpoint; empty if there is none.
    """
    from mtrain.cluster.host_log import HostLog
    from mtrain.report.history import read_history

    run = base / job.name
    if not run.is_dir():
        return {}
    history = read_history(run / "metrics.jsonl")
    done = max([0, *(update + 1 for update in history.updates), int((history.end or {}).get("update") or 0)])
    return {
        "run_dir": str(run),
        "update": done,
        "total_updates": history.start.get("total_updates"),
        "participants": HostLog(run).read(),
        "copied": dict(history.copied),
    }


def queue_of_job(job: QueuedJob, *, policy: plugins.Policy | None = None) -> Queue:
    """Return the queue to which ``job`` was given.

    Raises:
        UsageError: its cluster is not installed here, or has no queue any more.
    """
    queue = made_cluster(job.cluster, job.options, policy=policy).queue()
    if queue is None:
        raise UsageError(f"job {job.id} was given to {job.cluster}, which has no queue here")
    return queue


def _refuse_what_cannot_work(loaded: "Loaded") -> None:
    """Plan the job on as many hosts as it asks for, so that what cannot work is refused before it waits in a queue.

    Raises:
        UsageError: the job cannot be planned.
    """
    from mtrain.cluster import start

    cluster = loaded.spec.cluster
    # Names with a dot, since Paddle's launcher refuses others.
    hosts = [f"host-{number + 1}.cluster" for number in range(cluster.nodes or 1)]
    several = {"ips": hosts if len(hosts) > 1 else [], "name": AUTO, "options": {}}
    spec = loaded.spec.model_copy(update={"cluster": cluster.model_copy(update=several)})
    machine = start.here(loaded)
    ranks = 1 if cluster.nproc_per_node == "auto" else cluster.nproc_per_node
    # The devices of the hosts are unknown here; a job that asks for devices gets as many as it has ranks.
    devices = ranks if spec.backend.options.get("device", "auto") not in ("auto", "cpu") else 0
    machine = dataclasses.replace(machine, devices=devices, devices_of=[devices] * len(hosts), hidden=False)
    where = start.Where(run_dir=_base(loaded) / start.run_name(loaded), checkpoint=None)
    start.planned(dataclasses.replace(loaded, spec=spec), where, machine=machine)


def _submission(loaded: "Loaded", name: str) -> Submission:
    cluster = loaded.spec.cluster
    base = _base(loaded) / FOLDER
    record = base / runfolder.free_name(name, runfolder.names_like(base, name))
    is_script = loaded.script is not None
    return Submission(
        name=name,
        spec="" if is_script else dumped(_values(loaded)),
        spec_path=record / SPEC,
        hosts=cluster.nodes or 1,
        ranks_per_host=None if cluster.nproc_per_node == "auto" else cluster.nproc_per_node,
        backend=loaded.spec.backend.name,
        elastic=cluster.min_nodes is not None,
        python=sys.executable,
        folder=Path.cwd(),
        script=_script_words(loaded) if is_script else (),
        arguments=() if loaded.script is None else (str(loaded.script.path), *loaded.script.arguments),
    )


def _values(loaded: "Loaded") -> dict[str, Any]:
    """Return the values of the spec for the job itself, which knows the folder of its runs wherever it is started."""
    values = dict(loaded.values)
    values["report"] = {**values["report"], "dir": str(_base(loaded))}
    return values


def _script_words(loaded: "Loaded") -> list[str]:
    """Return the flags that set what the user has set; the rest is the script's to decide."""
    words = _config_words(loaded)
    for path, origin in sorted(loaded.provenance.items()):
        if origin.kind in ("flag", "override", "environment"):
            words += ["-o", f"{path}={json.dumps(_at(loaded.values, path))}"]
    return words


def _config_words(loaded: "Loaded") -> list[str]:
    from mtrain.spec.sources import is_shipped

    return [] if loaded.path is None or is_shipped(loaded.path) else ["-c", str(loaded.path.absolute())]


def _at(values: Mapping[str, Any], path: str) -> Any:
    node: Any = values
    for key in path.split("."):
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
    from mtrain.cluster import start

    base, name = _base(loaded), start.run_name(loaded)
    if not loaded.spec.report.name:
        names = {*runfolder.names_like(base, name), *runfolder.names_like(base / FOLDER, name)}
        return runfolder.free_name(name, names)
    for job in (job for job in jobs(base) if job.name == name):
        state = queue_of_job(job, policy=loaded.policy).state(job)
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
    return QueuedJob(**{**fields, **paths})


def summary_lines(known: Sequence[QueuedJob]) -> list[str]:
    """Return one line per submitted job: id, cluster, name and time."""
    return [
        f"{job.id:<16}{job.cluster:<12}{job.name:<24}{time.strftime('%Y-%m-%d %H:%M', time.localtime(job.submitted))}"
        for job in known
    ]
