"""Whatever happens to ranks, their agent or the starter: one clear end, the right exit code, and no process left."""

import os
import signal
import threading

import psutil
import pytest

from mtrain.system.failures import read_failures
from mtrain.system.runfolder import RunFolder

pytestmark = pytest.mark.job


def test_a_job_that_ends_well_gives_0_and_says_nothing(run_behaviour):
    result = run_behaviour("succeed")
    assert (result.code, result.told.getvalue()) == (0, "")


@pytest.mark.smoke
def test_two_ranks_that_end_well_give_0(run_behaviour):
    assert run_behaviour("succeed", ranks=2).code == 0


def test_the_first_failing_rank_is_told_last_and_a_rank_that_hangs_is_ended(run_behaviour, tmp_path):
    result = run_behaviour("rank_1_raises_and_0_hangs", ranks=2)
    (failure,) = read_failures(RunFolder(tmp_path))
    assert failure["rank"] == 1
    assert "Unable to shutdown process" not in RunFolder(tmp_path).starter_log.read_text(), (
        "torchrun alone waits for 30 s"
    )
    assert result.code == 1
    message = result.told.getvalue()
    assert message.startswith("rank 1 on ")
    assert "logs/rank-1.log" in message
    assert message.rstrip().endswith("ValueError: the seventh image is upside down")


def test_a_killed_rank_is_the_cause_and_not_the_rank_that_noticed(run_behaviour, tmp_path, alive_ranks, wait_for):
    def kill_rank_1() -> None:
        wait_for((tmp_path / "ready-1").exists)
        rank_1 = [
            pid
            for pid in alive_ranks()
            if psutil.Process(pid).environ().get("RANK") == "1"
            and "mtrain.backends._torch.ranks.starter" not in " ".join(psutil.Process(pid).cmdline())
        ]
        os.kill(rank_1[0], signal.SIGKILL)
        (tmp_path / "go").touch()

    killer = threading.Thread(target=kill_rank_1)
    killer.start()
    result = run_behaviour("rank_1_is_killed_then_0_raises", ranks=2)
    killer.join()
    message = result.told.getvalue()
    assert result.code == 1
    assert "the last words of rank 1" in message
    assert "error: rank 1 was ended by signal 9 (SIGKILL)" in message
    assert "connection closed by peer" not in message


def test_a_crash_in_native_code_names_the_signal_and_shows_the_log(run_behaviour):
    result = run_behaviour("die_of_sigsegv")
    message = result.told.getvalue()
    assert result.code == 1
    assert "  about to crash\n" in message
    assert message.rstrip().endswith("error: rank 0 was ended by signal 11 (SIGSEGV): a crash in native code")


@pytest.mark.smoke
def test_an_expected_error_gives_its_own_exit_code_without_a_traceback_or_a_second_try(run_behaviour):
    result = run_behaviour("refuse", max_restarts=1)
    assert result.code == 2
    assert "starting again" not in result.shown.getvalue()
    assert result.told.getvalue().splitlines()[-1] == "error: train: 3 images cannot be read"
    assert "Traceback" not in result.told.getvalue()


def test_processes_that_outlive_their_rank_are_ended_even_in_sessions_of_their_own(run_behaviour, tmp_path):
    result = run_behaviour("leave_children_behind")
    assert result.code == 0
    children = [int(line) for line in (tmp_path / "children").read_text().split()]
    assert len(children) == 2
    assert not any(psutil.pid_exists(child) for child in children)


@pytest.mark.smoke
def test_a_failed_job_is_started_again_as_often_as_allowed(run_behaviour, tmp_path):
    result = run_behaviour("fail_the_first_time", max_restarts=1)
    assert result.code == 0
    assert "RuntimeError: a cosmic ray\nstarting again from the beginning" in result.shown.getvalue()
    assert len(list((tmp_path / "failures").glob("earlier-*"))) == 1


def test_the_second_attempt_is_judged_by_its_own_logs(run_behaviour):
    """The first one's rank dies with a traceback in the starter's log, the second's with a word in its own."""
    result = run_behaviour("fail_otherwise_the_second_time", max_restarts=1)
    assert result.code == 1
    assert "rank 0 ended with exit code 3\nstarting again" in result.shown.getvalue()
    message = result.told.getvalue()
    assert message.rstrip().endswith("error: rank 0 ended with exit code 4")
    assert "the second attempt" in message
    assert "the first attempt" not in message
    assert "Traceback" not in message


def test_a_job_that_may_not_restart_ends_with_its_error(run_behaviour):
    result = run_behaviour("fail_the_first_time")
    assert result.code == 1
    assert result.told.getvalue().rstrip().endswith("RuntimeError: a cosmic ray")


def test_stale_variables_of_the_shell_do_not_reach_a_rank(run_behaviour, tmp_path, monkeypatch):
    stale = (
        "PADDLE_TRAINER_ID",
        "HOROVOD_RANK",
        "OMPI_COMM_WORLD_RANK",
        "WORLD_SIZE",
        "MASTER_PORT",
        "TORCHELASTIC_RUN_ID",
    )
    for name in stale:
        monkeypatch.setenv(name, "7")
    monkeypatch.setenv("OMP_NUM_THREADS", "64")
    monkeypatch.setenv("KEPT", "yes")
    assert run_behaviour("show_environment").code == 0
    records = dict(
        line.split("=", 1) for line in (tmp_path / "environment.txt").read_text().splitlines() if "=" in line
    )
    assert not set(stale) & set(records)
    assert (records["KEPT"], records["OMP_NUM_THREADS"], records["OMP_WAIT_POLICY"]) == ("yes", "1", "PASSIVE")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["Ctrl-C", "SIGTERM"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_request_to_end_lets_every_rank_save(starter, tmp_path, alive_ranks, number, code, ranks):
    process = starter("save_when_asked", ranks=ranks)
    process.send_signal(number)
    shown, message = process.communicate(timeout=240)
    assert process.returncode == code, message
    assert "saving and ending" in shown
    assert "state saved; go on with --resume" in message
    assert all((tmp_path / f"saved-{rank}").exists() for rank in range(ranks))
    assert alive_ranks() == []


def test_a_second_ctrl_c_ends_ranks_that_do_not_listen(starter, tmp_path, alive_ranks, wait_for):
    process = starter("ignore_requests", ranks=2)
    process.send_signal(signal.SIGINT)
    wait_for(lambda: all((tmp_path / f"heard-{rank}").exists() for rank in range(2)))
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    _, message = process.communicate(timeout=240)
    assert process.returncode == 130
    assert "ended before the state was saved; there is no checkpoint" in message
    assert alive_ranks() == []


def test_an_agent_that_is_killed_leaves_no_ranks(starter, alive_ranks):
    process = starter("ignore_requests", ranks=2)
    agents = [
        child
        for child in psutil.Process(process.pid).children()
        if "mtrain.backends._torch.ranks.starter" in child.cmdline()
    ]
    agents[0].kill()
    _, message = process.communicate(timeout=240)
    assert process.returncode == 1
    assert "the starter of the ranks was ended by signal 9 (SIGKILL)" in message
    assert alive_ranks() == []


def test_a_starter_that_is_killed_takes_its_ranks_along(starter, tmp_path, alive_ranks, wait_for):
    process = starter("save_when_asked", ranks=2)
    process.kill()
    wait_for(lambda: alive_ranks() == [], timeout_s=30)
    assert all((tmp_path / f"saved-{rank}").exists() for rank in range(2))
