"""Run a sweep: propose trials, start their jobs, judge them while they run, and note how they end."""

import contextlib
import shlex
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from optuna.trial import FrozenTrial, TrialState

from mtrain.errors import MtrainError, UsageError
from mtrain.spec.files import path_problem
from mtrain.spec.outputs import make_folder, write_text
from mtrain.spec.yaml_reader import dump
from mtrain.system import disk, placement, runfolder
from mtrain.system.processes import Requests
from mtrain_sweep import journal as journals
from mtrain_sweep import outputs
from mtrain_sweep.definition import SweepDefinition
from mtrain_sweep.gpus import Shares
from mtrain_sweep.journal import REASON, SECONDS, UPDATE, Journal
from mtrain_sweep.places import TrialFiles
from mtrain_sweep.proposals import judge, propose
from mtrain_sweep.records import Score, TrialRecords, best
from mtrain_sweep.request import SweepRequest
from mtrain_sweep.sharing import Copies, copies_for
from mtrain_sweep.table import shown_params
from mtrain_sweep.trial_jobs import LocalJob, QueuedTrial, TrialEnd, TrialJob, caller_without_values

POLL_S = 0.2
RESTARTS = 3
"""A trial that something outside has killed is continued so many times."""
EXIT_CODES = {2: 130, 15: 143}
"""Exit code for the signal that ended a sweep."""

Reason = Literal["finished", "failed", "interrupted"]


