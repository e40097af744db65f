"""Trials in the queue of a scheduler: submitted once, taken over by a resumed sweep, cancelled when they are pruned."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.sweeping.jobs import TINY, InstantJob, sweep_request

import mtrain
from mtrain.core.interfaces.queue import Queue, QueuedJob, QueueState, Submission
from mtrain.errors import UsageError
from mtrain_clusters import submission
from mtrain_sweep import search as sweep
from mtrain_sweep import starting, trial_jobs
from mtrain_sweep.places import TrialFiles


class StandIn(Queue):
    """A scheduler that lets each job wait for a while, and then writes the records of its run."""

    def __init__(self) -> None:
        self.submitted: list[str] = []
        self.cancelled: list[str] = []
        self.asked: dict[str, int] = {}
        self.away = 0
        """The next questions that are not answered."""

    def request(self, submission: Submission) -> str:
        return " ".join(submission.command())

    def submit(self, submission: Submission, request: Path) -> str:
        assert "--resume if-any" in request.read_text()
        self.submitted.append(submission.name)
        return str(len(self.submitted))

    def state(self, job: QueuedJob) -> QueueState:
        if self.away:
            self.away -= 1
            raise UsageError("the controller does not answer")
        self.asked[job.name] = self.asked.get(job.name, 0) + 1
        if job.name in self.cancelled:
            return QueueState(phase="cancelled", text="CANCELLED", code=143)
        if self.asked[job.name] < 3:
            return QueueState(phase="waiting", text="PENDING (Resources)")
        if self.asked[job.name] == 3:
            InstantJob(TrialFiles(job.request.parents[3], int(job.name)))
        if self.asked[job.name] < 6:
            return QueueState(phase="running", text="RUNNING")
        return QueueState(phase="done", text="COMPLETED", code=0)

    def logs(self, job: QueuedJob, *, follow: bool) -> Iterator[str]:
        yield from ()

    def cancel(self, job: QueuedJob) -> None:
        self.cancelled.append(job.name)


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    stand_in = StandIn()
    monkeypatch.setattr(submission, "queue_of", lambda loaded: stand_in)
    monkeypatch.setattr(trial_jobs, "ASK_S", 0.0)
    monkeypatch.setattr(sweep, "POLL_S", 0.0)
    monkeypatch.setattr(InstantJob, "metrics", staticmethod(lambda place: [0.5 - place.number / 10] * 3), raising=False)
    return stand_in


def plan(folder: Path, **settings: object) -> sweep.SweepPlan:
    spec = {**TINY, "cluster": {"name": "slurm", "nproc_per_node": 1}}
    return starting.prepare(sweep_request(folder, load=lambda: mtrain.load_spec(spec), sampler="random", **settings))


def test_a_spec_that_names_a_scheduler_submits_its_trials(queue: StandIn, tmp_path: Path) -> None:
    asked = plan(tmp_path / "sweep", trials=2)
    assert asked.queued
    queue.away = 2
    assert sweep.run(asked).reason == "finished"
    assert queue.submitted == ["0000", "0001"]
    rows = (tmp_path / "sweep" / "trials.csv").read_text().splitlines()[1:]
    assert [row.split(",")[:3] for row in rows] == [["0", "done", "0.5"], ["1", "done", "0.4"]]


def test_a_resumed_sweep_takes_over_the_jobs_that_it_had_submitted(
    queue: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    def dies(self: object, running: object) -> None:
        raise Killed

    begun = plan(tmp_path / "sweep", trials=3, jobs=2)
    with monkeypatch.context() as patch:
        patch.setattr(sweep._Sweep, "_step", dies)
        patch.setattr(sweep._Sweep, "_abandon", lambda self: None)  # a killed process cancels nothing
        with pytest.raises(Killed):
            sweep.run(begun)
    assert queue.submitted == ["0000", "0001"]
    assert sweep.run(plan(tmp_path / "sweep", trials=3, jobs=2, resume=True)).reason == "finished"
    assert queue.submitted == ["0000", "0001", "0002"]
    assert queue.cancelled == []


def test_a_pruned_trial_is_cancelled(queue: StandIn, tmp_path: Path) -> None:
    sweep.run(plan(tmp_path / "sweep", trials=3, pruner="halving"))
    rows = (tmp_path / "sweep" / "trials.csv").read_text().splitlines()[1:]
    assert [row.split(",")[1] for row in rows] == ["done", "pruned", "pruned"]
    assert queue.cancelled == ["0001", "0002"]
