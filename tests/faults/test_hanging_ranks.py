"""Ranks that hang in a collective after SIGTERM are ended, and the words say what was saved."""

import json
import signal
import time

import pytest

from tests.faults.conftest import Runner, family, ranks_of, survivors

LONG = ["-o", "train.updates=100000", "-o", "cluster.grace_s=3"]
FAR_MORE_S = 60.0
"""Of a job that would hang for as long as the library's own timeout, which is half an hour."""


def rows(runner: Runner, kind: str) -> list[dict]:
    lines = (runner.run_folder("hangs") / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if row["kind"] == kind]


@pytest.mark.parametrize(
    "more", [pytest.param(1, id="one rank stopped"), pytest.param(0, id="the other", marks=pytest.mark.slow)]
)
def test_a_job_whose_rank_hangs_ends_soon_after_sigterm_and_names_its_newest_checkpoint(runner, more):
    process = runner.start([*runner.arguments(name="hangs"), *LONG, "-o", "checkpoint.every_updates=2"])
    runner.wait_for_update("hangs", 5, process)
    everybody = family(process)
    ranks_of(process)[more].send_signal(signal.SIGSTOP)
    time.sleep(1.0)  # until the other rank waits for it
    process.send_signal(signal.SIGTERM)
    code, output = runner.finish(process, timeout_s=FAR_MORE_S)
    assert code == 143, output
    newest = max((runner.run_folder("hangs") / "checkpoints").glob("step-*")).name
    assert "ranks still run 3 s after SIGTERM (cluster.grace_s): they are ended" in output
    last = output.strip().splitlines()[-1]
    assert last == (
        "ended before the state was saved: ranks still ran 3 s after SIGTERM, and were ended (cluster.grace_s); "
        f"go on from {newest} with --resume {runner.run_folder('hangs')}"
    )
    assert survivors(everybody) == []
    assert [row["why"] for row in rows(runner, "checkpoint") if row["why"] == "ending"] == []


def test_after_sigterm_the_state_comes_first_and_nothing_is_drawn(runner):
    """With the default configuration of reports: images, and TensorBoard's events."""
    arguments = [*runner.arguments(name="hangs"), *LONG, "-o", "evaluate.every_epochs=1"]
    arguments += ["-o", "report.plots=true", "-o", "report.tensorboard=true"]
    process = runner.start(arguments)
    runner.wait_for_update("hangs", 5, process)
    process.send_signal(signal.SIGTERM)
    code, output = runner.finish(process, timeout_s=FAR_MORE_S)
    assert code == 143, output
    kinds = [
        (row["kind"], row.get("why"))
        for row in map(json.loads, (runner.run_folder("hangs") / "metrics.jsonl").read_text().splitlines())
    ]
    assert kinds[-2:] == [("checkpoint", "ending"), ("end", None)], "no work after the last save"
    left_out = runner.summary("hangs")["left_out"]
    assert [name for name in left_out if name != "evaluation"] == ["results.png", "val_batch.jpg"]
    assert f"left out: {', '.join(left_out)}" in output.strip().splitlines()[-1]
    assert not any(
        (runner.run_folder("hangs") / name).exists()
        for name in ("results.png", "val_batch.jpg", "details.json", "report.html")
    )
