"""Run the jobs of the kit: a shipped spec under the tested backend and under solo, started by the real launchers."""

import io
import secrets
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mtrain.core.interfaces import Command
from mtrain.errors import PluginError, UsageError
from mtrain.jobs.hosts.this_host import ThisHost
from mtrain.jobs.plan import plan
from mtrain.jobs.plan.machine import Machine
from mtrain.jobs.plan.plan import Plan
from mtrain.records.console import Quiet
from mtrain.spec import config
from mtrain.spec.config import Given, Loaded
from mtrain.system import environment
from mtrain.system.processes import EXIT_CODES
from mtrain.system.runfolder import RunFolder
from mtrain_kit import training
from mtrain_kit.check_context import JOB

RANKS_PROGRAM = "mtrain_kit.ranks"
SPEC = "vit_digits"
"""The shipped spec from which the jobs are planned; the kit's own ranks do not train its model."""
OWN_OPTIONS = "backend.options"
SETTLED = {
    "backend.name": "name the backend after `plugins test`",
    "cluster.nproc_per_node": "use --ranks",
    "cluster.slots": "use --ranks",
    "cluster.ips": "the kit runs its jobs on this machine",
    "train.precision": "the kit uses float64, or float32 if the backend has no float64",
}
"""Keys of the spec that a caller cannot set, with the alternative."""


@dataclass(frozen=True, kw_only=True)
class PluginTestRequest:
    """A request to test a plugin with real jobs."""

    name: str
    kind: str | None = None
    """Kind of the plugin; None: the first kind that can be tested and has the name."""
    ranks: int | None = None
    """Number of ranks. None: two, or one if a backend trains in one process."""
    overrides: Sequence[str] = ()
    """``PATH=VALUE`` settings of the spec; ``backend.options.*`` apply to the tested backend alone."""
    only: Sequence[str] = ()
    """Ids of checks, or their beginnings; empty: all checks."""
    limit_s: float = 120.0
    """Time limit of one check, in seconds."""
    json_file: Path | None = None
    """The file for the results; None: none is written."""
    out: Path | None = None
    """The folder in which logs are kept; None: they are kept only where a check failed."""
    environ: Mapping[str, str] = field(default_factory=lambda: environment.clean(environment.caller()))
    """Cleaned environment of the caller."""
    python: str = sys.executable
    """Interpreter of the ranks if the spec names none."""
    tell: Callable[[str], None] = lambda text: None
    """Receives one line at a time about the progress."""


@dataclass(frozen=True, kw_only=True)
class JobEnd:
    """A job that has ended."""

    code: int
    text: str
    run_dir: Path
    job: str
    """Mark of the job's processes."""
    at: float
    """Time of the end, in seconds since 1970."""


class Jobs:
    """Starts jobs. Run folders go into ``folder``; ranks find the results of solo in ``references``."""

    def __init__(self, request: PluginTestRequest, folder: Path, references: Path) -> None:
        """Raise ``UsageError`` for an override that would have no effect."""
        _check_overrides(request.overrides)
        self._request = request
        self._folder = folder
        self._references = references

    def tested_backend(self) -> tuple[Any, str]:
        """Return the backend, constructed, and the distribution that provides it.

        Raises:
            PluginError: it is unknown, not installed, or cannot be constructed.
            SpecError: its options are refused.
        """
        loaded = self.tested_spec(1)
        spec, registry = loaded.spec, loaded.registry
        entry = registry.find("backends", self._request.name)
        if not entry.is_installed and spec.backend.python is None:
            needed = ", ".join(entry.missing())
            remedy = entry.remedy(self._request.python)
            raise PluginError(f"backend {entry.name!r} needs {needed}, which is not installed here; {remedy}")
        backend = registry.make("backends", entry.name, spec.backend.options, path=OWN_OPTIONS)
        for name in ("framework", "rendezvous"):
            if not isinstance(getattr(backend, name, None), str):
                raise PluginError(
                    f"backend {entry.name!r} does not say its `{name}`: expected text; see Backend in "
                    "mtrain.core.interfaces"
                )
        return backend, str(entry.provider)

    def tested_spec(self, ranks: int, more: Sequence[str] = ()) -> Loaded:
        """Return the spec with the tested backend on this number of ranks; ``more``: overrides, weaker than the
        caller's."""
        return _load(self._request.name, ranks, (*more, *self._request.overrides))

    def solo(self, framework: str, more: Sequence[str] = ()) -> Loaded:
        """Return the same spec with solo, whose one rank needs another launcher than several."""
        overrides = [text for text in self._request.overrides if not text.startswith((OWN_OPTIONS, "launcher."))]
        return _load("solo", 1, (*more, *overrides, f"{OWN_OPTIONS}.framework={framework}"))

    def plan(self, loaded: Loaded, run_dir: Path, arguments: Sequence[str] | None, job: str = "") -> Plan:
        """Plan a job of the kit's own ranks; with ``arguments`` None, a job of mtrain's ranks."""
        machine = Machine.here(environ=self._request.environ, python=loaded.spec.backend.python or self._request.python)
        planned = plan.make_plan(loaded, run_dir=run_dir, resume=None, machine=machine)
        if arguments is None:
            return planned
        ranks = loaded.spec.cluster.nproc_per_node
        common = ("--references", str(self._references.absolute()), "--ranks", str(ranks), "--job", job)
        own = (*arguments, *common, "--limit", str(self._request.limit_s))
        return replace(planned, commands=[_with_kit_ranks(command, own) for command in planned.commands])

    def run(self, loaded: Loaded, name: str, arguments: Sequence[str] | None) -> JobEnd:
        """Run a job to its end, in a fresh run folder ``name``.

        Raises:
            KeyboardInterrupt: the job was asked to end from outside.
        """
        run_dir = (self._folder / name).absolute()
        shutil.rmtree(run_dir, ignore_errors=True)
        RunFolder(run_dir).make()
        config.dump(loaded.spec, RunFolder(run_dir).spec_json)
        mark = secrets.token_hex(8)
        return _run(self.plan(loaded, run_dir, arguments, mark), mark, self._request.environ)


