"""Starts the jobs of the kit through the real launchers, and judges what their ranks have left."""

import io
import json
import secrets
import shutil
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mtrain.core import checkpoint, config, launch, plan, plugins, runfolder
from mtrain.core.config import Given, Loaded
from mtrain.core.errors import LaunchError, PluginError, UsageError
from mtrain.core.interfaces import Command
from mtrain.core.placement import LOOPBACK
from mtrain.core.plan import Machine, Plan
from mtrain.core.report_console import Quiet
from mtrain.core.runfolder import RunFolder
from mtrain.core.suggest import hint
from mtrain.testing import training
from mtrain.testing.catalogue import CHECKS, DIES, ENTERS, LEAVES, LIGHT, ON_RANKS, ONE, TASK
from mtrain.testing.finding import Check, Finding, Measure, none_of, worst_of_ranks
from mtrain.testing.leaving import DEATH_FILE
from mtrain.testing.ranks import FACTS_FILE, THREADS_FILE, diaries
from mtrain.testing.site import JOB, processes_of

RANKS_PROGRAM = "mtrain.testing.ranks"
SPEC = "vit_digits"
"""The shipped spec whose jobs are planned; what is learnt by the kit's own ranks is not in it."""
SIZES = (1, 2, 3, 4, 6)
"""Numbers of ranks among which the kit's global batch divides."""
RANKS = 2
END_S = 60.0
"""From the death of a rank to the end of the job."""
OWN_OPTIONS = "backend.options"
COMPARED = ("learns.", "clip.", "state.from_solo", "evaluation.", "plugin.leaves", "size.")
"""What ids of checks begin with that ask what solo has learnt."""
TASK_UPDATES = 4
TASK_BOUNDS = {"fp64": 1e-9, "fp32": 1e-3}
"""Weights of the whole job; adamw divides by roots of small numbers."""


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


