"""The jobs of the kit: a shipped spec under the backend that is tested, and under solo, started through the real launchers."""

import io
import secrets
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mtrain.core.interfaces import Command
from mtrain.errors import PluginError, UsageError
from mtrain.jobs import plan, supervisor
from mtrain.jobs.plan import Machine, Plan
from mtrain.report.console import Quiet
from mtrain.spec import config, plugins
from mtrain.spec.config import Given, Loaded
from mtrain.system.runfolder import RunFolder
from mtrain.testing import training
from mtrain.testing.check_context import JOB

RANKS_PROGRAM = "mtrain.testing.ranks"
SPEC = "vit_digits"
"""The shipped spec whose jobs are planned; what is learnt by the kit's own ranks is not in it."""
OWN_OPTIONS = "backend.options"
SETTLED = {
    "backend.name": "what is tested is named behind `plugins test`",
    "cluster.nproc_per_node": "use --ranks",
    "cluster.slots": "use --ranks",
    "cluster.ips": "its jobs run on this machine",
    "train.precision": "it takes float64, and float32 where the backend has none",
}
"""Keys of the spec that a caller cannot give, and what to do instead."""


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What is tested, and how."""

    backend: str
    ranks: int | None = None
    """None: two, and one where the backend trains in one process."""
    overrides: Sequence[str] = ()
    """``PATH=VALUE`` each: of the spec, ``backend.options.*`` for the backend alone."""
    only: Sequence[str] = ()
    """Ids of checks, or what they begin with; empty: all."""
    limit_s: float = 120.0
    """For one check."""
    environ: Mapping[str, str]
    """The cleaned environment of the caller."""
    python: str
    """Interpreter of the ranks, where the spec names none."""
    say: Callable[[str], None] = lambda text: None
    """Takes a line about what is done just now."""


@dataclass(frozen=True, kw_only=True)
class Ended:
    """A job that has ended."""

    code: int
    text: str
    run_dir: Path
    job: str
    """The mark of its processes."""
    at: float
    """Seconds since the epoch."""


class Jobs:
    """Starts them; run folders go into ``folder``, and ranks find what solo has learnt in ``references``."""

    def __init__(self, wanted: Wanted, folder: Path, references: Path) -> None:
        """Raises ``UsageError`` for an override that would not be heard."""
        _check_overrides(wanted.overrides)
        self._wanted = wanted
        self._folder = folder
        self._references = references

    def described(self) -> tuple[Any, str]:
        """The backend, constructed, and who provides it.

        Raises:
            PluginError: it is unknown, not installed, or cannot be constructed.
            SpecError: its options are refused.
        """
        loaded = self.tested(1)
        spec, policy = loaded.spec, loaded.policy
        entry = plugins.find("backends", self._wanted.backend, policy=policy)
        if not entry.installed and spec.backend.python is None:
            needed = ", ".join(name for name in (entry.needs, entry.library) if name)
            remedy = entry.remedy(self._wanted.python)
            raise PluginError(f"backend {entry.name!r} needs {needed}, which is not installed here; {remedy}")
        options = plugins.options("backends", entry.name, spec.backend.options, path=OWN_OPTIONS, policy=policy)
        described = plugins.made("backends", entry.name, options, policy=policy)
        for name in ("framework", "rendezvous"):
            if not isinstance(getattr(described, name, None), str):
                raise PluginError(
                    f"backend {entry.name!r} does not say its `{name}`: expected text; see Backend in mtrain.core.interfaces"
                )
        return described, f"{entry.distribution} {entry.version}".strip()

    def tested(self, ranks: int, more: Sequence[str] = ()) -> Loaded:
        """The spec with the backend that is tested on so many ranks; ``more``: overrides, weaker than the caller's."""
        return _load(self._wanted.backend, ranks, (*more, *self._wanted.overrides))

    def solo(self, framework: str, more: Sequence[str] = ()) -> Loaded:
        """The same spec with solo."""
        kept = [text for text in self._wanted.overrides if not text.startswith(OWN_OPTIONS)]
        return _load("solo", 1, (*more, *kept, f"{OWN_OPTIONS}.framework={framework}"))

    def plan(self, loaded: Loaded, run_dir: Path, arguments: Sequence[str] | None, job: str = "") -> Plan:
        """A plan of the kit's own ranks; ``arguments`` None: of mtrain's."""
        machine = Machine.here(environ=self._wanted.environ, python=loaded.spec.backend.python or self._wanted.python)
        planned = plan.make_plan(loaded, run_dir=run_dir, resume=None, machine=machine)
        if arguments is None:
            return planned
        ranks = loaded.spec.cluster.nproc_per_node
        common = ("--references", str(self._references.absolute()), "--ranks", str(ranks), "--job", job)
        own = (*arguments, *common, "--limit", str(self._wanted.limit_s))
        return replace(planned, commands=[_of_kit(command, own) for command in planned.commands])

    def run(self, loaded: Loaded, name: str, arguments: Sequence[str] | None) -> Ended:
        """Run one to its end, in a fresh run folder ``name``.

        Raises:
            KeyboardInterrupt: it was asked to end from outside.
        """
        run_dir = (self._folder / name).absolute()
        shutil.rmtree(run_dir, ignore_errors=True)
        RunFolder(run_dir).make()
        config.dump(loaded.spec, RunFolder(run_dir).spec_json)
        mark = secrets.token_hex(8)
        planned = self.plan(loaded, run_dir, arguments, mark)
        said = io.StringIO()
        environ = {**self._wanted.environ, JOB: mark}
        job = supervisor.Job(display=Quiet(said), environ=environ, stream=said)
        code = supervisor.run(planned, job)
        if code in supervisor.EXIT_CODES.values():
            raise KeyboardInterrupt
        return Ended(code=code, text=said.getvalue(), run_dir=run_dir, job=mark, at=time.time())


