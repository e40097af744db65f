"""An elastic job whose host is lost within a save goes on from the last whole checkpoint to the undisturbed bits."""

import json
from pathlib import Path

import pytest

from tests.cluster.jobs import Job, Jobs
from tests.cluster.lab import Lab, wait_for
from tests.faults.test_kills_in_saves import SPEC

SAVING = Path(__file__).parents[1] / "faults" / "saving.py"
OF_PARTS, OF_WHOLE = "1 0 gathering", "0 0 an array"
"""Deaths in a save: of a rank that sends its parts, and of the one that writes."""
ZERO = {"backend__options__config__zero_optimization__stage3_param_persistence_threshold": 0}
LAYOUTS = {
    "ddp": ("ddp", {}),
    "fsdp": ("fsdp", {}),
    **{f"zero{stage}": ("deepspeed", {"backend__options__stage": stage, **ZERO}) for stage in (1, 2, 3)},
}
CASES = [("ddp", OF_WHOLE), *((name, OF_PARTS) for name in LAYOUTS if name != "ddp"), ("fsdp", OF_WHOLE)]


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, dict[str, str]]:
    """What jobs without a fault have trained, by layout."""
    return {}


def start(jobs: Jobs, name: str, layout: str, *, asynchronous: bool, hosts: bool) -> Job:
    """A job of two ranks, on a host each or on one; on hosts it goes on without one of them, led from a host that has no rank."""
    share = jobs.lab.share
    (share / "saving.py").write_text(SAVING.read_text())
    (share / "saving.yml").write_text(SPEC)
    backend, options = LAYOUTS[layout]
    more = ["-c", "saving.yml", "--devices", "cpu"]
    values = {
        **options,
        "checkpoint__asynchronous": str(asynchronous).lower(),
        "report__plots": "false",
        "report__tensorboard": "false",
    }
    if not hosts:
        return jobs.on_one(name, ranks=2, backend=backend, more=more, **values)
    more += ["--nnodes", "1:2", "--failure-timeout-s", "12"]
    values |= {"cluster__rejoin_s": 0, "cluster__forward_env": "[DEATHS]"}
    return jobs.over_ssh(name, at="node4", backend=backend, ips=jobs.lab.ips(2), more=more, **values)


def results(job: Job) -> dict[str, str]:
    assert job.finish(timeout_s=600).code == 0, job.leader.text
    return {name: job.summary()[name] for name in ("weights_sha256", "ema_sha256")}


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("asynchronous", [True, False], ids=["background", "foreground"])
@pytest.mark.parametrize(("layout", "death"), CASES)
def test_a_host_that_is_lost_in_a_save_costs_the_updates_since_the_save_before(
    jobs: Jobs, lab: Lab, undisturbed, monkeypatch, layout: str, death: str, asynchronous: bool
):
    if layout not in undisturbed:
        undisturbed[layout] = results(start(jobs, "calm", layout, asynchronous=asynchronous, hosts=False))
    deaths = lab.share / f"{layout}-{death[0]}-{asynchronous}" / "hosts"
    deaths.mkdir(parents=True)
    (deaths / "00").write_text(death)
    monkeypatch.setenv("DEATHS", str(deaths))
    job = start(jobs, "struck", layout, asynchronous=asynchronous, hosts=True)
    here = deaths / "00.here"
    wait_for(lambda: job.leader.process.poll() is not None or here.exists(), timeout_s=240, what="the save")
    assert here.exists(), job.leader.text
    lab.power(here.read_text(), "halt")
    assert results(job) == undisturbed[layout], job.leader.text
    assert "starting again from step-00000003 on 1 of its hosts" in job.leader.text
    rows = [json.loads(line) for line in job.read("metrics.jsonl").splitlines()]
    assert [row["update"] for row in rows if row["kind"] == "checkpoint"][-2:] == [6, 8]
