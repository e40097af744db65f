"""Elastic jobs on real hosts: some are lost, come back or are added, and nobody can tell from the weights."""

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from mtrain.jobs.hosts.host_log import HostLog
from tests.cluster.jobs import Job, Jobs
from tests.cluster.lab import Lab, address, wait_for

PORT = 9400
ELASTIC = ["--nnodes", "1:3", "--failure-timeout-s", "12"]
SLOWLY = {"train__updates": 24, "train__precision": "fp64", "cluster__rejoin_s": 1}


def arrays(folder: Path) -> dict[str, np.ndarray[Any, Any]]:
    """The arrays of the newest checkpoint of a run: weights, buffers, averages and moments."""
    newest = max(folder.joinpath("checkpoints").glob("step-*"))
    return {f"{file.stem}/{name}": x for file in newest.glob("*.safetensors") for name, x in load_file(file).items()}


def difference(one: Mapping[str, Any], other: Mapping[str, Any]) -> float:
    """Largest difference of any array, relative to the largest value of that array."""
    assert one.keys() == other.keys()
    return max(
        float(
            np.abs(np.float64(x) - np.float64(other[name])).max(initial=0.0)
            / max(np.abs(np.float64(x)).max(initial=0.0), 1e-30)
        )
        for name, x in one.items()
    )


def losses(job: Job) -> dict[int, list[str]]:
    """What was reported for each update, once for each time that it was made."""
    made: dict[int, list[str]] = {}
    for line in job.read("metrics.jsonl").splitlines():
        row = json.loads(line)
        if row["kind"] == "update":
            made.setdefault(row["update"], []).append(json.dumps(row["losses"], sort_keys=True))
    return made


def strike(lab: Lab, job: Job, what: Callable[[], object], *, hosts: int) -> None:
    """Do something to the hosts, wait until the job runs on ``hosts``, and let it make two updates there."""
    sentence = f"on {hosts} of its hosts"
    before, made = job.leader.text.count(sentence), max(job.updates())
    what()

    def started() -> bool:
        if job.leader.process.poll() is not None:
            raise AssertionError(f"ended before it was {sentence}:\n{job.leader.text}")
        return job.leader.text.count(sentence) > before

    wait_for(started, timeout_s=240, what=sentence)
    wait_for(lambda: max(job.updates()) > made + 1, timeout_s=240, what="two more updates")


def test_lost_hosts_come_back_and_nobody_can_tell_from_the_weights(jobs: Jobs, lab: Lab):
    watched = {"report__metrics_port": PORT, "report__metrics_address": "host"}
    job = jobs.over_ssh("elastic", more=ELASTIC, model__name="slow_yolov5", **SLOWLY, **watched).reach(2)
    strike(lab, job, lambda: lab.power("node3", "halt"), hosts=2)
    strike(lab, job, lambda: lab.up(4), hosts=3)
    tells_of_hosts(job, lab)
    same_as_undisturbed(jobs, job, model__name="yolov5n", **SLOWLY)


def tells_of_hosts(job: Job, lab: Lab) -> None:
    """A host that came back tells Prometheus of both changes, and the run folder names who was lost."""
    url = f"http://{address('node3')}:{PORT}/metrics"
    told = lab.run(
        "node4", [sys.executable, "-c", f"import urllib.request as r; print(r.urlopen({url!r}).read().decode())"]
    )
    assert f'mtrain_restarts_total{{run="{job.name}"}} 2.0' in told
    assert f'mtrain_hosts{{run="{job.name}"}} 3.0' in told
    known = HostLog(job.folder).read()
    assert (len(known["hosts"]), known["restarts"]) == (3, 2)
    assert [loss["lost"].split()[0] for loss in known["lost"]] == [address("node3")]


def same_as_undisturbed(jobs: Jobs, job: Job, *, tolerance: float = 0.0, **values: object) -> None:
    """The job ends with the arrays, the losses and the updates of one on a single host."""
    output = job.finish(timeout_s=1200)
    assert output.code == 0, output.text
    calm = jobs.on_one("calm", **values)
    assert calm.finish(timeout_s=1200).code == 0, calm.leader.text
    worst, (made, expected) = difference(arrays(calm.folder), arrays(job.folder)), (losses(job), losses(calm))
    print(f"largest difference {worst:.1e}; updates made again: {sum(map(len, made.values())) - len(made)}")
    assert worst <= tolerance
    assert sorted(made) == sorted(expected) == list(range(len(expected)))
    if not tolerance:
        assert all(each == expected[update][0] for update, again in made.items() for each in again)


