"""A rank that trains nothing but behaves, well or badly, as a rank may: started by the real launchers in these tests.

usage: ranks.py BEHAVIOUR --run-dir DIR
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from mtrain.errors import DataError, Interrupted
from mtrain.rank import process
from mtrain.system import attempts
from mtrain.system.failures import write_failure
from mtrain.system.runfolder import RunFolder

RANK = process.number(os.environ)
MARK = attempts.read(os.environ)
BEHAVIOUR = sys.argv[1]
RUN = RunFolder(Path(sys.argv[sys.argv.index("--run-dir") + 1]))
ASKED = []
STARTERS_OUTPUT = os.dup(1)


def report(kind: str, **fields: object) -> None:
    if RANK == 0:
        with RUN.metrics.open("a") as file:
            file.write(json.dumps({"kind": kind, **fields}) + "\n")


def wait_for_ever() -> None:
    while True:
        time.sleep(0.05)


def succeed() -> None:
    report("start", update=0)
    report("end", reason="done")


def save_when_asked() -> None:
    signal.signal(signal.SIGTERM, lambda *_: ASKED.append(1))
    (RUN.path / f"ready-{RANK}").touch()
    while not ASKED:
        time.sleep(0.02)
    (RUN.path / f"saved-{RANK}").touch()
    report("end", reason="interrupted")
    raise Interrupted("ended from outside")


def save_slowly_when_asked() -> None:
    """Saving lasts until every process that was to be signalled has been: a condition would need a file from the test."""
    signal.signal(signal.SIGTERM, lambda *_: ASKED.append(1))
    (RUN.path / f"ready-{RANK}").touch()
    while not ASKED:
        time.sleep(0.02)
    time.sleep(1.0)
    (RUN.path / f"saved-{RANK}").touch()
    report("end", reason="interrupted")
    raise Interrupted("ended from outside")


def save_for_seven_seconds_when_asked() -> None:
    """Longer than starters wait by themselves for what is left of a rank's processes."""
    signal.signal(signal.SIGTERM, lambda *_: ASKED.append(1))
    (RUN.path / f"ready-{RANK}").touch()
    while not ASKED:
        time.sleep(0.02)
    deadline = time.monotonic() + 7.0
    while time.monotonic() < deadline:
        time.sleep(0.02)
    (RUN.path / f"saved-{RANK}").touch()
    report("end", reason="interrupted")
    raise Interrupted("ended from outside")


def save_and_go_on_when_asked() -> None:
    """Each request to save adds a line to a file; the test says when the job ends."""
    request = process.SaveRequest()
    request.listen()
    (RUN.path / f"ready-{RANK}").touch()
    while not (RUN.path / "go").exists():
        if request():
            with (RUN.path / f"requested-{RANK}").open("a") as file:
                file.write("saved\n")
            request.mark_served()
        time.sleep(0.02)
    succeed()


def ignore_requests() -> None:
    """Only a file says that a request was heard."""
    signal.signal(signal.SIGTERM, lambda *_: (RUN.path / f"heard-{RANK}").touch())
    (RUN.path / f"ready-{RANK}").touch()
    wait_for_ever()


def rank_1_raises_and_0_hangs() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if RANK == 1:
        raise ValueError("the seventh image is upside down")
    wait_for_ever()


def refuse() -> None:
    raise DataError("train: 3 images cannot be read")


def rank_1_is_killed_then_0_raises() -> None:
    if RANK == 1:
        (RUN.path / "ready-1").touch()
        print("the last words of rank 1", flush=True)
        wait_for_ever()
    while not (RUN.path / "go").exists():
        time.sleep(0.02)
    raise ConnectionError("connection closed by peer")


def leave_children_behind() -> None:
    for _ in range(2):
        child = subprocess.Popen(
            [sys.executable, "-c", "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"],
            start_new_session=True,
        )
        with (RUN.path / "children").open("a") as file:
            file.write(f"{child.pid}\n")
    time.sleep(0.5)


def fail_the_first_time() -> None:
    mark = RUN.path / "failed-once"
    if mark.exists():
        succeed()
        return
    mark.touch()
    raise RuntimeError("a cosmic ray")


def fail_otherwise_the_second_time() -> None:
    """End without leaving a failure, so that the logs have to do."""
    mark = RUN.path / "failed-once"
    if not mark.exists():
        mark.touch()
        for log in (RUN.starter_log, RUN.rank_log(RANK)):
            with log.open("a") as file:
                file.write("Traceback (most recent call last):\n  the first attempt\nImportError: the first attempt\n")
        os._exit(3)
    with RUN.starter_log.open("a") as file:
        file.write("the second attempt\n")
    os._exit(4)


def fail_the_first_time_when_told() -> None:
    while not (RUN.path / "go").exists():
        time.sleep(0.02)
    fail_the_first_time()


def die_of_sigsegv() -> None:
    print("about to crash", flush=True)
    os.kill(os.getpid(), signal.SIGSEGV)


def print_too_much_and_die() -> None:
    """Print numbered lines, also from a program that is not Python, until all files of output were shortened; then be killed."""
    places = dict.fromkeys((RUN.rank_log(RANK), *growing_with_the_starter()), 0)
    number = 0
    while places:
        text = "".join(f"line {number + more:09d}\n" for more in range(4000)).encode()
        number += 4000
        subprocess.run(["cat"], input=text, check=True)  # into the log of the rank
        os.write(STARTERS_OUTPUT, text)
        sizes = {path: path.stat().st_blocks * 512 for path in places}
        places = {path: size for path, size in sizes.items() if size >= places[path]}
        time.sleep(0.01)
    print(f"the last words of rank {RANK}", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


def print_too_much_the_second_time() -> None:
    mark = RUN.path / "printed-once"
    if mark.exists():
        print_too_much_and_die()
    mark.touch()
    print(900 * 1000 * "x", flush=True)
    os._exit(3)


def growing_with_the_starter() -> list[Path]:
    """Return the file in which output ends that a rank writes before it has a log of its own."""
    path = Path(os.readlink(f"/proc/self/fd/{STARTERS_OUTPUT}"))
    return [path] if path.exists() else [RUN.starter_log]  # Horovod's starter passes on what it reads from a pipe.


def show_environment() -> None:
    (RUN.path / "environment.txt").write_text("\n".join(f"{name}={value}" for name, value in os.environ.items()))


def main() -> int:
    RUN.logs.mkdir(parents=True, exist_ok=True)
    with RUN.rank_log(RANK).open("a") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    attempts.join(MARK, RUN.path, rank=RANK)
    try:
        globals()[BEHAVIOUR]()
    except BaseException as error:
        write_failure(RUN, RANK, error, attempt=MARK.attempt if MARK else "")
        return getattr(error, "exit_code", 1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
