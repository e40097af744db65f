"""Plant hangs in rank 1 of small jobs, and print what is said of them, and when: by mtrain, and by the native starters.

A hang comes in the middle of an update, by a signal that ``hanging/sitecustomize.py`` handles; a mistake of a script after ten
steps. ``--soak`` runs healthy jobs with long silent phases instead, of which nothing may be said. Prints Markdown.
"""

import argparse
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.hanging.sitecustomize import HANGS, SIGNAL
from mtrain.system import attempts

HERE = Path(__file__).parent / "hanging"
BIN = Path(sys.executable).parent
START_S = 240.0
VICTIM = 1
INJECTED = ("stop", *HANGS, "loader")
"""Hangs of any training: SIGSTOP, those of ``sitecustomize``, and a worker of the loader that sleeps."""
MISTAKES = ("calls", "order", "shape", "batches", "worker")
"""Hangs that a script makes itself."""
SPECS = {
    "ddp": ["-b", "ddp"],
    "fsdp": ["-b", "fsdp"],
    "zero3": ["-b", "deepspeed", "-o", "backend.options.stage=3"],
    "horovod": ["-b", "horovod"],
    "fleet": ["-b", "fleet"],
}
"""Subject -> what `mtrain train` is given."""
SCRIPTS: dict[str, list[str]] = {
    "torch script": ["-b", "ddp", f"{HERE}/torch_script.py", "MISTAKE", "torch"],
    "deepspeed script": ["-b", "ddp", f"{HERE}/torch_script.py", "MISTAKE", "deepspeed"],
    "horovod script": ["-b", "horovod", f"{HERE}/horovod_script.py", "MISTAKE"],
    "paddle script": ["-b", "fleet", f"{HERE}/paddle_script.py", "MISTAKE"],
}
"""Subject -> what `mtrain run` is given."""
NATIVE: dict[str, list[str]] = {
    "torchrun": [f"{BIN}/torchrun", "--nproc-per-node", "RANKS", "--master-port", "PORT", *SCRIPTS["torch script"][2:]],
    "horovodrun": [f"{BIN}/horovodrun", "-np", "RANKS", "--gloo", sys.executable, *SCRIPTS["horovod script"][2:]],
    "deepspeed": [
        *(f"{BIN}/deepspeed", "--num_gpus", "RANKS", "--master_port", "PORT", "--no_local_rank"),
        *SCRIPTS["deepspeed script"][2:],
    ],
    "paddle.distributed.launch": [
        *(sys.executable, "-m", "paddle.distributed.launch", "--nproc_per_node", "RANKS", "--log_dir", "LOGS"),
        *SCRIPTS["paddle script"][2:],
    ],
}
SOAK = (
    *(("torch script", phase) for phase in ("pause", "computation", "evaluation", "save", "compilation")),
    *((subject, phase) for subject in ("ddp", "zero3") for phase in ("pause", "computation")),
    ("fleet", "pause"),  # Paddle ends a job by itself whose ranks compute while others wait for 30 s in a pass
)
"""Subjects and long phases of healthy jobs: of a script, its own; of a spec, in all ranks, or in one for which the others wait."""
PHASE_S = {"pause": 30.0, "computation": 45.0}
RANK_VARIABLES = ("RANK", "HOROVOD_RANK", "PADDLE_TRAINER_ID")


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One hang of one subject."""

    subject: str
    hang: str
    ranks: int
    port: int
    wait_s: float

    @property
    def is_native(self) -> bool:
        return self.subject in NATIVE

    @property
    def is_healthy(self) -> bool:
        return (self.subject, self.hang) in SOAK

    def command(self, folder: Path) -> list[str]:
        mistake = "none" if self.hang in INJECTED else self.hang
        values = {"RANKS": str(self.ranks), "PORT": str(self.port), "MISTAKE": mistake, "LOGS": str(folder / "logs")}
        if self.is_native:
            return [values.get(word, word) for word in NATIVE[self.subject]]
        start = ["--nproc-per-node", str(self.ranks), "--name", "hung"]
        if self.subject in SCRIPTS:
            return [f"{BIN}/mtrain", "run", *start, *(values.get(word, word) for word in SCRIPTS[self.subject])]
        endless = [
            "train.updates=1000000",
            "train.epochs=null",
            "evaluate.enabled=false",
            f"train.batch_size={8 * self.ranks}",
        ]
        return [f"{BIN}/mtrain", "train", "-c", "vit_digits", *start, *SPECS[self.subject], "-o", *endless]


@dataclass
class Found:
    """What was said of a hang."""

    cell: Cell
    said_after_s: float | None = None
    """None: nothing was said of it while it lasted."""
    text: str = ""
    ranks: Sequence[int] = ()
    ended_after_s: float | None = None
    """None: the job still ran at the end of the watch."""
    last: str = ""
    problem: str = ""
    """Why nothing was measured."""
    all_said: list[str] = field(default_factory=list)


def measure(cell: Cell) -> Found:
    """Start a job, let it hang, and return what is said of it."""
    found = Found(cell)
    with tempfile.TemporaryDirectory(prefix="hangs-") as name:
        folder = Path(name)
        os.mkfifo(folder / "fifo")
        order, output = folder / "order", folder / "output"
        kind = "sleep" if cell.hang == "loader" else cell.hang
        order.write_text(f"{kind} {folder / 'fifo'}")
        environ = {**os.environ, "PYTHONPATH": f"{HERE}", "HANG_ORDER": str(order), "OMP_NUM_THREADS": "1"}
        environ |= {
            "DS_ACCELERATOR": "cpu",
            "TORCH_EXTENSIONS_DIR": os.environ.get("TORCH_EXTENSIONS_DIR", str(folder / "extensions")),
            "NO_COLOR": "1",
        }
        if cell.hang == "lock":
            environ["TORCH_EXTENSIONS_DIR"] = str(folder / "extensions")
            (folder / "extensions/deepspeed_shm_comm").mkdir(parents=True)
            (folder / "extensions/deepspeed_shm_comm/lock").touch()
        with output.open("wb") as file:
            job = subprocess.Popen(
                cell.command(folder), cwd=folder, env=environ, stdout=file, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                start_new_session=True,
            )  # fmt: skip
        try:
            if cell.hang == "lock":
                wait(lambda: len(ranks_of(cell, folder, job.pid)) == cell.ranks, START_S)
            else:
                wait(lambda: progress(cell, folder, output) >= (10 if cell.hang in MISTAKES else 5), START_S, job)
            time.sleep(2.0)
            inject(cell, folder, job.pid)
            watch(cell, found, folder, output, job)
        except (TimeoutError, LookupError) as error:
            found.problem = f"{type(error).__name__}: {error}: {output.read_text(errors='replace')[-300:]}"
        finally:
            end(job)
    return found


def progress(cell: Cell, folder: Path, output: Path) -> int:
    """Return how many steps the job has made."""
    if cell.subject in SPECS:
        return read(folder / "runs/hung/metrics.jsonl").count('"update"')
    logs = {"": output, **{path.name: path for path in (folder / "logs").glob("workerlog.*")}}
    logs |= {path.name: path for path in (folder / "runs/hung/logs").glob("rank-*.log")}
    return max(read(path).count("step ") // (cell.ranks if not name else 1) for name, path in logs.items())


def inject(cell: Cell, folder: Path, starter: int) -> None:
    """Let rank 1 hang, or ranks of a healthy job take long."""
    if cell.is_healthy and cell.subject in SPECS:
        for rank, pid in ranks_of(cell, folder, starter).items():
            if cell.hang == "pause" or rank == 0:
                os.kill(pid, SIGNAL)
    if cell.hang not in INJECTED:
        return
    victim = ranks_of(cell, folder, starter)[VICTIM]
    if cell.hang == "stop":
        os.kill(victim, signal.SIGSTOP)
    elif cell.hang == "loader":
        for child in psutil.Process(victim).children(recursive=True):
            os.kill(child.pid, SIGNAL)
    else:
        os.kill(victim, SIGNAL)


def ranks_of(cell: Cell, folder: Path, starter: int) -> dict[int, int]:
    """Return the processes of the ranks."""
    if not cell.is_native:
        return attempts.living_ranks(folder / "runs/hung", None)
    ranks: dict[int, int] = {}
    for process in psutil.Process(starter).children(recursive=True):
        try:
            words, environ = process.cmdline(), process.environ()
        except psutil.Error:
            continue
        number = next((environ[name] for name in RANK_VARIABLES if name in environ), "")
        if number and any(word.endswith("_script.py") for word in words) and "python" in Path(words[0]).name:
            ranks.setdefault(int(number), process.pid)
    return ranks


def watch(cell: Cell, found: Found, folder: Path, output: Path, job: "subprocess.Popen[bytes]") -> None:
    """Read what is said until there is a report, or nothing for long enough."""
    began, before, steps = time.monotonic(), len(read(output)), progress(cell, folder, output)
    while time.monotonic() - began < cell.wait_s:
        time.sleep(0.5)
        has_gone_on = progress(cell, folder, output) > steps + 10
        if (
            cell.is_healthy
            and has_gone_on
            and (cell.subject in SCRIPTS or time.monotonic() - began > PHASE_S[cell.hang])
        ):
            found.last = "went on"
            return
        now = time.monotonic() - began
        reports = [
            json.loads(line) for line in read(folder / "runs/hung/hangs.jsonl").splitlines() if line.endswith("}")
        ]
        said = [
            line
            for line in read(output)[before:].splitlines()
            if line.strip() and "step " not in line and "phase" not in line
        ]
        if reports and found.said_after_s is None:
            found.said_after_s, found.text, found.ranks = now, reports[0]["text"], reports[0].get("ranks", ())
        elif cell.is_native and said and found.said_after_s is None:
            found.said_after_s, found.text = now, said[0]
        found.all_said = said
        if job.poll() is not None:
            found.ended_after_s, found.last = now, " // ".join(line for line in said if "report" not in line)[-600:]
            return
        if reports and found.said_after_s is not None and now - found.said_after_s > 3 and not cell.is_healthy:
            return


def wait(ready: Callable[[], bool], seconds: float, job: "subprocess.Popen[bytes] | None" = None) -> None:
    deadline = time.monotonic() + seconds
    while not ready():
        if time.monotonic() > deadline or (job is not None and job.poll() is not None):
            raise TimeoutError("the job has not come so far")
        time.sleep(0.5)


def read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def end(job: "subprocess.Popen[bytes]") -> None:
    """Kill a job with everything that it has started."""
    try:
        tree = [psutil.Process(job.pid), *psutil.Process(job.pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        tree = []
    for process in tree:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(tree, timeout=10)
    job.wait()


def row(found: Found) -> str:
    """Return a row of the table."""
    cell = found.cell
    said = "nothing" if found.said_after_s is None else f"{found.said_after_s:.0f} s"
    text = found.problem or found.text or found.last or f"(in {cell.wait_s:.0f} s)"
    right = "yes" if list(found.ranks) == [VICTIM] else ("" if cell.is_native else str(list(found.ranks)))
    ended = "" if found.ended_after_s is None else f"{found.ended_after_s:.0f} s"
    return f"| {cell.subject} | {cell.hang} | {said} | {right} | {ended} | {text.replace('|', '/')[:600]} |"


def main(argv: Sequence[str] | None = None) -> None:
    """Measure the cells that are asked for, a few at a time."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--subjects", nargs="*", default=[*SPECS, *SCRIPTS], choices=[*SPECS, *SCRIPTS, *NATIVE])
    parser.add_argument("--hangs", nargs="*", default=["stop", "gil", "spin"], choices=[*INJECTED, *MISTAKES, "lock"])
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--wait-s", type=float, default=110.0)
    parser.add_argument("--at-once", type=int, default=1)
    parser.add_argument("--port", type=int, default=31400)
    parser.add_argument("--soak", type=int, default=0, metavar="JOBS")
    arguments = parser.parse_args(argv)
    wanted = [(subject, hang) for subject in arguments.subjects for hang in arguments.hangs]
    if arguments.soak:
        wanted = list(itertools.islice(itertools.cycle(SOAK), arguments.soak))
    cells = [
        Cell(subject=subject, hang=hang, ranks=arguments.ranks, port=arguments.port + index, wait_s=arguments.wait_s)
        for index, (subject, hang) in enumerate(wanted)
    ]
    print(
        "| subject | hang | said after | rank 1 | ended after | what was said |\n|---|---|--:|---|--:|---|", flush=True
    )
    reported = failed = 0
    with ThreadPoolExecutor(arguments.at_once) as pool:
        for found in pool.map(measure, cells):
            print(row(found), flush=True)
            reported += found.said_after_s is not None
            failed += bool(found.problem)
    print(f"{len(cells)} jobs: {reported} reported, {failed} not measured")


if __name__ == "__main__":
    main()
