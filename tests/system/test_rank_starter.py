"""Ranks that mtrain starts itself: the one that fails is recorded, and none outlives it."""

import os
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest

from mtrain.errors import LaunchError
from mtrain.system.rank_starter import Ranks, read_deaths, status_for_shell

pytestmark = pytest.mark.smoke

STUBBORN = "import signal, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(600)"


def started(ranks: Ranks, rank: int, program: str) -> None:
    ranks.start(rank, [sys.executable, "-c", program], {"RANK": str(rank)})


@pytest.mark.job
def test_the_rank_that_fails_is_recorded_and_not_those_that_are_killed_for_it(
    capfd: pytest.CaptureFixture[str],
) -> None:
    ranks = Ranks(failure_grace_s=0.1, request_grace_s=600.0)
    started(ranks, 3, "import os; os._exit(7 if os.environ['RANK'] == '3' else 0)")
    started(ranks, 4, STUBBORN)
    assert ranks.wait() == [(3, 7)]
    assert read_deaths("of a rank\n" + capfd.readouterr().err) == [(3, 7)]
    assert not [each for each in psutil.Process().children() if "SIG_IGN" in " ".join(each.cmdline())]


@pytest.mark.job
def test_ranks_that_all_end_well_leave_no_record(capfd: pytest.CaptureFixture[str]) -> None:
    ranks = Ranks(failure_grace_s=0.1, request_grace_s=600.0)
    for rank in range(2):
        started(ranks, rank, "pass")
    assert ranks.wait() == []
    assert read_deaths(capfd.readouterr().err) == []


@pytest.mark.job
def test_a_rank_that_a_request_has_ended_leaves_the_others_their_time_to_save(tmp_path: Path) -> None:
    """The second one needs longer than ranks have after a failure."""
    saving = "import signal, sys, time, pathlib\n"
    saving += "def save(*_):\n    time.sleep(1.0); pathlib.Path(sys.argv[1]).touch(); sys.exit(143)\n"
    saving += "signal.signal(signal.SIGTERM, save); pathlib.Path(sys.argv[2]).touch(); time.sleep(600)"
    saved, ready = tmp_path / "saved", tmp_path / "ready"
    first = "import pathlib, sys, time\nwhile not pathlib.Path(sys.argv[1]).exists(): time.sleep(0.02)\nsys.exit(143)"
    ranks = Ranks(failure_grace_s=0.0, request_grace_s=600.0, saved=143)
    ranks.start(0, [sys.executable, "-c", first, str(ready)], {})
    ranks.start(1, [sys.executable, "-c", saving, str(saved), str(ready)], {})
    assert ranks.wait() == [(0, 143)]
    assert saved.exists()


@pytest.mark.job
def test_a_program_that_is_not_there_starts_nothing() -> None:
    ranks = Ranks(failure_grace_s=0.1, request_grace_s=600.0)
    started(ranks, 0, STUBBORN)
    with pytest.raises(LaunchError, match="/nowhere/python cannot be started: No such file"):
        ranks.start(1, ["/nowhere/python"], {})
    assert ranks.wait() == [(0, -signal.SIGKILL)]


def test_a_signal_is_a_status_of_a_shell() -> None:
    assert [status_for_shell(status) for status in (0, 3, -9)] == [0, 3, 137]


@pytest.mark.job
def test_a_starter_passes_on_the_very_signal_once_and_waits_for_the_slower_rank(tmp_path: Path) -> None:
    """The first rank ends with an error at once; the other one is still saving, and no second signal disturbs it."""
    program = "import pathlib, signal, sys, time\nheard = []\n"
    program += "for name in ('SIGINT', 'SIGTERM'):\n    signal.signal(getattr(signal, name), lambda number, _: heard.append(number))\n"
    program += "pathlib.Path(sys.argv[1] + '.ready').touch()\nwhile not heard:\n    time.sleep(0.02)\n"
    program += "time.sleep(float(sys.argv[2])); pathlib.Path(sys.argv[1]).write_text(str(heard)); sys.exit(7)"
    ranks = Ranks(failure_grace_s=600.0, request_grace_s=600.0)
    with ranks.handling_signals():
        for rank, pause in enumerate(("0", "1.0")):
            ranks.start(rank, [sys.executable, "-c", program, str(tmp_path / str(rank)), pause], {})
        while not all((tmp_path / f"{rank}.ready").exists() for rank in range(2)):
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)
        assert ranks.wait() == [(0, 7)]
    assert [(tmp_path / str(rank)).read_text() for rank in range(2)] == ["[2]", "[2]"]
