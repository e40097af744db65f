"""One job on three hosts of a real Slurm, and what can happen to it: after each event it goes on, to the bits of a job to
which nothing happened.

Needs the Slurm of ``tests/cluster/slurm.sh``. Prints a Markdown table. A job that the event has ended, and that Slurm has
not put back into its queue, is submitted again: the same batch script, the same command.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.cluster.jobs import prepare
from tests.cluster.lab import Process, wait_for
from tests.cluster.slurm_lab import FIRST, SlurmLab

HOSTS = 3
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED")
LONG_S = 240.0
"""Time for an event, and for the job to go on after it, before the soak gives up."""
SILENCE_S = 20
"""``--failure-timeout-s`` of the job."""
LIMIT_MINUTES = 60
NAME = "soak"


@dataclass
class Soak:
    """The job, through all its lives."""

    lab: SlurmLab
    number: str = ""
    scripts: dict[str, Path] = field(default_factory=dict)

    def records(self, kind: str, name: str = NAME) -> list[dict[str, Any]]:
        """Return the records of a kind so far."""
        path = self.lab.share / "runs" / name / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        rows = [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]
        return [row for row in rows if row["kind"] == kind]

    def update(self) -> int:
        """Return the number of the newest update."""
        return max((row["update"] for row in self.records("update")), default=-1)

    def job(self) -> dict[str, str]:
        """Return what the controller shows of the job; empty while it does not answer."""
        try:
            return self.lab.job(self.number)
        except AssertionError:
            return {}

    def printed(self) -> str:
        """Return what the job with this number has printed so far."""
        path = self.lab.share / "runs" / ".submitted" / NAME / f"slurm-{self.number}.out"
        return path.read_text() if path.exists() else ""

    def submit(self, script: str = "requeue") -> None:
        """Give the batch script to Slurm again."""
        self.number = self.lab.sbatch(str(self.scripts[script]))

    def slurm(self, *words: str) -> None:
        """Run one of Slurm's commands on the first host; it must succeed."""
        self.lab.run(FIRST, list(words))

    def process(self, node: str, match: Callable[[Process], bool]) -> Process:
        """Return the first matching process of a host."""
        return next(process for process in self.lab.processes(node) if match(process))

    def module(self, node: str, module: str) -> Process:
        """Return the process of a host that runs a module."""
        return self.process(node, lambda process: process.module == module)


@dataclass(frozen=True)
class Event:
    """Something that happens to a running job."""

    name: str
    strike: Callable[[Soak], None]
    mend: Callable[[Soak], None] = lambda soak: None
    ends: bool = True
    """Whether the job ends by it, or ends and starts again."""
    script: str = "requeue"
    """The batch script that the job must have been started with: "plain" has no warning before the time limit."""
    early: bool = False
    """Whether it strikes while the job still starts."""


def preempted(soak: Soak) -> None:
    soak.slurm("sbatch", "-p", "high", "-N3", "--exclusive", "-J", "urgent", "-o", "/dev/null", "--wrap", "sleep 5")


def rank_killed(soak: Soak) -> None:
    soak.lab.kill(soak.lab.rank_on("node3"), "KILL")


def short_limit(soak: Soak) -> None:
    soak.slurm("scontrol", "update", f"JobId={soak.number}", "TimeLimit=1")


def long_limit(soak: Soak) -> None:
    soak.lab.start(FIRST, ["scontrol", "update", f"JobId={soak.number}", f"TimeLimit={LIMIT_MINUTES}"]).communicate()


def warned(soak: Soak) -> None:
    soak.slurm("scancel", "--batch", "--signal=USR1", soak.number)


def down(soak: Soak) -> None:
    soak.slurm("scontrol", "update", "nodename=node3", "state=down", "reason=soak")


def suspended(soak: Soak, seconds: float) -> None:
    soak.slurm("scontrol", "suspend", soak.number)
    time.sleep(seconds)
    soak.slurm("scontrol", "resume", soak.number)


