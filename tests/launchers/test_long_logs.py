"""The output of ranks that print without end: the beginning and the end of each log stay, whatever writes to it."""

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = pytest.mark.job

LIMIT_BYTES = 1 << 20
LINE = re.compile(r"line (\d{9})")
LEFT_OUT = re.compile(r"^\[mtrain: (\d+) bytes were left out here", re.MULTILINE)


def through(ranks: int, name: str, library: str, *more):
    missing = pytest.mark.skipif(find_spec(library) is None, reason=f"{library} is not installed")
    return pytest.param(ranks, name, marks=[missing, *more], id=f"{name}-{ranks}")


JOBS = [
    through(1, "torchrun", "torch"),
    through(2, "torchrun", "torch"),
    through(2, "horovodrun", "horovod"),
    through(2, "fleetrun", "paddle"),
    through(2, "deepspeed", "deepspeed", pytest.mark.slow),
]


def used_bytes(path: Path) -> int:
    return path.stat().st_blocks * 512


def numbers(text: str) -> list[int]:
    """Return the numbers of all whole lines, of which there are some."""
    found = [int(match[1]) for line in text.splitlines() if (match := LINE.fullmatch(line))]
    assert found, text[-300:]
    return found


def is_unbroken(found: list[int]) -> bool:
    return found == list(range(found[0], found[-1] + 1))


@pytest.mark.parametrize(("ranks", "name"), JOBS)
def test_logs_of_ranks_that_print_too_much_keep_their_beginning_and_the_last_words(
    run_behaviour, tmp_path, ranks, name
):
    result = run_behaviour("print_too_much_and_die", ranks=ranks, launcher_name=name, log_bytes=LIMIT_BYTES)

    assert result.code == 1
    assert "the last words of rank" in result.told.getvalue(), "what a killed rank printed last is quoted"
    for log in (tmp_path / "logs").rglob("*log*"):
        assert log.is_dir() or used_bytes(log) <= LIMIT_BYTES + 4096, log
    texts = [log.read_text() for log in (tmp_path / "logs").glob("rank-*.log")]
    assert len(texts) == ranks
    ending = [text for text in texts if re.search(r"the last words of rank \d\n$", text)]
    assert ending, "that of the rank which was killed; the other may have been ended before it was"
    for text in ending:
        assert text.startswith("line 000000000\n")
        before, marks, after = text.partition("\n[mtrain: ")
        begun, ended = numbers(before), numbers(after)
        assert marks
        assert is_unbroken(begun), "nothing is missing before the cut"
        assert is_unbroken(ended), "nor after it"
        (left_out,) = LEFT_OUT.findall(text)
        missing = ended[0] - begun[-1] - 1
        assert abs(int(left_out) - 15 * missing) < 300, (
            "the mark says how much is missing, but for two lines and its own length"
        )


def test_what_an_attempt_printed_is_found_though_the_output_of_the_one_before_it_was_left_out(run_behaviour):
    result = run_behaviour("print_too_much_the_second_time", max_restarts=1, log_bytes=LIMIT_BYTES)
    assert "rank 0 ended with exit code 3\nstarting again" in result.shown.getvalue()
    assert "  the last words of rank 0\nerror: rank 0 was ended by signal 9" in result.told.getvalue()


@pytest.mark.parametrize(("limit", "kept"), [("1", LIMIT_BYTES), ("null", 10_000_000)])
def test_a_job_of_a_script_takes_the_limit_from_its_spec(tmp_path, limit, kept):
    (tmp_path / "talks.py").write_text(
        'for number in range(1000):\n    print(f"{number:09d}", 9989 * "x")\nprint("the end")\n'
    )
    words = [
        "run",
        "--backend",
        "solo",
        "--devices",
        "cpu",
        "--name",
        "talks",
        "-o",
        f"report.log_mb={limit}",
        "talks.py",
    ]
    subprocess.run([sys.executable, "-m", "mtrain", *words], cwd=tmp_path, check=True, capture_output=True, timeout=120)
    log = tmp_path / "runs" / "talks" / "logs" / "rank-0.log"
    assert log.read_text().startswith("000000000 xxx")
    assert log.read_text().endswith("xxx\nthe end\n")
    assert kept // 2 <= 512 * log.stat().st_blocks <= kept + 4096  # a file with a hole is as long as before
