"""Requirements of a job on its hosts, in the form of the questions that ``facts.collect`` answers."""

import sys
from pathlib import Path
from typing import Any

from mtrain.core.checkpoint.format import size_of
from mtrain.core.checkpoint.store import reusable_bytes
from mtrain.core.interfaces import Dataset
from mtrain.jobs.plan.plan import Plan
from mtrain.jobs.preflight.partners import partners
from mtrain.jobs.run import metrics
from mtrain.spec import remedies
from mtrain.spec.model import CheckpointSpec, Spec
from mtrain.spec.resolved import Resolved
from mtrain.system import disk, plugin_packages

LEAST_BYTES = 100 << 20
"""Free disk space below which a host is refused, before the size of a checkpoint is added."""
PLENTY_BYTES = 2 << 30
"""Free disk space below which there is a warning."""


def requirements(
    job: Resolved, plan: Plan, *, python: str | None = None, cwd: Path | None = None, is_script: bool = False
) -> list[dict[str, Any]]:
    """Return the requirements for each host of ``plan``, as plain values for ``facts.collect``.

    ``python``: interpreter of the ranks; None: that of ``backend.python``, and without one the agent's own. ``cwd``:
    the folder to which relative paths refer on every host; None: the working directory here. ``is_script``: a user's
    script is run, which has a model and data of its own.
    """
    spec = job.spec
    common = {
        "names_s": spec.cluster.joining_s,
        "cwd": str(cwd or Path.cwd()),
        "run_dir": str(plan.run_dir),
        "bytes": _room(plan.resume, spec.checkpoint),
        "python": python or spec.backend.python,
        "modules": _modules(job),
        "plugin_modules": _plugin_modules(job, is_script=is_script),
        "files": _files(spec) | dict(plan.files),
        "data": _data(job),
        "device": str(getattr(job.backend_options, "device", "auto")),
        "devices": None if spec.cluster.devices is None else list(spec.cluster.devices),
    }
    return [
        {
            **common,
            "address": host.address,
            "names": [plan.hosts[other].address for other in sorted({index, *partners(index, len(plan.hosts))})],
            "slots": host.slots,
            "ports": _ports(spec, plan, index),
        }
        for index, host in enumerate(plan.hosts)
    ]


def _modules(job: Resolved) -> dict[str, str]:
    """Return the modules that the ranks import: name -> how to install it."""
    spec, framework = job.spec, job.backend.framework
    entry = job.registry.find("backends", spec.backend.name)
    extra = {e.needs: e.extra for e in job.registry.names("backends") if e.extra and not e.libraries}
    python = spec.backend.python or sys.executable
    named = extra.get(framework)
    command = remedies.install(named, python=python) if named else f"{python} -m pip install {framework}"
    remedy_of = {framework: f"install it there with: {command}"}
    return remedy_of | {module: entry.remedy(python) for module in entry.libraries}


def _plugin_modules(job: Resolved, *, is_script: bool) -> dict[str, str]:
    """Return the modules that the job's plugins import: name -> how to install it. Hosts may have other versions."""
    python = job.spec.backend.python or sys.executable
    users = plugin_packages.users(job, is_script=is_script)
    return {module: user.remedy(python) for _, user in users for module in user.libraries}


def _ports(spec: Spec, plan: Plan, index: int) -> list[tuple[int, str]]:
    """Return (port, key of the spec) for each port that the spec fixes on one host."""
    ports: list[tuple[int, str]] = []
    master, start = spec.cluster.master_port, spec.cluster.start_port
    if index == 0 and master != "auto":
        ports.append((master, "cluster.master_port"))
    if start != "auto" and "--start_port" in plan.commands[index].argv:
        ports += [(port, "cluster.start_port") for port in range(start, min(start + plan.hosts[index].slots, 65536))]
    if plan.metrics is not None:
        ports.append((plan.metrics.port, metrics.KEY))
    return ports


def _room(resume: Path | None, rule: CheckpointSpec) -> dict[str, int]:
    """Return the free bytes of disk below which a host is refused ("least"), or is warned about ("plenty")."""
    if resume is None or not resume.is_dir():
        return {"least": LEAST_BYTES, "plenty": PLENTY_BYTES}
    # A job that goes on has checkpoints already, which rotate, so a full disk need not be in its way.
    needed = disk.needed_bytes(rule, each_bytes=size_of(resume), existing_bytes=reusable_bytes(resume.parent))
    return {"least": max(needed, disk.RECORDS_BYTES), "plenty": PLENTY_BYTES}


def _files(spec: Spec) -> dict[str, str]:
    """Return the files that every rank reads: key of the spec -> path."""
    weights = spec.model.weights
    teacher = None if spec.train.distil is None else spec.train.distil.teacher
    path_of = {"model.weights": weights, "train.distil.teacher": teacher, "plugins": spec.plugins}
    return {key: path for key, path in path_of.items() if path is not None and not Path(path).is_dir()}


def _data(job: Resolved) -> dict[str, Any] | None:
    """Return the data folder to compare between hosts.

    None where the data set's plugin makes or brings its own data.
    """
    spec = job.spec
    dataset: type[Dataset] = job.registry.load("datasets", spec.data.format)
    if spec.data.root is None or dataset.made_on_first_use:
        return None
    return {"root": spec.data.root, "skip": [spec.report.dir]}