def silenced(soak: Soak, seconds: float) -> None:
    soak.lab.cut("node3", on=True)
    time.sleep(seconds)
    soak.lab.cut("node3", on=False)


def killed(node: str, module: str) -> Callable[[Soak], None]:
    """Return a function that kills the process of a module."""
    return lambda soak: soak.lab.kill(soak.module(node, module), "KILL")


def srun_killed(soak: Soak) -> None:
    """The srun that reaches node2, on the first host."""
    is_it = lambda process: process.words[0].endswith("srun") and "--nodelist=node2" in process.words  # noqa: E731
    soak.lab.kill(soak.process(FIRST, is_it), "KILL")


def slurmd_restarted(soak: Soak) -> None:
    soak.lab.slurmd("node2", up=False)
    time.sleep(3)
    soak.lab.slurmd("node2", up=True)


def ctld_restarted(soak: Soak) -> None:
    soak.lab.ctld(up=False)
    time.sleep(5)
    soak.lab.ctld(up=True)


def first_host_off(soak: Soak) -> None:
    """It is the host of the batch script, of rank 0 and of the controller."""
    soak.lab.power(FIRST, "off")
    time.sleep(2)
    soak.lab.up(HOSTS)


EVENTS = (
    Event("`scancel`", lambda soak: soak.slurm("scancel", soak.number)),
    Event("`scancel` while it starts", lambda soak: soak.slurm("scancel", soak.number), early=True),
    Event("`scancel --signal=USR1`", lambda soak: soak.slurm("scancel", "--signal=USR1", soak.number), ends=False),
    Event("`scancel --signal=TERM` (steps only)", lambda soak: soak.slurm("scancel", "--signal=TERM", soak.number)),
    Event("`scontrol requeue`", lambda soak: soak.slurm("scontrol", "requeue", soak.number)),
    Event("warning before the time limit (`B:USR1`)", warned),
    Event("time limit, with `requeue`", short_limit, mend=long_limit),
    Event("preemption of all hosts", preempted),
    Event("preemption again", preempted),
    Event("`scontrol update state=down` of a host", down),
    Event("slurmd of a host killed and not started again", lambda soak: soak.lab.slurmd("node2", up=False)),
    Event("slurmd of a host killed and started again", slurmd_restarted, ends=False),
    Event("slurmctld killed and started again", ctld_restarted, ends=False),
    Event("a host powered off", lambda soak: soak.lab.power("node3", "off")),
    Event("a host halted", lambda soak: soak.lab.power("node2", "halt")),
    Event("the first host powered off, with slurmctld", first_host_off),
    Event("switch drops a host's traffic for 5 s", lambda soak: silenced(soak, 5), ends=False),
    Event(
        "switch drops a host's traffic for long",
        lambda soak: soak.lab.cut("node3", on=True),
        mend=lambda soak: soak.lab.cut("node3", on=False),
    ),
    Event("`scontrol suspend` for 5 s", lambda soak: suspended(soak, 5), ends=False),
    Event(f"`scontrol suspend` for {2 * SILENCE_S} s", lambda soak: suspended(soak, 2 * SILENCE_S), ends=False),
    Event("`kill -9` of a rank", rank_killed),
    Event("`kill -9` of an agent", killed("node2", "mtrain.jobs.hosts.agent")),
    Event("`kill -9` of mtrain itself", killed(FIRST, "mtrain")),
    Event("`kill -9` of an `srun`", srun_killed),
    Event("time limit without a warning", short_limit, mend=long_limit, script="plain"),
)


@dataclass(frozen=True, kw_only=True)
class Row:
    """What an event has led to."""

    event: str
    said: str
    state: str
    saved_s: float | None
    last: int
    resumed: int | None
    again: str

    def line(self) -> str:
        """Return the row of the table."""
        saved = "" if self.saved_s is None else f"{self.saved_s:.1f}"
        resumed = "went on" if self.resumed is None else str(self.resumed)
        return f"| {self.event} | {self.said} | {self.state} | {saved} | {self.last} | {resumed} | {self.again} |"