@dataclass(kw_only=True)
class Conformance:
    """What the kit has found about one backend."""

    backend: str
    provider: str
    framework: str
    launcher: str
    ranks: int
    precision: str = ""
    folder: Path
    seconds: float = 0.0
    findings: list[Finding] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Whether every check that was asked for was run and passed."""
        return all(finding.verdict == "passed" for finding in self.findings)

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "backend": self.backend,
            "provider": self.provider,
            "framework": self.framework,
            "launcher": self.launcher,
            "ranks": self.ranks,
            "precision": self.precision,
            "folder": str(self.folder),
            "seconds": round(self.seconds, 1),
            "passed": self.passed,
            "checks": [finding.as_json() for finding in self.findings],
        }


def chosen(only: Sequence[str]) -> list[Check]:
    """The checks whose id is, or begins with, one of ``only``; all where it is empty.

    Raises:
        UsageError: one of them is the beginning of none.
    """
    ids = [check.id for check in CHECKS]
    for word in only:
        if not any(known.startswith(word) for known in ids):
            raise UsageError(f"--only {word}: no such check{hint(word, ids)}")
    return [check for check in CHECKS if not only or any(check.id.startswith(word) for word in only)]


def run(wanted: Wanted, folder: Path, *, references: Path | None = None) -> Conformance:
    """Test a backend; run folders go into ``folder``. ``references``: what solo has learnt, where it is known already.

    Raises:
        UsageError: the backend is unknown or not installed, or options and ranks do not fit.
    """
    return _Kit(wanted, folder, references).run()


@dataclass(frozen=True, kw_only=True)
class _Ended:
    """A job that has ended."""

    code: int
    text: str
    run_dir: Path
    job: str
    at: float
    """Seconds since the epoch."""


class _Kit:
    def __init__(self, wanted: Wanted, folder: Path, references: Path | None) -> None:
        self._wanted = wanted
        self._folder = folder
        self._checks = chosen(wanted.only)
        described = self._described()
        ranks = wanted.ranks if wanted.ranks is not None else (1 if described.rendezvous == "none" else RANKS)
        if ranks not in SIZES:
            raise UsageError(f"--ranks {ranks}: expected one of {', '.join(map(str, SIZES))}")
        self._ranks = ranks
        self._framework: str = described.framework
        self._references = references or folder / "references"
        first = self._plan(self._loaded(ranks), folder / "plan", ("--part", "checks"))
        entry = plugins.find("backends", wanted.backend, policy=self._policy())
        self._result = Conformance(
            backend=wanted.backend,
            provider=f"{entry.distribution} {entry.version}".strip(),
            framework=self._framework,
            launcher=first.launcher_name,
            ranks=ranks,
            folder=folder,
        )

    # ----------------------------------------------------------------------------------------------- the parts of a test
    def run(self) -> Conformance:
        began = time.monotonic()
        found: dict[Check, Finding] = {}
        compared = [check for check in self._checks if check.id.startswith(COMPARED)]
        if compared and not (self._references / THREADS_FILE).is_file():
            self._wanted.say(f"solo on {self._framework}: what one rank learns")
            self._write_references()
        for finding in self._in_one_job():
            found[finding.check] = finding
        for check, run in ((ONE, self._one), (DIES, self._death), (TASK, self._task)):
            if check in self._checks:
                self._wanted.say(f"{check.id}: {check.claim}")
                found[check] = run()
        self._result.findings = [found[check] for check in self._checks]
        self._result.seconds = time.monotonic() - began
        return self._result

    def _write_references(self) -> None:
        self._references.mkdir(parents=True, exist_ok=True)
        ended = self._run(self._loaded_solo(), "reference", ("--part", "reference"))
        if ended.code:
            raise LaunchError(f"solo on {self._framework}, with which backends are compared, failed:\n{ended.text}")

    def _in_one_job(self) -> list[Finding]:
        """Checks that share a job. One that ends the job has failed; the others go on in another job."""
        waiting = [check for check in self._checks if check in (LIGHT, ENTERS, LEAVES) or check in ON_RANKS]
        done: list[Finding] = []
        for attempt in range(len(waiting)):
            if not waiting:
                break
            self._wanted.say(f"{self._result.backend}, {self._ranks} ranks: {', '.join(c.id for c in waiting)}")
            asked = ",".join(check.id for check in waiting)
            ended = self._run(
                self._loaded(self._ranks), f"checks-{attempt + 1}", ("--part", "checks", "--checks", asked)
            )
            entries = _diaries(ended.run_dir, self._ranks)
            still_taken = none_of("ports that stay taken behind the job", self._taken(ended))
            guilty = _unfinished(entries, [LIGHT, ENTERS, *waiting]) or (waiting[-1] if ended.code else None)
            for check in [check for check in waiting if check is not guilty]:
                measures = [m for entry in entries for m in entry.measures.get(check.id, [])]
                if sum(check.id in entry.measures for entry in entries) == self._ranks:
                    measures += [still_taken] if check is LEAVES else []
                    done.append(Finding(check=check, measures=worst_of_ranks(measures)))
            finished = {finding.check for finding in done}
            waiting = [check for check in waiting if check not in finished and check is not guilty]
            if guilty is not None:
                if guilty in self._checks:
                    done.append(Finding(check=guilty, error=_error(ended)))
                if guilty in (LIGHT, ENTERS):
                    reason = f"{guilty.id} failed" + ("" if guilty in self._checks else f": {_error(ended)}")
                    return done + [Finding(check=check, reason=reason) for check in waiting]
        return done

    def _taken(self, ended: _Ended) -> list[str]:
        """Ports on which the processes of a job listened, and which nobody else can have now."""
        facts = _facts(ended.run_dir)
        self._result.precision = facts.get("precision", self._result.precision)
        return [str(port) for port in facts.get("ports", ()) if not _is_free(port)]

    def _one(self) -> Finding:
        ended = self._run(self._loaded(1), "one", ("--part", "one"))
        (entry,) = _diaries(ended.run_dir, 1)
        if ended.code or ONE.id not in entry.measures:
            return Finding(check=ONE, error=_error(ended))
        return Finding(check=ONE, measures=worst_of_ranks(entry.measures[ONE.id]))

    def _death(self) -> Finding:
        ended = self._run(self._loaded(self._ranks), "death", ("--part", "death"))
        file = ended.run_dir / DEATH_FILE
        if not file.is_file():
            return Finding(check=DIES, error=f"the job ended before a rank was killed: {_error(ended)}")
        seconds = ended.at - float(file.read_text())
        left = [str(pid) for pid in processes_of(ended.job)]
        succeeded = [] if ended.code else ["exit code 0"]
        measures = [
            Measure(
                what="seconds from the death of a rank to the end of the job", value=round(seconds, 2), bound=END_S
            ),
            none_of("jobs that ended as if nothing had happened", succeeded),
            none_of("processes left behind", left),
            none_of("ports that stay taken", self._taken(ended)),
        ]
        return Finding(check=DIES, measures=measures)

    def _task(self) -> Finding:
        precision = self._result.precision or "fp32"
        short = (
            *(f"train.precision={precision}", f"train.updates={TASK_UPDATES}", "train.epochs=null"),
            "train.clip_norm=null",  # a clipped gradient does not show how long it was
            *("evaluate.every_epochs=null", "report.plots=false", "data.workers=0"),
        )
        found = []
        for name, loaded in (("task-solo", self._loaded_solo(short)), ("task", self._loaded(self._ranks, short))):
            ended = self._run(loaded, name, None)
            newest = checkpoint.newest(RunFolder(ended.run_dir).checkpoints)
            if ended.code or newest is None:
                return Finding(check=TASK, error=f"{ended.run_dir}: {_error(ended)}")
            summary = json.loads(RunFolder(ended.run_dir).summary.read_text())
            found.append((training.flat(checkpoint.load(newest).state), summary["last"]))
        (expected, figures), (learnt, own_figures) = found
        differences = training.differences(expected, learnt)
        worst = max(differences, key=lambda name: differences[name])
        other = [name for name, value in figures.items() if not _close(own_figures.get(name), value)]
        what = "weights, averages, moments: largest relative difference"
        measures = [
            Measure(what=what, value=differences[worst], bound=TASK_BOUNDS[precision], detail=worst),
            none_of("figures of the evaluation that differ", other),
        ]
        return Finding(check=TASK, measures=measures)

    # --------------------------------------------------------------------------------------------------- specs and jobs
    def _policy(self) -> plugins.Policy:
        return self._loaded(1).policy

    def _described(self) -> Any:
        loaded = self._loaded(1)
        spec, policy = loaded.spec, loaded.policy
        entry = plugins.find("backends", self._wanted.backend, policy=policy)
        if not entry.installed and spec.backend.python is None:
            needed = ", ".join(name for name in (entry.needs, entry.library) if name)
            remedy = entry.remedy(self._wanted.python)
            raise PluginError(f"backend {entry.name!r} needs {needed}, which is not installed here; {remedy}")
        options = plugins.options("backends", entry.name, spec.backend.options, path=OWN_OPTIONS, policy=policy)
        plugin = plugins.load("backends", entry.name, policy=policy)
        try:
            return plugin(options)
        except Exception as error:
            raise PluginError(
                f"backend {entry.name!r} cannot be constructed: {type(error).__name__}: {error}; look at __init__ of {entry.target}"
            ) from error

    def _loaded(self, ranks: int, more: Sequence[str] = ()) -> Loaded:
        return _load(self._wanted.backend, ranks, (*more, *self._wanted.overrides))

    def _loaded_solo(self, more: Sequence[str] = ()) -> Loaded:
        kept = [text for text in self._wanted.overrides if not text.startswith(OWN_OPTIONS)]
        return _load("solo", 1, (*more, *kept, f"{OWN_OPTIONS}.framework={self._framework}"))

    def _plan(self, loaded: Loaded, run_dir: Path, arguments: Sequence[str] | None, job: str = "") -> Plan:
        """A plan of the kit's own ranks; ``arguments`` None: of mtrain's."""
        machine = Machine.here(environ=self._wanted.environ, python=loaded.spec.backend.python or self._wanted.python)
        planned = plan.make_plan(loaded, run_dir=run_dir, resume=None, machine=machine)
        if arguments is None:
            return planned
        ranks = loaded.spec.cluster.nproc_per_node
        common = ("--references", str(self._references.absolute()), "--ranks", str(ranks), "--job", job)
        own = (*arguments, *common, "--limit", str(self._wanted.limit_s))
        return replace(planned, commands=[_of_kit(command, own) for command in planned.commands])

    def _run(self, loaded: Loaded, name: str, arguments: Sequence[str] | None) -> _Ended:
        run_dir = (self._folder / name).absolute()
        shutil.rmtree(run_dir, ignore_errors=True)
        RunFolder(run_dir).make()
        config.dump(loaded.spec, RunFolder(run_dir).spec_json)
        mark = secrets.token_hex(8)
        planned = self._plan(loaded, run_dir, arguments, mark)
        said = io.StringIO()
        environ = {**self._wanted.environ, JOB: mark}
        job = launch.Job(display=Quiet(said), environ=environ, stream=said)
        code = launch.run(planned, job)
        if code in launch.EXIT_CODES.values():
            raise KeyboardInterrupt
        return _Ended(code=code, text=said.getvalue(), run_dir=run_dir, job=mark, at=time.time())


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
    device = f"{OWN_OPTIONS}.device"
    if device in given or "device" not in plugins.load("backends", backend, policy=loaded.policy).Options.model_fields:
        return loaded
    flags[device] = Given("cpu", "the kit runs on the CPU")
    return config.load(SPEC, overrides=overrides, flags=flags)


def _of_kit(command: Command, arguments: Sequence[str]) -> Command:
    """The command with the kit's ranks in place of mtrain's."""
    argv = [RANKS_PROGRAM if word == "mtrain.worker" else word for word in command.argv]
    return replace(command, argv=(*argv, *arguments))


@dataclass(frozen=True, kw_only=True)
class _Diary:
    began: Sequence[str]
    measures: Mapping[str, Sequence[Measure]]


def _diaries(run_dir: Path, ranks: int) -> list[_Diary]:
    return [_read(diaries(run_dir) / f"rank-{rank}.jsonl") for rank in range(ranks)]


def _read(path: Path) -> _Diary:
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    entries = [json.loads(line) for line in lines if line.endswith("}")]
    return _Diary(
        began=[entry["check"] for entry in entries if "began" in entry],
        measures={e["check"]: [Measure(**values) for values in e["measures"]] for e in entries if "measures" in e},
    )


def _unfinished(entries: Sequence[_Diary], checks: Sequence[Check]) -> Check | None:
    """The first check that not every rank has finished."""
    return next((check for check in checks if any(check.id not in entry.measures for entry in entries)), None)


def _facts(run_dir: Path) -> dict[str, Any]:
    """What rank 0 told of the job."""
    try:
        facts: dict[str, Any] = json.loads((diaries(run_dir) / FACTS_FILE).read_text())
    except (OSError, ValueError):
        return {}
    return facts


def _error(ended: _Ended) -> str:
    """What ended a job, in a line or two."""
    failures = runfolder.read_failures(RunFolder(ended.run_dir))
    if failures:
        return f"rank {failures[0].get('rank')}: {failures[0].get('error')}"
    last = [line.strip() for line in ended.text.splitlines() if line.strip()]
    return " / ".join(last[-3:]) if ended.code else "the ranks ended early, with exit code 0"


def _is_free(port: int) -> bool:
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((LOOPBACK, port))
        except OSError:
            return False
    return True


def _close(found: Any, expected: Any) -> bool:
    return isinstance(found, int | float) and abs(found - expected) <= 1e-9 * max(1.0, abs(expected))
