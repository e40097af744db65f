"""Run the jobs of the kit, and judge the records of their ranks."""

import json
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mtrain.core.checkpoint import store
from mtrain.core.overriding import override
from mtrain.errors import LaunchError, UsageError
from mtrain.system import failures
from mtrain.system.placement import LOOPBACK
from mtrain.system.runfolder import RunFolder
from mtrain_kit import rank_records, training
from mtrain_kit.catalogue import CHECKS, DIES, ENTERS, LEAVES, LIGHT, ON_RANKS, ONE, TASK
from mtrain_kit.check_context import processes_of
from mtrain_kit.checks import Check, Finding, Measure, Results, choose_checks, none_of, worst_of_ranks
from mtrain_kit.jobs import JobEnd, Jobs, PluginTestRequest
from mtrain_kit.rank_records import JobRecords
from mtrain_kit.ranks import THREADS_FILE
from mtrain_kit.teardown import DEATH_FILE

SIZES = (1, 2, 3, 4, 6)
"""Numbers of ranks that divide the kit's global batch."""
RANKS = 2
END_S = 60.0
"""Seconds from the death of a rank to the end of the job, at most."""
COMPARED = ("learns.", "accuracy.", "clip.", "state.from_solo", "evaluation.", "plugin.leaves", "size.")
"""Beginnings of the ids of checks that compare with the results of solo."""
TASK_UPDATES = 4
# The bound is wide because adamw divides by roots of small numbers.
TASK_BOUNDS = {"fp64": 1e-9, "fp32": 1e-3}
"""Largest relative difference of the weights of the whole job."""


@dataclass(kw_only=True)
class Conformance(Results):
    """The results of all checks of one backend."""

    backend: str
    framework: str
    launcher: str
    ranks: int
    precision: str = ""

    @property
    @override
    def has_passed(self) -> bool:
        """Return whether every requested check was run and passed."""
        return all(finding.verdict == "passed" for finding in self.findings)


def run(request: PluginTestRequest, folder: Path, *, references: Path | None = None) -> Conformance:
    """Test a backend; run folders go into ``folder``. ``references``: folder with the results of solo, if they exist.

    Raises:
        UsageError: the backend is unknown or not installed, or options and ranks do not fit.
    """
    return _Kit(request, folder, references).run()