HEAD = (
    "| event | mtrain said | state in Slurm | seconds to save | updates made | goes on at | put back by |\n|"
    + "---|" * 7
)


def happen(soak: Soak, event: Event) -> Row:
    """Let an event happen to the running job, and bring the job back where it has ended.

    Raises:
        TimeoutError: the job does not go on.
    """
    if event.script != "requeue":
        swap(soak, event.script)
    began = soak.update()
    if event.early:
        soak.slurm("scancel", soak.number)
        wait_for(lambda: soak.job().get("JobState") in ENDED, what="the end")
        soak.submit()
        wait_for(lambda: "preflight" in soak.printed(), timeout_s=LONG_S, what="the preflight")
    else:
        wait_for(lambda: soak.update() >= began + 3, timeout_s=LONG_S, what="three updates")
    starts = len(soak.records("start"))
    number, restarts, offset = soak.number, soak.job().get("Restarts"), len(soak.printed())
    struck = time.time()
    event.strike(soak)
    if not event.ends:
        before = soak.update()
        wait_for(lambda: soak.update() >= before + 5, timeout_s=LONG_S, what=f"updates after {event.name}")
        job = soak.job()
        assert (job["JobState"], job["Restarts"]) == ("RUNNING", restarts), (event.name, job, soak.printed())
        return row(soak, event, struck, soak.printed()[offset:], state=job["JobState"], resumed=None, again="")

    def over() -> bool:
        job = soak.job()
        return job.get("JobState") in ENDED or (bool(job) and job["Restarts"] != restarts)

    wait_for(over, timeout_s=LONG_S, what=f"the end after {event.name}")
    job, again = soak.job(), "Slurm"
    event.mend(soak)
    soak.lab.up(HOSTS)
    if job["JobState"] in ENDED:
        soak.submit()
        again = "`sbatch`"
    wait_for(lambda: len(soak.records("start")) > starts, timeout_s=LONG_S, what=f"a start after {event.name}")
    said = soak.printed()[offset:] if again == "Slurm" else text_of(soak, number)[offset:]
    state = f"{job['JobState']}, exit code {job['ExitCode']}" if again != "Slurm" else "requeued"
    return row(soak, event, struck, said, state=state, resumed=soak.records("start")[-1]["update"], again=again)


def row(soak: Soak, event: Event, struck: float, said: str, **more: Any) -> Row:
    """Return the row of an event, from what the job printed after it and from its records."""
    starts = [record["time"] for record in soak.records("start") if record["time"] > struck]
    until = starts[0] if starts else time.time()
    saves = [
        r for r in soak.records("checkpoint") if struck < r["time"] < until and r.get("why") in ("ending", "requested")
    ]
    updates = [r["update"] + 1 for r in soak.records("update") if r["time"] < until]
    return Row(
        event=event.name,
        said=verdict(said),
        saved_s=saves[0]["time"] - struck if saves else None,
        last=updates[-1] if updates else 0,
        **more,
    )


WORDS = ("state saved", "ended before", "SIGUSR1 asked", "error:", "silent", "lost", "Killed")
"""Parts of the lines that tell how an attempt has ended."""


def verdict(text: str) -> str:
    """Return the exit code of mtrain and the line that says why, from what was printed until the next start."""
    text = text.partition("\nspec: ")[0]
    code = next((line.rpartition(" ")[2] for line in text.splitlines() if "mtrain ended with exit code" in line), "")
    lines = [
        line.strip() for line in text.splitlines() if any(word in line for word in WORDS) and "slurmstepd" not in line
    ]
    why = lines[0].replace("|", "/") if lines else ""
    return ": ".join(part for part in (code, why[:70]) if part)


def text_of(soak: Soak, number: str) -> str:
    """Return what a job has printed."""
    return (soak.lab.share / "runs" / ".submitted" / NAME / f"slurm-{number}.out").read_text()


