"""Behaviour common to the native starters that tests/launchers/test_starter.py does not use: failures, requests, a
killed job."""

import contextlib
import os
import signal
import subprocess
from importlib.util import find_spec
from typing import Any

import psutil
import pytest

pytestmark = pytest.mark.job


def _through(name: str, library: str, *more: Any) -> Any:
    missing = pytest.mark.skipif(find_spec(library) is None, reason=f"{library} is not installed")
    return pytest.param(name, marks=[missing, *more])


EVERY = [
    pytest.param("torchrun"),
    _through("fleetrun", "paddle", pytest.mark.slow),
    _through("horovodrun", "horovod", pytest.mark.slow),
    _through("deepspeed", "deepspeed", pytest.mark.slow),
]
QUICK = [_through("fleetrun", "paddle"), _through("deepspeed", "deepspeed")]
ALL = [_through("fleetrun", "paddle"), _through("deepspeed", "deepspeed", pytest.mark.slow)]
"""Ranks are there some seconds later under DeepSpeed's launcher."""


@pytest.mark.parametrize("name", QUICK)
def test_the_first_failing_rank_is_told_last_and_a_rank_that_hangs_is_ended(run_behaviour, name):
    result = run_behaviour("rank_1_raises_and_0_hangs", ranks=2, launcher_name=name)
    assert result.code == 1
    message = result.told.getvalue()
    assert message.startswith("rank 1 on ")
    assert message.rstrip().endswith("ValueError: the seventh image is upside down")


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["Ctrl-C", "SIGTERM"])
def test_a_request_to_end_lets_every_rank_save(starter, tmp_path, alive_ranks, name, number, code):
    process = starter("save_when_asked", ranks=2, launcher_name=name)
    process.send_signal(number)
    shown, message = process.communicate(timeout=60)
    assert process.returncode == code, message
    assert "saving and ending" in shown
    assert "state saved; go on with --resume" in message
    assert all((tmp_path / f"saved-{rank}").exists() for rank in range(2))
    assert alive_ranks() == []


def native(process: "subprocess.Popen[str]", name: str) -> list[psutil.Process]:
    """Processes of the library's own starter below ``process``, the outermost first."""
    modules = {
        "torchrun": ["mtrain.backends._torch.ranks.starter"],
        "fleetrun": ["mtrain.backends.paddle_launch"],
        "horovodrun": ["mtrain.backends._horovod.single_host_starter"],
        "deepspeed": ["deepspeed.launcher.launch"],  # the inner one of two; the outer says then that all went well
    }[name]
    actual = psutil.Process(process.pid).children(recursive=True)
    return [
        child for child in actual if child.cmdline()[1:2] in (["-m"], ["-u"]) and set(modules) & set(child.cmdline())
    ]


@pytest.mark.parametrize("name", EVERY)
def test_a_native_starter_that_is_killed_is_a_failure_though_its_ranks_have_saved(starter, tmp_path, alive_ranks, name):
    """Exit code 143 would tell a scheduler that the job was preempted."""
    process = starter("save_when_asked", ranks=2, launcher_name=name)
    os.kill(native(process, name)[0].pid, signal.SIGKILL)
    _, message = process.communicate(timeout=60)
    assert process.returncode == 1, message
    assert "error: the starter of the ranks was ended by signal 9 (SIGKILL)" in message
    assert f"the ranks have saved their state; go on with --resume {tmp_path}" in message
    assert all((tmp_path / f"saved-{rank}").exists() for rank in range(2))
    assert alive_ranks() == []


def signal_all(processes: list[psutil.Process], number: int) -> None:
    """Signal processes one after the other; the first signals may already have ended some of the others."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)


@pytest.mark.parametrize("name", EVERY)
def test_sigterm_to_every_process_of_a_job_is_one_request(starter, tmp_path, alive_ranks, name):
    """A scheduler may signal everything that runs in its allocation, native starters included."""
    process = starter("save_when_asked", ranks=2, launcher_name=name)
    signal_all([psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)], signal.SIGTERM)
    _, message = process.communicate(timeout=60)
    assert process.returncode == 143, message
    assert f"state saved; go on with --resume {tmp_path}" in message
    assert all((tmp_path / f"saved-{rank}").exists() for rank in range(2))
    assert alive_ranks() == []


@pytest.mark.slow
@pytest.mark.parametrize("name", EVERY)
def test_a_cancelled_job_step_gives_every_rank_the_time_to_save(starter, tmp_path, alive_ranks, name):
    """Slurm's scancel sends SIGCONT and SIGTERM to all processes of a step at once: ranks, their shells and starters."""
    process = starter("save_for_seven_seconds_when_asked", ranks=2, launcher_name=name)
    everybody = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    for number in (signal.SIGCONT, signal.SIGTERM):
        signal_all(everybody, number)
    _, message = process.communicate(timeout=60)
    assert process.returncode == 143, message
    assert all((tmp_path / f"saved-{rank}").exists() for rank in range(2)), message
    assert f"state saved; go on with --resume {tmp_path}" in message
    assert alive_ranks() == []


@pytest.mark.parametrize("name", ALL)
def test_a_starter_that_is_killed_takes_its_ranks_along(starter, tmp_path, alive_ranks, wait_for, name):
    process = starter("save_when_asked", ranks=2, launcher_name=name)
    process.kill()
    wait_for(lambda: alive_ranks() == [], timeout_s=60)
    assert all((tmp_path / f"saved-{rank}").exists() for rank in range(2))
