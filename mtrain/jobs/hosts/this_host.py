"""A job on this host alone: a cluster of one, whose command this process runs without an agent."""

import sys
from collections.abc import Callable, Mapping
from contextlib import closing, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from mtrain.core.checkpoint import store
from mtrain.jobs.hosts.channel import Message
from mtrain.jobs.plan.plan import Plan
from mtrain.jobs.run.attempt import Attempt, Limits
from mtrain.jobs.run.host_command import HostCommand, Orders
from mtrain.jobs.run.metrics import HostMetrics
from mtrain.jobs.run.metrics_place import facts_of
from mtrain.jobs.run.outcome import Outcome
from mtrain.jobs.run.supervisor import FAILURES, Result, supervise
from mtrain.records.display import Display
from mtrain.spec import terminal
from mtrain.system import processes, runfolder
from mtrain.system.processes import Requests
from mtrain.system.runfolder import RunFolder

LIMITS = Limits(silence_s=float("inf"), settle_s=10.0, ending_s=60.0, poll_s=0.1, leftover_s=5.0)
"""The other ranks have 10 seconds to end by themselves after the first failure."""


@dataclass(kw_only=True)
class Job:
    """The parameters of ``run`` besides the plan."""

    display: Display
    environ: Mapping[str, str]
    """The cleaned environment of the caller, to which each command's own variables are added."""
    replan: Callable[[Path | None], Plan]
    """Makes the plan of a restart from a checkpoint (None: from the beginning)."""
    limits: Limits = LIMITS
    stream: IO[str] = field(default_factory=lambda: sys.stderr)
    """Stream on which the reason of a failure is printed."""
    holds_folder: bool = False
    """Whether this process has locked the run folder already."""


def run(plan: Plan, job: Job) -> Result:
    """Run a plan with one host to its end.

    Ctrl-C or SIGTERM asks the ranks to save and end; a second one ends them at once. It must be called from the main
    thread, where Python handles signals.

    Raises:
        LaunchError: the command cannot be started at all.
        UsageError: another process runs a job in this folder, or has the port of its metrics.
    """
    run_folder = RunFolder(plan.run_dir, plan.log_dir)
    run_folder.make()
    try:
        with (
            nullcontext() if job.holds_folder else runfolder.take_folder(run_folder),
            closing(HostMetrics()) as metrics,
            Requests() as requests,
            processes.adopting_orphans(),
        ):
            metrics.open(None if plan.metrics is None else plan.metrics.on(plan.hosts[0].address), plan.run_dir)
            hosts = ThisHost(job, run_folder, requests, metrics)
            result = supervise(hosts, plan, requests=requests, display=job.display)
            if result.code in FAILURES:
                metrics.fail(stop=requests.any)
    finally:
        job.display.close()
    if result.text:
        terminal.say(result.text, stream=job.stream)
    return result


class ThisHost:
    """The only host of a job, see ``supervisor.Hosts``."""

    def __init__(self, job: Job, run_folder: RunFolder, requests: Requests, metrics: HostMetrics) -> None:
        self._job = job
        self._run_folder = run_folder
        self._requests = requests
        self._metrics = metrics
        self._attempts = 0

    def attempt(self, plan: Plan) -> Outcome:
        """Run the plan's command; however this ends, no process of it is left."""
        connection = DirectConnection(
            self._run_folder, self._job.environ, leftover_s=self._job.limits.leftover_s, metrics=self._metrics
        )
        self._attempts += 1
        with closing(connection):
            return Attempt(
                plan=plan,
                restarts=self._attempts - 1,
                members={0: _Self(channel=connection)},
                display=self._job.display,
                requests=self._requests,
                limits=self._job.limits,
            ).run()

    def newest(self) -> Path | None:
        """Return the newest intact checkpoint in the run folder."""
        return store.newest(self._run_folder.checkpoints)

    def change(self, outcome: Outcome) -> str:
        """Return nothing: the hosts of this job do not change."""
        return ""

    def restore(self, plan: Plan, outcome: Outcome) -> None:
        """Nothing: this host cannot be lost."""

    def next_plan(self, plan: Plan, checkpoint: Path | None) -> Plan:
        """Return the plan of the next attempt."""
        return self._job.replan(checkpoint)

    def end_requested(self) -> bool:
        """Return whether a signal has asked for the end of the job."""
        return self._requests.any()


class DirectConnection:
    """The connection to this host: it carries out the messages of a leader itself, see ``hosts.Connection``."""

    silence_s = float("inf")
    silent_s = 0.0
    lost = None

    def __init__(
        self, run_folder: RunFolder, environ: Mapping[str, str], *, leftover_s: float, metrics: HostMetrics
    ) -> None:
        self._run_folder = run_folder
        self._environ = environ
        self._metrics = metrics
        self._leftover_s = leftover_s
        self._command: HostCommand | None = None

    def send(self, message: Mapping[str, Any]) -> None:
        """Carry out "start", "save", "stop" or "end".

        Raises:
            LaunchError: the command cannot be started.
        """
        if message["do"] == "start":
            orders = Orders.of(message)
            self._metrics.begin(facts_of(message))
            self._command = HostCommand(orders, self._run_folder, environ=self._environ, leftover_s=self._leftover_s)
        elif self._command is not None:
            command = self._command
            if message["do"] == "stop":
                command.ask_to_end(int(message["signal"]))
            else:
                {"save": command.ask_to_save, "end": command.kill}[message["do"]]()

    def receive(self) -> list[Message]:
        """Return the new events of the command."""
        return [] if self._command is None else self._command.events()

    def close(self) -> None:
        """End every process that the command has left."""
        if self._command is not None:
            self._command.close()


@dataclass(kw_only=True)
class _Self:
    """This host, see ``hosts.Participant``."""

    channel: DirectConnection
    node: None = None
    label: str = ""
