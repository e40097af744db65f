"""Ctrl-C and SIGTERM, wherever they arrive: ranks of all hosts save and end, and the job goes on later as if nothing
had been."""

import json

import pytest

from tests.cluster.faults import SLACK_S
from tests.cluster.jobs import ENDLESS, Job, Jobs
from tests.cluster.lab import Lab
from tests.cluster.test_lab_jobs import BACKENDS, STARTS, done

ENDING_S = 30.0
ENDLESSLY = {"train__updates": ENDLESS, "checkpoint__every_updates": 1000}


def asked(jobs: Jobs, lab: Lab, start: str, signal: str, *, at: str = "node1", **more: object) -> Job:
    job: Job = getattr(jobs, start)("asked", **{**ENDLESSLY, **more})
    job.reach(3)
    lab.kill(job.starter(at), signal)
    job.finish(timeout_s=ENDING_S + SLACK_S)
    return job


@pytest.mark.parametrize(
    ("start", "backend", "signal", "code"),
    [
        ("over_ssh", "ddp", "INT", 130),
        pytest.param("over_ssh", "ddp", "TERM", 143, marks=pytest.mark.slow),
        pytest.param("by_hand", "ddp", "INT", 130, marks=pytest.mark.slow),
        pytest.param("by_hand", "ddp", "TERM", 143, marks=pytest.mark.slow),
        *[
            pytest.param("over_ssh", *backend.values, "TERM", 143, marks=[pytest.mark.slow, *backend.marks])
            for backend in BACKENDS[1:]
        ],
    ],
)
def test_a_request_at_the_starter_lets_all_hosts_save_and_end(jobs: Jobs, lab: Lab, start, backend, signal, code):
    job = asked(jobs, lab, start, signal, backend=backend)
    assert job.leader.code == code, job.leader.text
    assert "state saved; go on with --resume" in job.leader.text
    saved = sorted(path.name for path in (job.folder / "checkpoints").glob("step-*"))
    assert saved[-1] == f"step-{max(job.updates()) + 1:08}"
    assert lab.left(within_s=10.0) == []


@pytest.mark.slow
def test_a_request_at_another_host_of_a_job_by_hand_ends_all_of_it(jobs: Jobs, lab: Lab):
    job = asked(jobs, lab, "by_hand", "TERM", at="node3")
    assert [output.code for output in job.outputs] == [143] * 3, [output.text for output in job.outputs]
    assert "state saved; go on with --resume" in job.leader.text
    assert lab.left(within_s=10.0) == []


@pytest.mark.slow
def test_a_request_at_all_hosts_at_once_lets_all_of_them_save_and_end(jobs: Jobs, lab: Lab):
    """`scancel` and the deletion of pods send such requests."""
    job = jobs.by_hand("cancelled", **ENDLESSLY).reach(3)
    starters = [job.starter(node) for node in ("node1", "node2", "node3")]
    script = [lab.start(starter.node, ["kill", "-TERM", str(starter.pid)]) for starter in starters]
    for each in script:
        each.communicate(timeout=60)
    job.finish(timeout_s=ENDING_S + SLACK_S)
    assert [output.code for output in job.outputs] == [143] * 3, [output.text for output in job.outputs]
    assert "state saved; go on with --resume" in job.leader.text
    saved = sorted(path.name for path in (job.folder / "checkpoints").glob("step-*"))
    assert saved[-1] == f"step-{max(job.updates()) + 1:08}"
    assert lab.left(within_s=10.0) == []


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_sigterm_to_every_process_on_all_hosts_lets_all_of_them_save_and_end(jobs: Jobs, lab: Lab, backend):
    """What `scancel` does to a job step: agents, native starters, ranks and loader processes, after SIGCONT."""
    job = jobs.by_hand("step", backend=backend, **ENDLESSLY).reach(3)
    killers = []
    for node in ("node1", "node2", "node3"):
        pids = " ".join(str(process.pid) for process in lab.processes(node))
        killers.append(lab.start(node, ["sh", "-c", f"kill -CONT {pids}; kill -TERM {pids}"]))
    for each in killers:
        each.communicate(timeout=60)
    job.finish(timeout_s=ENDING_S + SLACK_S)
    assert [output.code for output in job.outputs] == [143] * 3, [output.text for output in job.outputs]
    assert "state saved; go on with --resume" in job.leader.text
    rows = [json.loads(line) for line in job.read("metrics.jsonl").splitlines()]
    assert [row["update"] for row in rows if row.get("why") == "ending"] == [max(job.updates()) + 1], "one save"
    assert lab.left(within_s=10.0) == []


@pytest.mark.slow
def test_a_native_starter_that_is_killed_on_one_host_is_a_failure_though_the_ranks_have_saved(jobs: Jobs, lab: Lab):
    job = jobs.over_ssh("starter", **ENDLESSLY).reach(3)
    (native,) = [
        process for process in lab.processes("node2") if process.module == "mtrain.backends._torch.ranks.starter"
    ]
    lab.kill(native, "KILL")
    job.finish(timeout_s=ENDING_S + SLACK_S)
    assert job.leader.code == 1, job.leader.text
    assert "error: the starter of the ranks on 10.77.0.2" in job.leader.text
    assert "SIGKILL" in job.leader.text
    assert lab.left(within_s=10.0) == []


@pytest.mark.slow
@pytest.mark.parametrize("start", STARTS)
def test_a_job_that_was_asked_to_end_goes_on_to_the_weights_of_the_undisturbed_one(jobs: Jobs, lab: Lab, start: str):
    undisturbed = done(getattr(jobs, start)("calm"))
    job = asked(jobs, lab, start, "INT", train__updates=10, checkpoint__every_updates=1)
    assert job.leader.code == 130, job.leader.text
    again: Job = getattr(jobs, start)("asked", resumed=job)
    assert done(again) == undisturbed


@pytest.mark.slow
def test_a_second_request_ends_everything_at_once(jobs: Jobs, lab: Lab):
    job = jobs.over_ssh("twice", **ENDLESSLY).reach(3)
    for process in [lab.rank_on(node) for node in ("node1", "node2", "node3")]:
        lab.kill(process, "STOP")  # so that none can save
    starter = job.starter("node1")
    lab.kill(starter, "INT")
    lab.kill(starter, "INT")
    job.finish(timeout_s=ENDING_S)
    assert job.leader.code == 130, job.leader.text
    assert "ended before the state was saved" in job.leader.text
    assert lab.left(within_s=10.0) == []


@pytest.mark.slow
@pytest.mark.parametrize("start", STARTS)
def test_a_starter_that_is_killed_takes_all_hosts_along(jobs: Jobs, lab: Lab, start: str):
    job: Job = getattr(jobs, start)("orphaned", **ENDLESSLY)
    job.reach(3)
    lab.kill(job.starter("node1"), "KILL")
    assert lab.left(within_s=10.0) == []