def swap(soak: Soak, script: str) -> None:
    """End the job, and start it with another batch script."""
    starts = len(soak.records("start"))
    soak.slurm("scancel", soak.number)
    wait_for(lambda: soak.job().get("JobState") in ENDED, timeout_s=LONG_S, what="the end")
    soak.submit(script)
    wait_for(lambda: len(soak.records("start")) > starts, timeout_s=LONG_S, what="a start")


def learned(soak: Soak, name: str) -> tuple[Any, list[tuple[Any, ...]]]:
    """Return the digests of a run's weights, and (update, epoch, position, losses) of each of its updates."""
    summary = json.loads((soak.lab.share / "runs" / name / "summary.json").read_text())
    rows = {
        r["update"]: (r["update"], r["epoch"], r["position"], r["losses"]["total"])
        for r in soak.records("update", name)
    }
    return (summary["weights_sha256"], summary["ema_sha256"]), [rows[update] for update in sorted(rows)]


def submitted(soak: Soak, name: str, updates: int) -> str:
    """Submit a job on three hosts with ``mtrain submit``."""
    values = {
        "train.updates": updates,
        "checkpoint.every_updates": 10,
        "cluster.failure_timeout_s": SILENCE_S,
    }
    words = [word for key, value in values.items() for word in ("-o", f"{key}={value}")]
    return soak.lab.submit("--name", name, "--requeue", "--time", str(LIMIT_MINUTES), *words)


def prepared(soak: Soak) -> None:
    """Keep the batch script, and one that lets the time limit end the job."""
    script = soak.lab.share / "runs" / ".submitted" / NAME / "job.sbatch"
    plain = script.with_name("plain.sbatch")
    kept = [
        line for line in script.read_text().splitlines() if "--signal" not in line and "scontrol requeue" not in line
    ]
    plain.write_text("\n".join(kept) + "\n")
    soak.scripts = {"requeue": script, "plain": plain}


def soaked(soak: Soak, events: list[Event], updates: int) -> bool:
    """Print the table; return whether the job has learned what the undisturbed one has."""
    calm = submitted(soak, "calm", updates)
    soak.lab.wait(calm, ENDED, timeout_s=20 * 60)
    soak.number = submitted(soak, NAME, updates)
    prepared(soak)
    print(HEAD, flush=True)
    for event in events:
        try:
            print(happen(soak, event).line(), flush=True)
        except (TimeoutError, AssertionError, StopIteration) as error:
            print(f"| {event.name} | {type(error).__name__}: {str(error)[:2000]} |", flush=True)
            print(soak.printed()[-3000:], file=sys.stderr, flush=True)
            soak.lab.up(HOSTS)
            if soak.job().get("JobState") in ENDED:
                soak.submit()
    job = soak.lab.wait(soak.number, ENDED, timeout_s=20 * 60)
    print(f"\nat the end: {job['JobState']}, exit code {job['ExitCode']}, {updates} updates")
    (weights, made), (calm_weights, calm_made) = learned(soak, NAME), learned(soak, "calm")
    print(f"weights: {'the same bits' if weights == calm_weights else 'DIFFERENT'} ({weights[0][:16]})")
    print(
        f"update, epoch, place in the epoch and loss of all {len(made)} updates: {'equal' if made == calm_made else 'DIFFERENT'}"
    )
    return weights == calm_weights and made == calm_made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--events", nargs="*", type=int, help="Numbers of events, from 0; default: all.")
    parser.add_argument("--updates", type=int, default=800)
    arguments = parser.parse_args()
    events = [EVENTS[number] for number in arguments.events] if arguments.events is not None else list(EVENTS)
    with tempfile.TemporaryDirectory() as folder:
        lab = SlurmLab(Path(folder))
        try:
            lab.up(HOSTS)
            prepare(lab.share)
            good = soaked(Soak(lab), events, arguments.updates)
        finally:
            lab.down()
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