def run_whole(loaded: Loaded, run_dir: Path, request: PluginTestRequest, *, resume: Path | None = None) -> JobEnd:
    """Run a job of mtrain's own ranks to its end, in the run folder ``run_dir``, from a checkpoint if one is given.

    Raises:
        KeyboardInterrupt: the job was asked to end from outside.
        UsageError: it cannot be planned.
    """
    RunFolder(run_dir).make()
    config.dump(loaded.spec, RunFolder(run_dir).spec_json)
    machine = Machine.here(environ=request.environ, python=loaded.spec.backend.python or request.python)
    planned = plan.make_plan(loaded, run_dir=run_dir, resume=resume, machine=machine)
    return _run(planned, secrets.token_hex(8), request.environ)


def _run(planned: Plan, mark: str, environ: Mapping[str, str]) -> JobEnd:
    """Run a plan to its end; ``mark``: that of the job's processes."""
    output = io.StringIO()
    hosts = ThisHost(
        display=Quiet(output), environ={**environ, JOB: mark}, replan=lambda checkpoint: planned, stream=output
    )
    code = hosts.run(planned).code
    # The user has asked the job to end, and means the kit.
    if code in EXIT_CODES.values():
        raise KeyboardInterrupt
    return JobEnd(code=code, text=output.getvalue(), run_dir=planned.run_dir, job=mark, at=time.time())


def _check_overrides(overrides: Sequence[str]) -> None:
    for text in overrides:
        path = text.partition("=")[0].strip()
        for settled, remedy in SETTLED.items():
            if path == settled or settled.startswith(f"{path}."):
                problem = "cannot be given" if path == settled else f"holds {settled}, which cannot be given"
                raise UsageError(f"-o {text}: {problem} to the kit: {remedy}; leave it out")


def _load(backend: str, ranks: int, overrides: Sequence[str]) -> Loaded:
    """Load the shipped spec with a backend on this number of ranks, small, and on the CPU unless ``overrides`` say
    otherwise."""
    overridden = {text.partition("=")[0] for text in overrides}
    flags: dict[str, Any] = {
        "backend.name": Given(backend, f"backend {backend}"),
        "cluster.nproc_per_node": Given(ranks, f"--ranks {ranks}"),
    }
    defaults = {
        "train.batch_size": training.GLOBAL_BATCH,
        "cluster.threads": 1,
        "cluster.max_restarts": 0,
        "report.display": "quiet",
    }
    flags |= {path: Given(value, f"{path} {value}") for path, value in defaults.items() if path not in overridden}
    loaded = config.load(SPEC, overrides=overrides, flags=flags)
    # Options are known once the backend is: a first load finds which of the defaults it has.
    option_names = loaded.registry.load("backends", backend).Options.model_fields
    option_defaults = {
        "device": ("cpu", "the kit runs on the CPU"),
        "tf32": (False, "the kit compares float32 with float64"),
    }
    for name, (value, why) in option_defaults.items():
        path = f"{OWN_OPTIONS}.{name}"
        if name in option_names and path not in overridden:
            flags[path] = Given(value, why)
    return config.load(SPEC, overrides=overrides, flags=flags)


def _with_kit_ranks(command: Command, arguments: Sequence[str]) -> Command:
    """Replace mtrain's ranks in a command by the kit's."""
    argv = [RANKS_PROGRAM if word == "mtrain.rank.worker" else word for word in command.argv]
    return replace(command, argv=(*argv, *arguments))
