"""Check this host and its libraries, for ``mtrain doctor``. Each framework is imported in a process of its own."""

import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil

import mtrain
from mtrain.core.interfaces import NEUTRAL_FRAMEWORKS
from mtrain.errors import PluginError
from mtrain.jobs.preflight.findings import Finding, State
from mtrain.spec import packages, remedies
from mtrain.spec.plugins import PluginEntry
from mtrain.spec.registry import Registry
from mtrain.system import build_locks, interpreter, placement, plugin_packages

PROBE_TIMEOUT_S = 180.0
"""Seconds that importing and probing a library may take. The first import from a network folder may be slow."""
PROBE_MODULE = "mtrain.backends._{module}.probe"
"""Module that probes a library in detail, where mtrain has one; any other library is only imported."""
THREADS = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - looked at only
SHARED_BYTES = 256 << 20
GIB = 1 << 30


def this_host(
    environ: Mapping[str, str], *, quota: Path = placement.QUOTA, shared: Path = SHARED_MEMORY
) -> list[Finding]:
    """Return findings about the machine, its processors and shared memory. ``environ``: the caller's, not cleaned."""
    memory = psutil.virtual_memory().total / GIB
    text = f"mtrain {mtrain.__version__}, Python {platform.python_version()} ({sys.executable}), {platform.platform()}"
    machine = Finding(check="machine", state="ok", text=f"{text}, {memory:.1f} GiB of memory")
    return [machine, _cores(environ, quota), _shared_memory(environ, shared), *_build_locks(environ)]


def _build_locks(environ: Mapping[str, str]) -> list[Finding]:
    stale = build_locks.find_stale(environ)
    text, remedy = build_locks.describe(stale), build_locks.remedy(stale)
    return [Finding(check="build lock", state="warning", text=text, remedy=remedy)] if stale else []


def _cores(environ: Mapping[str, str], quota: Path) -> Finding:
    cores, granted = placement.visible_cores(), placement.granted_cores(quota)
    own = [f"{name}={environ[name]}" for name in THREADS if name in environ]
    aside = f"; {', '.join(own)} of this shell is not passed on" if own else ""
    text = f"{cores} cores; ranks get their threads from cluster.threads, and wait without spinning{aside}"
    if granted is not None and granted < cores:
        text = f"{cores} cores are seen, of which this container may use {granted:g}"
        if granted < 1:
            remedy = "raise the container's limit to a whole core for each rank"
            return Finding(check="cores", state="warning", text=text, remedy=remedy)
    return Finding(check="cores", state="ok", text=text)


def _shared_memory(environ: Mapping[str, str], shared: Path) -> Finding:
    try:
        statistics = os.statvfs(shared)
    except OSError as error:
        return Finding(check="shm", state="warning", text=f"{shared}: {error.strerror}", remedy="mount a tmpfs there")
    total = statistics.f_blocks * statistics.f_frsize
    text = f"{shared} holds {total >> 20:,} MiB"
    if total < SHARED_BYTES and placement.count_devices(environ):
        text += f", NCCL may need {SHARED_BYTES >> 20}"
        return Finding(check="shm", state="warning", text=text, remedy="enlarge it, in a container with --shm-size=1g")
    return Finding(check="shm", state="ok", text=text)


def libraries(
    entries: Sequence[PluginEntry],
    *,
    chosen: str | None,
    python: str = sys.executable,
    environ: Mapping[str, str],
    of_scripts: Mapping[str, PluginEntry] | None = None,
    framework: str | None = None,
) -> list[Finding]:
    """Check the libraries that backends need; return findings, library by library.

    Args:
        entries: plugins of kind "backends".
        chosen: the backend of the job; a library that it needs and that is missing is "bad", otherwise "absent".
        python: the interpreter in which to look for the libraries.
        environ: environment of that interpreter.
        of_scripts: frameworks that no backend needs, but on which one can run a script: name -> backend.
        framework: the framework of the job; a missing one of those that its backend can run on, but it does not, is "absent".
    """
    needed: dict[str, list[PluginEntry]] = {}
    for entry in entries:
        for module in (*([entry.needs] if entry.needs is not None else []), *entry.libraries):
            if entry.enabled:
                needed.setdefault(module, []).append(entry)
    further = of_scripts or {}
    interpreter_facts = interpreter.ask(python, [*needed, *further], in_detail=False)
    if "error" in interpreter_facts:
        remedy = "set backend.python to the interpreter of the ranks"
        return [Finding(check="libraries", state="bad", text=interpreter_facts["error"], remedy=remedy)]
    present = [module for module, provider in interpreter_facts["modules"].items() if provider is not None]
    # An import of a framework takes seconds, and two frameworks in one process clash, so each has a process of its own.
    with ThreadPoolExecutor(max_workers=max(1, min(len(present), placement.usable_cores()))) as pool:
        findings_of = dict(
            zip(
                present,
                pool.map(
                    lambda module: _probe_library(module, _users(module, needed, further), python, environ), present
                ),
                strict=True,
            )
        )
    findings: list[Finding] = []
    for module, users in needed.items():
        has_other = framework in further or any(name in present and one in users for name, one in further.items())
        is_other = has_other and module in NEUTRAL_FRAMEWORKS
        lacking = _other(module, users) if is_other else _absent(module, users, chosen, python)
        findings += findings_of.get(module) or [lacking]
    for module, entry in further.items():
        if module in present:
            findings += findings_of[module]
        elif module == framework:
            text, remedy = (
                f"not installed; scripts of {entry.name} with {module} cannot run without it",
                _install(module, python),
            )
            findings.append(Finding(check=module, state="bad", text=text, remedy=remedy))
    frameworks = sorted({entry.needs for entry in entries if entry.needs is not None and entry.needs in present})
    if len(frameworks) > 1:
        text = f"{' and '.join(frameworks)} clash in one process: a rank imports one of them, the starter none"
        findings.append(Finding(check="libraries", state="ok", text=text))
    if not frameworks and not any(module in present for module in further):
        text = "no backend can train here: no framework is installed"
        remedy = f"install one, for example {remedies.install('ddp', python=python)}"
        findings.append(Finding(check="libraries", state="bad", text=text, remedy=remedy))
    return findings