@dataclass(frozen=True, kw_only=True)
class SweepPlan:
    """A request that was checked, and what follows from it on this machine."""

    request: SweepRequest
    definition: SweepDefinition
    folder: Path
    """Folder of the sweep, absolute."""
    queued: bool = False
    """Whether trials are given to the queue of a scheduler."""
    gpus: Shares = ()
    """GPUs of each of the trials that run at the same time; empty: they are not divided."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepVerdict:
    """How a sweep ended."""

    reason: Reason
    code: int
    text: str = ""
    """What to do, if it has not finished."""


@dataclass(kw_only=True)
class _Running:
    """A trial that runs now, or is about to."""

    trial: FrozenTrial
    place: TrialFiles
    records: TrialRecords
    slot: int = 0
    """Which of the trials at the same time it is, from 0: the lowest number that no other one has."""
    job: TrialJob | None = None
    judged: int = 0
    """Number of evaluations that the pruner has seen."""
    pruned: list[Score] | None = None
    """The scores up to the one at which the trial was pruned."""
    restarts: int = 0
    started: float = field(default_factory=time.monotonic)

    @property
    def number(self) -> int:
        return self.trial.number


def run(plan: SweepPlan) -> SweepVerdict:
    """Run a sweep to its end, or go on with it. Must be called from the main thread, which receives signals.

    Raises:
        UsageError: the metric is no metric of the evaluations, or the folder is in use or damaged.
    """
    runfolder.keep_private()
    with (
        runfolder.hold(plan.folder, ".lock", doing="this sweep"),
        contextlib.chdir(plan.definition.folder),
        Requests() as requests,
    ):
        plan.request.tell(f"sweep folder: {plan.folder}")
        try:
            with contextlib.closing(Journal(plan.folder, direction=plan.definition.direction)) as journal:
                with contextlib.closing(_Sweep(plan, journal, requests)) as sweep:
                    verdict = sweep.run()
                outputs.write(plan.folder, plan.definition, journal.trials())
        except journals.FAILURES as error:
            reason = getattr(error.__cause__ or error, "orig", None) or error
            raise UsageError(
                f"{plan.folder}: the journal cannot be written to: {reason}; make room on its disk, then {_go_on(plan)}"
            ) from error
    return verdict


def _go_on(plan: SweepPlan) -> str:
    """Return how the sweep goes on, in words."""
    at_once = f" --jobs {plan.request.jobs}" if plan.request.jobs > 1 else ""
    return f"go on with: mtrain sweep --resume --out {shlex.quote(str(plan.folder))}{at_once}"


class _Sweep:
    """One process's work on a sweep."""

    def __init__(self, plan: SweepPlan, journal: Journal, requests: Requests) -> None:
        self._plan = plan
        self._request = plan.request
        self._definition = plan.definition
        self._journal = journal
        self._requests = requests
        self._running: list[_Running] = []
        self._stopped = 0
        self._failures = 0
        self._last_reason = ""
        self._copies: Copies | None = None
        """The process of which trials are copies, from the first one on where there are several."""
        self._may_share = plan.request.shares

    def close(self) -> None:
        """End the process of which trials were copies."""
        if self._copies is not None:
            self._copies.close()

    def run(self) -> SweepVerdict:
        try:
            while True:
                for running in list(self._running):
                    self._step(running)
                if self._requests.any():
                    self._stop_all()
                elif self._failures < self._request.max_failures:
                    self._fill()
                if not self._running:
                    return self._verdict()
                time.sleep(POLL_S)
        except BaseException:
            self._abandon()
            raise

    # ------------------------------------------------------------------------------------------------ starting trials
    def _fill(self) -> None:
        """Begin trials while there is room: first those that the journal has as running, then new ones."""
        while len(self._running) < self._request.jobs and self._failures < self._request.max_failures:
            trials = self._journal.trials()
            active = {running.number for running in self._running}
            # Trials of an earlier process come first, so that a killed sweep proposes the same values as a whole one.
            waiting = [trial for trial in trials if trial.state == TrialState.RUNNING and trial.number not in active]
            if waiting:
                self._begin(waiting[0])
            elif len(trials) < self._definition.trials:
                number = self._journal.add(propose(self._definition, trials, len(trials)))
                self._begin(self._journal.trials()[number])
            else:
                return
            if self._requests.any():
                return

    def _begin(self, trial: FrozenTrial) -> None:
        place = TrialFiles(self._plan.folder, trial.number)
        taken = {running.slot for running in self._running}
        slot = next(slot for slot in range(self._request.jobs) if slot not in taken)
        running = _Running(trial=trial, place=place, records=TrialRecords(place.run_dir, self._definition), slot=slot)
        self._running.append(running)
        self._judge(running)  # of an earlier process of this sweep
        if running.pruned is not None or running.records.is_done():
            self._finish(running, TrialEnd(code=0))
            return
        self._request.tell(f"trial {trial.number}: {shown_params(trial.params)}")
        self._start(running)

    def _start(self, running: _Running) -> None:
        try:
            running.job = self._job(running)
        except (MtrainError, OSError) as error:
            reason = (path_problem(error) or str(error)).replace("\n", "; ")
            self._finish(running, TrialEnd(code=2, reason=reason))

    def _job(self, running: _Running) -> TrialJob:
        place = running.place
        report = {"dir": str(place.runs), "name": place.name}
        gpus = self._plan.gpus[running.slot] if self._plan.gpus else None
        loaded = self._definition.trial_spec(running.trial.params, report=report, gpus=gpus)
        for folder in (place.spec.parent, place.log.parent, place.runs):
            make_folder(folder)
        # A trial is an ordinary job of a file, which anybody can start again by hand.
        write_text(place.spec, dump(loaded.values))
        if self._plan.queued:
            return QueuedTrial(place, loaded)
        copies = self._start_copies()
        return LocalJob(place, gpus=gpus) if copies is None else LocalJob(place, gpus=gpus, copies=copies)

    def _start_copies(self) -> Copies | None:
        """Return the process of which trials are copies; it is started when it is first needed."""
        if self._may_share:
            self._may_share = False
            ended = sum(trial.state.is_finished() for trial in self._journal.trials())
            if self._definition.trials - ended > 1 and not self._plan.gpus:
                self._copies = copies_for(self._definition, self._plan.folder, variables=caller_without_values)
        return self._copies if self._copies is not None and self._copies.is_ready else None

    # ------------------------------------------------------------------------------------------------ watching trials
    def _step(self, running: _Running) -> None:
        ended = running.job.poll() if running.job else None  # asked first, so that no record of an ended job is missed
        if running.pruned is None and self._judge(running) and running.job is not None and ended is None:
            running.job.stop()
        if ended is not None:
            self._end_trial(running, ended)

    def _judge(self, running: _Running) -> bool:
        """Look at the evaluations since the last time; return whether the trial is pruned by one of them."""
        scores = running.records.scores()
        while running.judged < len(scores):
            seen = scores[: running.judged + 1]
            others = [trial for trial in self._journal.trials() if trial.number != running.number]
            judgement = judge(self._definition, others, [score.value for score in seen])
            self._journal.report(running.number, len(seen), seen[-1].value, judgement.notes)
            running.judged += 1
            if judgement.pruned:
                running.pruned = seen
                return True
        return False

    def _end_trial(self, running: _Running, ended: TrialEnd) -> None:
        if running.pruned is not None or running.records.is_done():
            self._finish(running, TrialEnd(code=0))
        elif self._requests.any() and ended.code in (0, 130, 143):
            self._running.remove(running)
            updates = runfolder.read_summary(running.place.run_dir).get("updates")
            self._request.tell(f"trial {running.number}: saved{f' at update {updates}' if updates is not None else ''}")
        elif self._requests.any():
            self._running.remove(running)
        elif ended.killed and running.restarts < RESTARTS:
            running.restarts += 1
            self._request.tell(f"trial {running.number}: {ended.reason}; goes on from its checkpoint")
            self._start(running)
        else:
            self._finish(running, ended)

    def _finish(self, running: _Running, ended: TrialEnd) -> None:
        """Note how a trial has ended.

        Raises:
            UsageError: the disk is full, which is no result of the trial: it goes on from its checkpoint.
        """
        self._running.remove(running)
        if ended.code != 0 and ("make room" in ended.reason.lower() or disk.is_full(self._plan.folder)):
            raise UsageError(f"trial {running.number}: {ended.reason}; when there is room, {_go_on(self._plan)}")
        seconds = round(time.monotonic() - running.started, 1)
        scores = running.pruned if running.pruned is not None else running.records.scores()
        score = best(scores, self._definition)
        notes: dict[str, Any] = {SECONDS: seconds}
        reason = ended.reason
        if ended.code == 0 and score is None:
            reason = f"{self._definition.metric} was never a finite number" if scores else "it made no evaluation"
        if ended.code != 0 or (score is None and running.pruned is None):
            # In a row: one bad choice of values is a result, three of them a mistake in the spec.
            self._failures, self._last_reason = self._failures + 1, reason
            self._journal.end(running.number, TrialState.FAIL, notes={**notes, REASON: reason})
            self._request.tell(f"trial {running.number}: failed: {reason}")
            return
        self._failures = 0
        value, notes[UPDATE] = (None, scores[-1].update) if score is None else (score.value, score.update)
        state = TrialState.COMPLETE if running.pruned is None else TrialState.PRUNED
        if running.pruned is not None:
            notes[REASON] = f"pruned after evaluation {len(scores)}, at update {scores[-1].update}"
        self._journal.end(running.number, state, value=value, notes=notes)
        word = "pruned" if running.pruned is not None else "done"
        shown = "not a number" if value is None else f"{value:.6g}"
        self._request.tell(
            f"trial {running.number}: {word}: {self._definition.metric} {shown} at update {notes[UPDATE]}"
        )

    # ------------------------------------------------------------------------------------------------------ the end
    def _stop_all(self) -> None:
        """Pass the requests to end on to all trials, each once."""
        while self._stopped < self._requests.count:
            self._stopped += 1
            for running in self._running:
                if running.job is not None:
                    running.job.stop(at_once=self._stopped > 1)

    def _abandon(self) -> None:
        """Ask all trials to save and end, and wait for them: this process cannot go on."""
        for running in self._running:
            if running.job is not None:
                with contextlib.suppress(MtrainError, OSError):
                    running.job.stop()
        for running in self._running:
            with contextlib.suppress(MtrainError, OSError):
                while running.job is not None and running.job.poll() is None and self._requests.count < 2:
                    time.sleep(POLL_S)

    def _verdict(self) -> SweepVerdict:
        go_on = _go_on(self._plan)
        if self._requests.first is not None:
            return SweepVerdict(
                reason="interrupted", code=EXIT_CODES[self._requests.first], text=f"ended, trials are saved; {go_on}"
            )
        if self._failures >= self._request.max_failures:
            text = f"{self._failures} trials in a row failed, the last one with: {self._last_reason}; correct the cause, then {go_on}"
            return SweepVerdict(reason="failed", code=1, text=text)
        trials = self._journal.trials()
        if not any(trial.state == TrialState.COMPLETE for trial in trials):
            return SweepVerdict(
                reason="failed",
                code=1,
                text=f"no trial has reached its end; their logs are in {self._plan.folder}/logs",
            )
        return SweepVerdict(reason="finished", code=0)