def _check_overrides(overrides: Sequence[str]) -> None:
    for text in overrides:
        path = text.partition("=")[0].strip()
        for settled, remedy in SETTLED.items():
            if path == settled or settled.startswith(f"{path}."):
                told = "cannot be given" if path == settled else f"holds {settled}, which cannot be given"
                raise UsageError(f"-o {text}: {told} to the kit: {remedy}; leave it out")


def _load(backend: str, ranks: int, overrides: Sequence[str]) -> Loaded:
    """The shipped spec with a backend of so many ranks. Small, on the CPU unless ``overrides`` say otherwise."""
    given = {text.partition("=")[0] for text in overrides}
    flags: dict[str, Any] = {
        "backend.name": Given(backend, f"backend {backend}"),
        "cluster.nproc_per_node": Given(ranks, f"--ranks {ranks}"),
    }
    own = {
        "train.batch_size": training.GLOBAL_BATCH,
        "cluster.threads": 1,
        "cluster.max_restarts": 0,
        "report.display": "quiet",
    }
    flags |= {path: Given(value, f"{path} {value}") for path, value in own.items() if path not in given}
    loaded = config.load(SPEC, overrides=overrides, flags=flags)
    known = plugins.load("backends", backend, policy=loaded.policy).Options.model_fields
    settled = {"device": ("cpu", "the kit runs on the CPU"), "tf32": (False, "the kit compares float32 with float64")}
    for name, (value, why) in settled.items():
        path = f"{OWN_OPTIONS}.{name}"
        if name in known and path not in given:
            flags[path] = Given(value, why)
    return config.load(SPEC, overrides=overrides, flags=flags)


def _of_kit(command: Command, arguments: Sequence[str]) -> Command:
    """The command with the kit's ranks in place of mtrain's."""
    argv = [RANKS_PROGRAM if word == "mtrain.rank.worker" else word for word in command.argv]
    return replace(command, argv=(*argv, *arguments))
