"""Jobs whose metrics are read one update later (as on GPUs; asked for here) end, save, resume and learn as others do."""

import signal
from typing import Any

import pytest

from tests.faults.conftest import UPDATES, Runner

LATE = ["-o", "backend.options.late_figures=true"]
TIMES = (
    "update_seconds",
    "communication_s",
    "samples_per_second",
    "data_wait_share",
    "memory_bytes",
    "time",
    "at",
    "t",
)


@pytest.fixture(scope="module")
def prompt(tmp_path_factory: Any, digits: Any) -> dict[str, Any]:
    runner = Runner(tmp_path_factory.mktemp("prompt"), digits)
    code, output = runner.run(runner.arguments(name="prompt"))
    assert code == 0, output
    return {"summary": runner.summary("prompt"), "updates": runner.updates("prompt")}


def told(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Records without what depends on time."""
    return [{key: value for key, value in row.items() if key not in TIMES} for row in rows]


@pytest.mark.parametrize("number", [None, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_two_late_ranks_learn_and_record_what_prompt_ones_do_also_when_asked_to_end(
    runner: Runner, prompt: dict[str, Any], number: signal.Signals | None
) -> None:
    arguments = [*runner.arguments(name="late"), *LATE, "-o", "checkpoint.every_updates=4"]
    if number is not None:
        process = runner.start(arguments)
        runner.wait_for_update("late", 1, process)
        process.send_signal(number)
        code, output = runner.finish(process)
        assert code == 128 + number, output
        arguments += ["--resume", str(runner.run_folder("late"))]
    code, output = runner.run(arguments)
    assert code == 0, output
    actual = runner.summary("late")
    assert actual["updates"] == UPDATES
    assert actual["weights_sha256"] == prompt["summary"]["weights_sha256"]
    assert actual["ema_sha256"] == prompt["summary"]["ema_sha256"]
    assert told(runner.updates("late")) == told(prompt["updates"])


def test_a_late_job_that_explodes_ends_with_one_clear_error(runner: Runner) -> None:
    values = ["optimizer.rule=sgd", "optimizer.learning_rate=1e30", "schedule.warmup=null", "train.clip_norm=null"]
    arguments = [*runner.arguments(name="exploding", backend="solo", ranks=1), *LATE, "-o", *values]
    code, output = runner.run([*arguments, "train.max_nonfinite=3", "checkpoint.every_updates=100"])
    assert code == 1, output
    assert "not finite in 3 updates in a row" in output
    assert "Traceback" not in output
    assert max(row["skipped_updates"] for row in runner.updates("exploding")) == 2
