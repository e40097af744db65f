"""A sweep whose trials are jobs over several hosts, reached with ssh; killed, and resumed."""

import json
import signal
import sys

import pytest
import yaml

from mtrain_sweep.results import SweepResult
from tests.cluster.jobs import FIRST
from tests.cluster.lab import Lab, wait_for


def swept(lab: Lab, *words: str) -> "tuple[int, str]":
    process = lab.start(FIRST, [sys.executable, "-m", "mtrain", "sweep", *words])
    output, _ = process.communicate(timeout=600)
    return process.returncode, output


@pytest.mark.slow
def test_trials_are_jobs_over_two_hosts_and_a_killed_sweep_goes_on(lab: Lab) -> None:
    import mtrain

    folder = lab.share / "sweep"
    (lab.share / "space.yml").write_text(
        yaml.safe_dump({"optimizer.learning_rate": {"low": 0.001, "high": 0.01, "log": True}})
    )
    words = ("--space", "space.yml", "--trials", "2", "--sampler", "random", "--ips", lab.ips(2), "--cluster", "ssh",
             "--nproc-per-node", "1", "-o", "evaluate.every_updates=5", "--out", str(folder))  # fmt: skip
    killed = lab.start(FIRST, [sys.executable, "-m", "mtrain", "sweep", *words])
    records = folder / "trials" / "0001" / "metrics.jsonl"
    wait_for(lambda: killed.poll() is not None or records.exists(), timeout_s=300, what="the second trial")
    assert killed.poll() is None, killed.communicate()[0]
    (starter,) = [p for p in lab.processes(FIRST) if p.module == "mtrain" and "sweep" in p.words]
    lab.kill(starter, signal.SIGKILL.name.removeprefix("SIG"))
    killed.communicate()
    code, output = swept(lab, "--resume", "--out", str(folder))
    assert code == 0, output
    result: SweepResult = mtrain.open_sweep(folder)
    assert [trial.state for trial in result.trials] == ["done", "done"]
    for trial in result.trials:
        summary = json.loads((trial.run_dir / "summary.json").read_text())
        assert (summary["reason"], summary["ranks"], summary["updates"]) == ("done", 2, 10)
