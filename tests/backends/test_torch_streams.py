"""Split arrays are saved one by one: what is alive at once, what a disk that is full and a killed rank leave."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from mtrain.core.checkpoint import store
from mtrain.core.checkpoint.store import Checkpoints
from tests.backends.processes import ROOT

pytestmark = pytest.mark.job


def ranks(mode: str, folder: Path, *, size: int = 2) -> list[tuple[int, str]]:
    """Run the ranks; return exit code and output of each."""
    started = [
        subprocess.Popen(
            [
                sys.executable,
                "-W",
                "error",
                "-m",
                "tests.backends.stream_ranks",
                mode,
                str(folder / f"meeting-{mode}"),
                str(rank),
                str(size),
                str(folder),
            ],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    results = [rank.communicate(timeout=120) for rank in started]
    killed = mode.startswith("kill")
    assert killed or [rank.returncode for rank in started] == [0] * size, "\n".join(errors for _, errors in results)
    return [(rank.returncode, output) for rank, (output, _) in zip(started, results, strict=True)]


BOTH = pytest.mark.parametrize("how", ["", "sent-"], ids=["written", "sent"])
"""Ranks write their own parts, or send them to rank 0."""


@BOTH
def test_one_whole_array_is_alive_at_a_time_on_one_rank(tmp_path: Path, how: str) -> None:
    """The largest number of bytes that numpy has given out at once, in a save and a digest, live and copied."""
    largest, bucket = 12_000_000, 1 << 20
    for rank, (_, output) in enumerate(ranks(f"{how}counts", tmp_path, size=3)):
        peaks = [int(line.split()[1]) for line in output.splitlines() if line.startswith("peak")]
        print(f"rank {rank}: {peaks} bytes")
        assert len(peaks) == 2
        # The array before is dropped when the next one has come.
        assert max(peaks) <= (2 * largest + 3 * bucket if rank == 0 else bucket)


@BOTH
def test_a_copied_state_is_saved_while_training_goes_on(tmp_path: Path, how: str) -> None:
    ranks(f"{how}background", tmp_path)


@BOTH
def test_a_full_disk_leaves_the_other_ranks_in_step(tmp_path: Path, how: str) -> None:
    (_, first), (_, second) = ranks(f"{how}full", tmp_path)
    assert "checkpoint step-00000002 could not be written" in first
    assert "the last good one is" in first
    assert second == ""
    assert [path.name for path in store.list_all(tmp_path)] == ["step-00000001", "step-00000003"]
    assert [store.verify(path) for path in store.list_all(tmp_path)] == [[], []]


PHASES = [
    "0:copy:0",
    "1:copy:0",
    "0:header:0",
    "0:header:2",
    "0:transfer:0",
    "0:transfer:4",
    "1:transfer:5",
    "0:flush:1",
    "0:flush:3",
]
PHASES += ["0:publish:0", "0:rename:0", "0:publish:1"]


@pytest.mark.smoke
@pytest.mark.parametrize(
    "phase", [p if p == "1:transfer:5" else pytest.param(p, marks=pytest.mark.slow) for p in PHASES]
)
def test_a_rank_killed_in_any_phase_of_a_save_leaves_an_intact_checkpoint(tmp_path: Path, phase: str) -> None:
    results = ranks(f"killed:{phase}", tmp_path)
    assert results[int(phase[0])][0] == -signal.SIGKILL
    newest = store.newest(tmp_path)
    assert newest is not None
    assert newest.name == ("step-00000002" if phase == "0:publish:1" else "step-00000001")
    checkpoints = Checkpoints(tmp_path, keep_last=2, keep_best=0, asynchronous=False)
    assert checkpoints.newest() == newest
    assert not list(tmp_path.glob(".tmp-*")), "what the dead writer left is gone"