# In passes, sums have another order. Thirty hard updates enlarge that to what another number of threads does to this job.
EVENTS = {
    "ddp": {"model__name": "slow_yolov5"},
    "ddp, synchronised": {"model__name": "slow_yolov5", "train__sync_batchnorm": True},
    "ddp, PP-YOLOE": {"model__name": "slow_ppyoloe"},
    "ddp, ViT": {"model__name": "slow_vit", "spec": "vit.yml"},
    "horovod": {"model__name": "slow_yolov5", "backend": "horovod"},
    "zero1": {"model__name": "slow_yolov5", "backend": "deepspeed", "backend__options": "{stage: 1}"},
    "zero3": {"model__name": "slow_yolov5", "backend": "deepspeed", "backend__options": "{stage: 3}"},
    "fleet": {"model__name": "slow_yolov5", "backend": "fleet", "cluster__shards": 6},
    "passes": {"model__name": "slow_yolov5", "cluster__sharing": "passes"},
}
HARD = {"train__updates": 30, "train__precision": "fp64", "train__batch_size": 12, "train__accumulate": 2}


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("case", EVENTS)
def test_three_two_three_one_three_hosts_end_where_the_undisturbed_job_ends(jobs: Jobs, lab: Lab, case: str):
    values = {**HARD, **EVENTS[case]}
    chosen = ["-c", str(values.pop("spec"))] if "spec" in values else []
    job = jobs.over_ssh("events", more=[*ELASTIC, *chosen], cluster__rejoin_s=1, **values).reach(2)
    strike(lab, job, lambda: lab.power("node3", "off"), hosts=2)
    strike(lab, job, lambda: lab.up(4), hosts=3)

    def both() -> None:
        lab.power("node2", "halt")
        lab.power("node3", "halt")

    strike(lab, job, both, hosts=1)
    strike(lab, job, lambda: lab.up(4), hosts=3)
    ranks = int(str(values.get("cluster__shards", 3)))
    values["model__name"] = str(values["model__name"]).replace("slow_yolov5", "yolov5n")
    same_as_undisturbed(
        jobs, job, more=chosen, ranks=ranks, tolerance=1e-3 if case == "passes" else 0.0,
        **{key: value for key, value in values.items() if key != "cluster__sharing"},
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_typed_on_each_host_one_may_come_late_and_one_may_leave_and_come_back(jobs: Jobs, lab: Lab):
    longer = {**SLOWLY, "train__updates": 80}
    values = {"model__name": "slow_yolov5", "cluster__join_timeout_s": 20, **longer}
    job = jobs.by_hand("hands", nodes=("node1", "node2"), more=ELASTIC, **values).reach(2)
    assert "the job begins without a host" in job.leader.text
    strike(lab, job, lambda: job.outputs.append(jobs.start_again(job, "node3", more=ELASTIC, **values)), hosts=3)
    strike(lab, job, lambda: lab.kill(job.starter("node2"), "TERM"), hosts=2)
    job.outputs[1].finish(timeout_s=60)
    strike(lab, job, lambda: job.outputs.append(jobs.start_again(job, "node2", more=ELASTIC, **values)), hosts=3)
    same_as_undisturbed(jobs, job, model__name="yolov5n", **longer)
    second, third, again = (output.finish(timeout_s=60) for output in job.outputs[1:])
    assert again.code == 0, again.text
    assert "this host takes part as soon as" in again.text
    assert second.code == 143, second.text
    assert "left the job, which goes on without it" in second.text
    assert third.code == 0, third.text


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_shared_run_folder_lets_another_host_have_rank_0_and_a_private_one_does_not(
    jobs: Jobs, lab: Lab, private: Path
):
    shared = jobs.over_ssh("shared", at="node4", more=ELASTIC, model__name="slow_yolov5", **SLOWLY).reach(2)
    strike(lab, shared, lambda: lab.power("node1", "halt"), hosts=2)
    lab.up(4)
    same_as_undisturbed(jobs, shared, model__name="yolov5n", **SLOWLY)
    alone = jobs.over_ssh("alone", at="node4", runs=private, more=ELASTIC, model__name="slow_yolov5", **SLOWLY).reach(2)
    lab.power("node1", "halt")
    assert alone.leader.finish(timeout_s=240).code == 1
    assert "is on none of the 2 hosts" in alone.leader.text
    assert "--resume" in alone.leader.last[0]