class _Kit:
    def __init__(self, request: PluginTestRequest, folder: Path, references: Path | None) -> None:
        self._request = request
        self._checks = choose_checks(request.only, CHECKS)
        self._references = references or folder / "references"
        self._jobs = Jobs(request, folder, self._references)
        described, provider = self._jobs.tested_backend()
        ranks = request.ranks if request.ranks is not None else (1 if described.rendezvous == "none" else RANKS)
        if ranks not in SIZES:
            raise UsageError(f"--ranks {ranks}: expected one of {', '.join(map(str, SIZES))}")
        self._ranks = ranks
        self._framework: str = described.framework
        first = self._jobs.plan(self._jobs.tested_spec(ranks), folder / "plan", ("--part", "checks"))
        self._result = Conformance(
            backend=request.name,
            provider=provider,
            framework=self._framework,
            launcher=first.launcher_name,
            ranks=ranks,
            folder=folder,
        )

    def run(self) -> Conformance:
        began = time.monotonic()
        findings: dict[Check, Finding] = {}
        compared = [check for check in self._checks if check.id.startswith(COMPARED)]
        # The results of solo serve all backends of a framework, so they are written once.
        if compared and not (self._references / THREADS_FILE).is_file():
            self._request.tell(f"solo on {self._framework}: what one rank learns")
            self._write_references()
        for finding in self._in_one_job():
            findings[finding.check] = finding
        for check, run in ((ONE, self._one), (DIES, self._death), (TASK, self._task)):
            if check in self._checks:
                self._request.tell(f"{check.id}: {check.claim}")
                findings[check] = run()
        self._result.findings = [findings[check] for check in CHECKS if check in findings]
        self._result.seconds = time.monotonic() - began
        return self._result

    def _write_references(self) -> None:
        self._references.mkdir(parents=True, exist_ok=True)
        ended = self._jobs.run(self._jobs.solo(self._framework), "reference", ("--part", "reference"))
        if ended.code:
            raise LaunchError(f"solo on {self._framework}, with which backends are compared, failed:\n{ended.text}")

    def _in_one_job(self) -> list[Finding]:
        """Run the checks that share a job. A check that ends the job has failed, requested or not; the others continue
        in another job."""
        waiting = [check for check in self._checks if check in (LIGHT, ENTERS, LEAVES) or check in ON_RANKS]
        findings: list[Finding] = []
        attempt = 0
        while waiting:
            attempt += 1
            self._request.tell(f"{self._result.backend}, {self._ranks} ranks: {', '.join(c.id for c in waiting)}")
            check_ids = ",".join(check.id for check in waiting)
            arguments = ("--part", "checks", "--checks", check_ids)
            ended = self._jobs.run(self._jobs.tested_spec(self._ranks), f"checks-{attempt}", arguments)
            records = JobRecords.of(ended.run_dir, self._ranks)
            self._result.precision = rank_records.read_facts(ended.run_dir).get("precision", self._result.precision)
            # Records are written check by check, so the first one without a record is that which ended the job.
            unfinished = (check for check in (LIGHT, ENTERS, *waiting, LEAVES) if not records.is_finished(check))
            culprit = next(unfinished, LEAVES if ended.code else None)
            for check in waiting:
                if check is not culprit and records.is_finished(check):
                    more = [_ports_taken(ended)] if check is LEAVES else []
                    findings.append(Finding(check=check, measures=worst_of_ranks([*records.measures(check), *more])))
            if culprit is not None:
                findings.append(Finding(check=culprit, error=error_of(ended)))
            judged = {finding.check for finding in findings}
            # A check that has ended its job is not tried again: the others go on in a new one.
            waiting = [check for check in waiting if check not in judged]
            # Without ranks inside a backend there is nothing that the others could check.
            if culprit in (LIGHT, ENTERS):
                return findings + [Finding(check=check, reason=f"{culprit.id} failed") for check in waiting]
        return findings

    def _one(self) -> Finding:
        ended = self._jobs.run(self._jobs.tested_spec(1), "one", ("--part", "one"))
        records = JobRecords.of(ended.run_dir, 1)
        if ended.code or not records.is_finished(ONE):
            return Finding(check=ONE, error=error_of(ended))
        return Finding(check=ONE, measures=worst_of_ranks(records.measures(ONE)))

    def _death(self) -> Finding:
        ended = self._jobs.run(self._jobs.tested_spec(self._ranks), "death", ("--part", "death"))
        file = ended.run_dir / DEATH_FILE
        if not file.is_file():
            return Finding(check=DIES, error=f"the job ended before a rank was killed: {error_of(ended)}")
        seconds = ended.at - float(file.read_text())
        remaining_pids = [str(pid) for pid in processes_of(ended.job)]
        succeeded = [] if ended.code else ["exit code 0"]
        measures = [
            Measure(
                what="seconds from the death of a rank to the end of the job", value=round(seconds, 2), bound=END_S
            ),
            none_of("jobs that ended as if nothing had happened", succeeded),
            none_of("processes left behind", remaining_pids),
            _ports_taken(ended),
        ]
        return Finding(check=DIES, measures=measures)

    def _task(self) -> Finding:
        precision = self._result.precision or "fp32"
        short = (
            *(f"train.precision={precision}", f"train.updates={TASK_UPDATES}", "train.epochs=null"),
            "train.clip_norm=null",  # clipping would hide a gradient of the wrong length
            *("evaluate.every_epochs=null", "report.plots=false", "data.workers=0"),
        )
        results = []
        solo, tested = self._jobs.solo(self._framework, short), self._jobs.tested_spec(self._ranks, short)
        for name, loaded in (("task-solo", solo), ("task", tested)):
            ended = self._jobs.run(loaded, name, None)
            newest = store.newest(RunFolder(ended.run_dir).checkpoints)
            if ended.code or newest is None:
                return Finding(check=TASK, error=f"{ended.run_dir}: {error_of(ended)}")
            summary = json.loads(RunFolder(ended.run_dir).summary.read_text())
            results.append((training.flat(store.load(newest).state), summary["last"] or {}))
        (expected, metrics), (learnt, own_metrics) = results
        differences = training.differences(expected, learnt)
        worst = max(differences, key=lambda name: differences[name])
        differing = [name for name, value in metrics.items() if not _close(own_metrics.get(name), value)]
        what = "weights, averages, moments: largest relative difference"
        measures = [
            Measure(what=what, value=differences[worst], bound=TASK_BOUNDS[precision], detail=worst),
            none_of("metrics of the evaluation that differ", differing),
        ]
        return Finding(check=TASK, measures=measures)


def _ports_taken(ended: JobEnd) -> Measure:
    """Measure the ports on which the processes of a job listened and which are still in use.

    They are checked after the job: a port that a framework holds until its process ends (Paddle's store) is harmless.
    """
    ports = rank_records.read_facts(ended.run_dir).get("ports", ())
    return none_of("ports still in use after the job", [str(port) for port in ports if not _is_free(port)])


def error_of(ended: JobEnd) -> str:
    """Return the error that ended a job, in one or two lines."""
    if stuck := rank_records.stuck(ended.run_dir):
        return stuck
    if found := failures.read_failures(RunFolder(ended.run_dir)):
        return f"rank {found[0].get('rank')}: {found[0].get('error')}"
    last = [line.strip() for line in ended.text.splitlines() if line.strip()]
    return " / ".join(last[-3:]) if ended.code else "the ranks ended early, with exit code 0"


def _is_free(port: int) -> bool:
    with socket.socket() as listener:
        # Connections that have just ended keep a port busy for a minute without it.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((LOOPBACK, port))
        except OSError:
            return False
    return True


def _close(actual: Any, expected: Any) -> bool:
    return isinstance(actual, int | float) and abs(actual - expected) <= 1e-9 * max(1.0, abs(expected))