def refuse_what_cannot_work(plan: SweepPlan) -> None:
    """Check what every trial needs, before anything starts.

    Raises:
        UsageError: trials would have nothing to be judged by, or the job cannot be planned.
    """
    from mtrain.jobs.plan import means
    from mtrain.jobs.plan.plan import make_plan
    from mtrain.jobs.preflight import job_checks

    loaded = plan.definition.trial_spec(
        {one.name: one.extremes()[0] for one in plan.definition.parameters},
        report={"dir": str(plan.folder / "trials")},
    )
    evaluate = loaded.spec.evaluate
    if evaluate.every_epochs is None and evaluate.every_updates is None:
        raise UsageError(
            "evaluate.every_epochs and every_updates are null: trials are judged by their evaluations; set one"
        )
    if plan.queued:
        return
    if means.is_several(loaded.spec):
        if means.is_by_hand(loaded.spec):
            raise UsageError(
                "cluster.name: trials on several hosts need a cluster that starts them, such as --cluster ssh"
            )
        if loaded.spec.cluster.ips and not placement.is_here(loaded.spec.cluster.ips[0]):
            raise UsageError(
                f"cluster.ips: the first host is {loaded.spec.cluster.ips[0]}, which has the records of a job; start the sweep there"
            )
        return
    trial = make_plan(loaded, run_dir=plan.folder / "trials" / "0000")
    job_checks.check(loaded.job, size=trial.size)
