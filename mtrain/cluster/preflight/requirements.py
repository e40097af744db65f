"""Requirements of a job on its hosts, in the form of the questions that ``facts.collect`` answers."""

import sys
from pathlib import Path
from typing import Any

from mtrain.core.interfaces import Dataset
from mtrain.jobs import metrics
from mtrain.jobs.plan import Plan
from mtrain.spec import plugins, remedies
from mtrain.spec.model import Spec

LEAST_BYTES = 100 << 20
"""Free disk space below which a host is refused, before the size of a checkpoint is added."""
PLENTY_BYTES = 2 << 30
"""Free disk space below which there is a warning."""


def requirements(spec: Spec, plan: Plan, *, python: str | None = None, cwd: Path | None = None) -> list[dict[str, Any]]:
    """Return the requirements for each host of ``plan``, as plain values for ``facts.collect``.

    ``python``: interpreter of the ranks; None: that of ``backend.python``, and without one the agent's own. ``cwd``:
    the folder to which relative paths refer on every host; None: the working directory here.
    """
    policy = plugins.read_policy(spec.plugins)
    common = {
        "names": [host.address for host in plan.hosts],
        "names_s": spec.cluster.joining_s,
        "cwd": str(cwd or Path.cwd()),
        "run_dir": str(plan.run_dir),
        "bytes": _room(plan.resume),
        "python": python or spec.backend.python,
        "modules": _modules(spec, policy),
        "files": _files(spec) | dict(plan.files),
        "data": _data(spec, policy),
        "device": str(getattr(_options(spec, policy), "device", "auto")),
        "devices": None if spec.cluster.devices is None else list(spec.cluster.devices),
    }
    return [
        {**common, "address": host.address, "slots": host.slots, "ports": _ports(spec, plan, index)}
        for index, host in enumerate(plan.hosts)
    ]


def _options(spec: Spec, policy: plugins.Policy) -> Any:
    return plugins.options("backends", spec.backend.name, spec.backend.options, path="backend.options", policy=policy)


def _modules(spec: Spec, policy: plugins.Policy) -> dict[str, str]:
    """Return the modules that the ranks import: name -> how to install it."""
    entry = plugins.find("backends", spec.backend.name, policy=policy)
    framework = plugins.made("backends", spec.backend.name, _options(spec, policy), policy=policy).framework
    extra = {e.needs: e.extra for e in plugins.names("backends", policy=policy) if e.extra and not e.library}
    python = spec.backend.python or sys.executable
    named = extra.get(framework)
    command = remedies.install(named, python=python) if named else f"{python} -m pip install {framework}"
    remedy_of = {framework: f"install it there with: {command}"}
    if entry.library:
        remedy_of[entry.library] = entry.remedy(python)
    return remedy_of


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


def _room(resume: Path | None) -> dict[str, int]:
    """Return the free bytes of disk below which a host is refused ("least"), or is warned about ("plenty")."""
    if resume is None:
        return {"least": LEAST_BYTES, "plenty": PLENTY_BYTES}
    size = sum(file.stat().st_size for file in resume.glob("*") if file.is_file())
    return {"least": LEAST_BYTES + 2 * size, "plenty": max(PLENTY_BYTES, 4 * size)}


def _files(spec: Spec) -> dict[str, str]:
    """Return the files that every rank reads: key of the spec -> path."""
    weights = spec.model.weights
    teacher = None if spec.train.distil is None else spec.train.distil.teacher
    path_of = {"model.weights": weights, "train.distil.teacher": teacher, "plugins": spec.plugins}
    return {key: path for key, path in path_of.items() if path is not None and not Path(path).is_dir()}


def _data(spec: Spec, policy: plugins.Policy) -> dict[str, Any] | None:
    """Return the data folder to compare between hosts.

    None where the data set's plugin makes or brings its own data.
    """
    dataset: type[Dataset] = plugins.load("datasets", spec.data.format, policy=policy)
    if spec.data.root is None or dataset.made_on_first_use:
        return None
    return {"root": spec.data.root, "skip": [spec.report.dir]}