def extras(registry: Registry) -> list[Finding]:
    """Return a finding for each extra of mtrain whose packages are missing here."""
    entries = [entry for kind in ("tasks", "datasets", "reporters") for entry in registry.names(kind)]
    lacking: dict[str, list[PluginEntry]] = {}
    for entry in entries:
        if entry.enabled and entry.extra is not None and not entry.is_installed:
            lacking.setdefault(entry.extra, []).append(entry)
    findings = []
    for extra, users in lacking.items():
        modules = ", ".join(dict.fromkeys(module for user in users for module in user.missing()))
        text = f"{modules}: not installed; needed by {', '.join(user.name for user in users)}"
        findings.append(Finding(check=extra, state="absent", text=text, remedy=users[0].remedy(sys.executable)))
    for file, package, extra in plugin_packages.plots_lacking(registry):
        if extra in packages.PACKAGES:  # it has a line of its own
            continue
        remedy = f"install with {remedies.install(extra, python=sys.executable)}"
        findings.append(
            Finding(check=extra, state="absent", text=f"{package}: not installed; needed by {file}", remedy=remedy)
        )
    return findings


def own_packages() -> list[Finding]:
    """Return a finding for each package of mtrain's: its version, that it is not installed, or that it does not fit."""
    findings = []
    for package, brought in {"mtrain-trace": packages.Package(), **packages.PACKAGES}.items():
        try:
            version = packages.installed_version(package)
            problem = packages.other_version(package, version) if version else None
        except PluginError as error:
            version, problem = None, str(error)
        if problem:
            text, _, remedy = problem.partition("; ")
            findings.append(Finding(check=package, state="bad", text=text, remedy=remedy))
        elif version:
            findings.append(Finding(check=package, state="ok", text=f"version {version}"))
        else:
            brings = dict.fromkeys(name.replace(".", " ") for each in brought.brings.values() for name in each)
            names = ", ".join(brings)
            text = f"not installed; it brings {names}" if names else "not installed"
            remedy = _install(package, sys.executable)
            findings.append(Finding(check=package, state="absent", text=text, remedy=remedy))
    return findings


def _users(
    module: str, needed: Mapping[str, Sequence[PluginEntry]], further: Mapping[str, PluginEntry]
) -> Sequence[PluginEntry]:
    return needed[module] if module in needed else [further[module]]


def _install(module: str, python: str) -> str:
    return f"install it with: {remedies.install(module, python=python)}"


def _absent(module: str, users: Sequence[PluginEntry], chosen: str | None, python: str) -> Finding:
    names = ", ".join(entry.name for entry in users)
    # A framework is what the extra of a backend that needs nothing besides it installs.
    entry = min(users, key=lambda entry: bool(entry.libraries) and entry.needs == module)
    state: State = "bad" if chosen in [user.name for user in users] else "absent"
    text = f"not installed; {names} cannot train without it"
    return Finding(check=module, state=state, text=text, remedy=entry.remedy(python))


def _other(module: str, users: Sequence[PluginEntry]) -> Finding:
    """Return the finding about a missing framework, where the interpreter has another one for the scripts of the same backend."""
    text = f"not installed; specs, and scripts of {', '.join(entry.name for entry in users)} with {module}, cannot run without it"
    return Finding(check=module, state="absent", text=text)


def _probe_library(module: str, users: Sequence[PluginEntry], python: str, environ: Mapping[str, str]) -> list[Finding]:
    """Probe a library in a process of its own; return findings about it."""
    probe_module = PROBE_MODULE.format(module=module)
    has_probe = find_spec(probe_module.rpartition(".")[0]) is not None and find_spec(probe_module) is not None
    command = ["-m", probe_module] if has_probe else ["-c", f"import {module}; print('[]')"]
    rows = _ask([python, "-W", "ignore", *command], environ)
    if isinstance(rows, str):
        text, remedy = f"{module} is installed and cannot be used: {rows}", users[0].remedy(python)
        return [Finding(check=module, state="bad", text=text, remedy=remedy)]
    rows = rows or [{"state": "ok", "text": f"{module} can be imported"}]
    return [Finding(check=module, state=row["state"], text=row["text"], remedy=row.get("remedy", "")) for row in rows]


def _ask(argv: Sequence[str], environ: Mapping[str, str]) -> list[dict[str, Any]] | str:
    """Run a command; return the JSON in its last line of output, or why there is none."""
    try:
        process = subprocess.run(  # noqa: S603 - our own modules
            list(argv), capture_output=True, text=True, timeout=PROBE_TIMEOUT_S, check=False, env=dict(environ)
        )
    except subprocess.TimeoutExpired:
        return f"it did not answer within {PROBE_TIMEOUT_S:g} s"
    if process.returncode < 0:
        return f"its process was ended by signal {-process.returncode}"
    lines = (process.stdout if process.returncode == 0 else process.stderr).strip().splitlines()
    try:
        return list(json.loads(lines[-1])) if process.returncode == 0 else lines[-1]
    except (IndexError, ValueError):
        return f"exit code {process.returncode}"
