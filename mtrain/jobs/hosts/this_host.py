"""A job on this host alone: a cluster of one, whose command this process runs without an agent."""

import sys
from collections.abc import Callable, Mapping
from contextlib import closing, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any

from mtrain.core.checkpoint import store
from mtrain.jobs.brief import Brief
from mtrain.jobs.hosts.messages import Message
from mtrain.jobs.plan.plan import Plan, make_plan
from mtrain.jobs.run.attempt import Attempt, Limits
from mtrain.jobs.run.host_command import HostCommand, Orders
from mtrain.jobs.run.metrics import HostMetrics
from mtrain.jobs.run.metrics_place import AttemptFacts
from mtrain.jobs.run.outcome import Outcome
from mtrain.jobs.run.request_files import write_folder
from mtrain.jobs.run.supervisor import FAILURES, Hosts, Result, supervise
from mtrain.records.console import make_display
from mtrain.records.display import Display
from mtrain.spec import terminal
from mtrain.spec.config import Loaded
from mtrain.system import environment, job_secret, plugin_packages, processes, runfolder
from mtrain.system.processes import Requests
from mtrain.system.runfolder import RunFolder

# An own process knows at once when its command ends, so silence says nothing here. Ranks have longer than on several hosts
# to end by themselves after the first failure: nobody waits for another host that may have lost its network.
LIMITS = Limits(silence_s=float("inf"), settle_s=10.0, ending_s=60.0, poll_s=0.1, leftover_s=5.0)


def run_job(
    loaded: Loaded,
    run_dir: Path,
    checkpoint: Path | None = None,
    *,
    mode: str = "train",
    quiet: bool = False,
    stream: IO[str] | None = None,
) -> Result:
    """Run a job on this host alone in a folder that exists, without the checks of one that a user has asked for.

    ``stream`` receives all messages; None: the terminal.

    Raises:
        LaunchError: the job could not be started.
        UsageError: a package of a plugin is missing.
    """
    plugin_packages.check(loaded.job, is_script=loaded.script is not None)
    brief = Brief(loaded=loaded, mode=mode, name=run_dir.name, quiet=quiet)
    return run_plan(brief, make_plan(loaded, run_dir=run_dir, resume=checkpoint, mode=mode), stream=stream)


def run_plan(brief: Brief, plan: Plan, *, stream: IO[str] | None, holds_folder: bool = False) -> Result:
    """Write the run folder, run the plan, and show its progress."""
    loaded, first = brief.loaded, plan.resume
    write_folder(loaded, plan)
    display = make_display(brief.display, title=plan.title, stream=stream)
    for note in (*loaded.notes, *brief.notes):
        display.note(note)
    return ThisHost(
        display=display,
        environ=environment.clean(environment.caller()) | job_secret.draw_secret(),
        # Each attempt is planned anew, since its port may be taken meanwhile.
        replan=lambda newest: make_plan(loaded, run_dir=plan.run_dir, resume=newest or first, mode=brief.mode),
        limits=replace(LIMITS, grace_s=brief.spec.cluster.grace_s),
        stream=stream or sys.stderr,
        holds_folder=holds_folder,
    ).run(plan)


@dataclass(kw_only=True)
class ThisHost(Hosts):
    """The only host of a job, see ``supervisor.Hosts``."""

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
    _requests: Requests = field(default_factory=Requests)
    _metrics: HostMetrics = field(default_factory=HostMetrics)
    _attempts: int = 0

    def run(self, plan: Plan) -> Result:
        """Run a plan with one host to its end.

        Ctrl-C or SIGTERM asks the ranks to save and end; a second one ends them at once. It must be called from the main
        thread, where Python handles signals.

        Raises:
            LaunchError: the command cannot be started at all.
            UsageError: another process runs a job in this folder, or has the port of its metrics.
        """
        self._run_folder = RunFolder(plan.run_dir, plan.log_dir)
        self._run_folder.make()
        try:
            with (
                nullcontext() if self.holds_folder else runfolder.take_folder(self._run_folder),
                closing(self._metrics),
                self._requests,
                processes.adopting_orphans(),
            ):
                self._metrics.open(
                    None if plan.metrics is None else plan.metrics.on(plan.hosts[0].address), plan.run_dir
                )
                result = supervise(self, plan, requests=self._requests, display=self.display)
                if result.code in FAILURES:
                    self._metrics.fail(stop=self._requests.any)
        finally:
            self.display.close()
        if result.text:
            terminal.say(result.text, stream=self.stream)
        return result

    def attempt(self, plan: Plan) -> Outcome:
        """Run the plan's command; however this ends, no process of it is left."""
        self._attempts += 1
        with closing(
            DirectConnection(self._run_folder, self.environ, leftover_s=self.limits.leftover_s, metrics=self._metrics)
        ) as connection:
            return Attempt(
                plan=plan,
                restarts=self._attempts - 1,
                members={0: _Self(channel=connection)},
                display=self.display,
                requests=self._requests,
                limits=self.limits,
            ).run()

    def newest(self) -> Path | None:
        """Return the newest intact checkpoint in the run folder."""
        return store.newest(self._run_folder.checkpoints)

    def next_plan(self, plan: Plan, checkpoint: Path | None) -> Plan:
        """Return the plan of the next attempt."""
        return self.replan(checkpoint)

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
            self._metrics.begin(AttemptFacts.of(message))
            self._command = HostCommand(
                Orders.of(message), self._run_folder, environ=self._environ, leftover_s=self._leftover_s
            )
        elif self._command is not None:
            if message["do"] == "hang":
                self._metrics.note_hang(message["report"])
            self._command.obey(message)

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
