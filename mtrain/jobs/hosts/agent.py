"""The agent of a host: the process that starts a job's command on that host, watches it, and reports to the leader.

``python -m mtrain.jobs.hosts.agent`` communicates over its standard input and output when ssh or the leader itself starts
it. On hosts where the job is started by hand, ``rendezvous.py`` gives it a socket. Its own output goes to standard
error.

Messages from the leader. Those with an answer are sent with ``channel.ask``:

=========  ==========================================================  =================================================
do         fields                                                      answer
=========  ==========================================================  =================================================
names      base, name                                                  names: existing folders ``name``, ``name-2`` ...
port       address                                                     port: one that is free at ``address`` just now
check      spec, size, training, resumed, cwd                          notes: those of ``job_checks.check`` on this host
prepare    run_dir, log_dir, node, files (``messages.pack_files``),    empty; the folder was made, locked and written, and
           cwd, wait_s, metrics (``MetricsPlace`` or null)             the port for Prometheus is open
resume     given, base, name, copy_to, cwd, own_node                   run, checkpoint; see ``fetch.fetch_resume``. The
                                                                       folder is locked before the checkpoint is chosen
newest     none                                                        checkpoint: path of the newest intact one or null
failed     none                                                        empty, once Prometheus has read it; the job has failed
start      ``Orders`` (``jobs/run/host_command.py``), hosts, restarts      none; events follow, "ended" is the last of them
save       none                                                        none; the ranks are asked to save and go on
stop       signal                                                      none; the ranks are asked to save and end
end        none                                                        none; all processes of the attempt are killed
places     ask: a number                                               none; the ranks are asked where they are in their code
hang       report: what was said of a hang, or that it is over         none; the host of rank 0 keeps it in the run folder
note       text                                                        none; it is shown where people started the agent
bye        ``Farewell``                                                none; the agent ends
facts ...  see ``facts.py``                                            what ``FactCollector.answer`` returns
=========  ==========================================================  =================================================

Events that the agent sends (``{"event": ...}``):

=======  ===============================================================================================================
hello    the first message: version, host (its name), addresses [[interface, address]], cores, devices, hidden, cwd,
         pid; where the job is started by hand also the description that the first host compares, see ``rendezvous.py``
record   record: a line of ``metrics.jsonl`` (host of rank 0)
output   rank, text: what a rank has printed, if that is shown where the job was started
look     span_s, paused, grew, ranks, locks: what the ranks look like from outside, see ``jobs/watch/looks.py``
places   ask (the number), places {rank: where it is, ``jobs/watch/places.py``}, missing: ranks that do not come, as Horovod says
failure  failure: the file that a failed rank wrote (``failures/rank-N.json``), age_s: seconds since it was written
ended    status, log (of the command), logs {rank: last lines}, ended_here (the agent has killed it), full (the disk of
         its run folder is full), missing (as in "places"), summary, error
save     this process received SIGUSR1
asked    signal: this process received a signal to end the job; times: how many by now
=======  ===============================================================================================================

An answer has ``warnings``, too, if any were logged meanwhile (``messages.py``).

A leader that closes the channel or is silent for too long is lost: the agent kills what it started, and ends.
"""

import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import mtrain
from mtrain.errors import MtrainError, UsageError
from mtrain.jobs.hosts import messages
from mtrain.jobs.hosts.channel import Channel, Lost
from mtrain.jobs.hosts.messages import NOTHING, Farewell, Message
from mtrain.jobs.run.host_command import HostCommand, Orders
from mtrain.jobs.run.metrics import HostMetrics
from mtrain.jobs.run.metrics_place import AttemptFacts, MetricsPlace
from mtrain.spec import bounds, terminal
from mtrain.system import environment, placement, processes, runfolder
from mtrain.system.processes import EXIT_CODES, Requests
from mtrain.system.runfolder import RunFolder

FIRST_MESSAGE_S = 60.0
"""Seconds of silence after which a peer is lost, until the leader sets another limit with its orders."""
LEFTOVER_S = 1.0
"""Seconds that processes have to end after their starter has ended, before they are killed."""
IDLE_S = 0.5
"""Seconds between two looks at signals while no attempt runs, and between two tries to lock the run folder."""
POLL_S = 0.1
"""Seconds between two looks at the command."""
MOST_UNSENT_BYTES = 1 << 20
"""While more waits to be sent, what ranks print waits in their logs."""


def hello(**more: Any) -> Message:
    """Return the first message: the facts about this host that the leader needs for the plan, and ``more`` fields."""
    environ = environment.clean(environment.caller())
    return {
        "event": "hello",
        "version": mtrain.__version__,
        "host": os.uname().nodename,
        "addresses": [list(pair) for pair in placement.own_addresses()],
        "cores": placement.usable_cores(),
        "free_bytes": bounds.available_bytes(),
        "devices": placement.count_devices(environ),
        "hidden": placement.hides_devices(environ),
        "cwd": os.getcwd(),
        "pid": os.getpid(),
        **more,
    }


class Agent:
    """Serves a leader until the leader sends its farewell or is lost. Runs in the main thread of its process."""

    def __init__(self, channel: Channel, requests: Requests, *, note: Callable[[str], None] | None = None) -> None:
        """``note`` shows a line to whoever started this process by hand; None: nobody did."""
        self._channel = channel
        self._note = note
        self._requests = requests
        self._run: RunFolder | None = None
        self._command: HostCommand | None = None
        """The command of the attempt that is running."""
        self._node = 0
        self._held: tuple[Path, int] | None = None
        """The run folder that is locked already, and the number of this host there."""
        self._resources = ExitStack()
        self._sent = 0
        """How many of ``requests`` the leader has been told about."""
        self._saves_sent = 0
        self._farewell: Farewell | None = None
        self._fact_collector: Any = None
        self._metrics = self._resources.enter_context(closing(HostMetrics()))
        self._verbs: dict[str, Callable[[Message], dict[str, Any]]] = {
            "names": self._names,
            "port": self._port,
            "check": self._check,
            "prepare": self._prepare,
            "resume": self._resume,
            "newest": self._newest,
            "failed": self._fail,
        }

    def serve(self) -> Farewell:
        """Carry out the leader's messages until its farewell, which is returned.

        Raises:
            Lost: the connection to the leader has ended; every process that was started has been ended.
        """
        with self._resources:  # Whatever ends this loop, the command is closed and the run folder is released.
            while self._farewell is None:
                self._pass_on_requests()
                if self._requests.count > 1 and self._run is None:
                    return Farewell(code=EXIT_CODES[self._requests.first or signal.SIGTERM], text=NOTHING)
                self._pass_on_events()
                message = self._channel.wait(IDLE_S if self._command is None else POLL_S)
                if message is not None:
                    self._take(message)
        if self._farewell.discard and self._run is not None:
            shutil.rmtree(self._run.path, ignore_errors=True)
        return self._farewell

    def _take(self, message: Message) -> None:
        """Handle one message, also while an attempt runs."""
        verb = message.get("do")
        if verb == "bye":
            self._farewell = Farewell.of(message)
        elif verb == "start":
            self._start(message)
        elif verb == "note" and self._note is not None:
            self._note(str(message.get("text", "")))
        elif "ask" in message:
            self._channel.send({"answer": message["ask"], **self._answer(str(verb), message)})
        elif self._command is not None:
            if verb == "hang":
                self._metrics.note_hang(message["report"])
            self._command.obey(message)

    def _pass_on_requests(self) -> None:
        """Report signals that this process has received: the leader then ends the whole job, or has it saved."""
        if self._requests.count > self._sent:
            self._sent = self._requests.count
            number = int(self._requests.first or signal.SIGTERM)
            self._channel.send({"event": "asked", "signal": number, "times": self._requests.count})
            if self._command is not None:
                # The leader's word may come after a starter that was signalled too has ended. A second signal means that
                # somebody wants the end now, even if the leader does not answer.
                self._command.kill() if self._requests.count > 1 else self._command.ask_to_end(number)
        if self._requests.saves > self._saves_sent:
            self._saves_sent = self._requests.saves
            self._channel.send({"event": "save"})

    # ---------------------------------------------------------------------------------------------------------- answers
    def _answer(self, verb: str, message: Message) -> dict[str, Any]:
        with messages.collect_warnings() as warnings:
            answer = self._carry_out(verb, message)
        if "error" in answer:
            return {**answer, "error": "; ".join([str(answer["error"]), *warnings])}
        return {**answer, messages.WARNINGS: warnings} if warnings else answer

    def _carry_out(self, verb: str, message: Message) -> dict[str, Any]:
        try:
            if verb in self._verbs:
                return self._verbs[verb](message)
            return self._collect_facts(message)
        except MtrainError as error:
            return {"error": str(error), "code": error.exit_code}
        except Exception as error:  # The leader reports it to the user; the agent must keep running.
            return {"error": f"{type(error).__name__}: {error}", "code": 1}

    def _collect_facts(self, message: Message) -> dict[str, Any]:
        from mtrain.jobs.preflight.facts import FactCollector

        self._fact_collector = self._fact_collector or self._resources.enter_context(closing(FactCollector()))
        return dict(self._fact_collector.answer(message))

    def _names(self, message: Message) -> dict[str, Any]:
        return {"names": runfolder.names_like(Path(message["base"]), message["name"])}

    def _port(self, message: Message) -> dict[str, Any]:
        return {"port": placement.free_port(_own_address(message["address"]))}

    def _check(self, message: Message) -> dict[str, Any]:
        from mtrain.jobs.preflight import job_checks
        from mtrain.spec import config
        from mtrain.spec.resolved import Resolved

        _enter(message.get("cwd"))
        job = Resolved.of(config.from_json(message["spec"]))
        resumed = Path(message["resumed"]) if message.get("resumed") else None
        notes = job_checks.check(job, size=message["size"], training=message["training"], resumed=resumed)
        return {"notes": notes}

    def _prepare(self, message: Message) -> dict[str, Any]:
        _enter(message.get("cwd"))
        log_dir = message.get("log_dir")
        run = RunFolder(Path(message["run_dir"]), Path(log_dir) if log_dir else None, node=message["node"])
        # The leader prepares again for a restart with other files; the folder is made and locked once.
        if self._run is None:
            runfolder.keep_private()
            run.make()
            self._hold(run, message["node"], wait_s=float(message.get("wait_s", 0.0)))
        for name, text in messages.unpack_files(message["files"]).items():
            path = run.path / Path(name).name
            if ".next." not in name:  # A pending file that a refused job has left would be read in place of this one.
                runfolder.pending(path).unlink(missing_ok=True)
            runfolder.write_once(path, text)
        self._run, self._node = run, message["node"]
        place = message.get("metrics")
        self._metrics.open(None if place is None else MetricsPlace(**place), run.path)
        return {}

    def _hold(self, run: RunFolder, node: int, *, wait_s: float) -> None:
        """Lock the folder, waiting up to ``wait_s`` for an agent of an earlier attempt that is still ending."""
        # "resume" has locked the folder before the checkpoint was chosen, and "prepare" asks for the same lock.
        if self._held == (run.path.absolute(), node):
            return
        deadline = time.monotonic() + wait_s
        while True:
            try:
                self._resources.enter_context(runfolder.take_folder(run, node=node))
                self._held = (run.path.absolute(), node)
                return
            except UsageError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(IDLE_S)

    def _resume(self, message: Message) -> dict[str, Any]:
        from mtrain.jobs.resume import fetch, find

        _enter(message.get("cwd"))
        given, copy_to = message["given"], message.get("copy_to")
        resume = find.choose_under_lock(
            lambda: fetch.fetch_resume(given, base=Path(message["base"]), name=message["name"], copy_to=copy_to),
            lambda run: self._hold(RunFolder(run), message["own_node"], wait_s=0.0),
        )
        checkpoint = None if resume.checkpoint is None else str(resume.checkpoint.absolute())
        return {"run": str(resume.run.absolute()), "checkpoint": checkpoint}

    def _newest(self, message: Message) -> dict[str, Any]:
        from mtrain.core.checkpoint import store

        checkpoint = store.newest(self._run.checkpoints) if self._run is not None else None
        return {"checkpoint": None if checkpoint is None else str(checkpoint)}

    def _fail(self, message: Message) -> dict[str, Any]:
        del message
        self._metrics.fail(stop=lambda: self._channel.lost is not None or self._requests.any())
        return {}

    # --------------------------------------------------------------------------------------------------------- attempts
    def _start(self, message: Message) -> None:
        assert self._run is not None, "the leader prepares before it starts"
        orders = Orders.of(message)
        self._channel.silence_s = orders.silence_s
        self._metrics.begin(AttemptFacts.of(message))
        try:
            command = HostCommand(orders, self._run, environ=command_environment(orders), leftover_s=LEFTOVER_S)
        except MtrainError as error:
            self._channel.send({"event": "ended", "status": 1, "log": "", "error": str(error)})
            return
        self._command = command
        self._resources.callback(command.close)

    def _pass_on_events(self) -> None:
        """Send the new events of the command to the leader."""
        # Ranks may print faster than the network takes it, and events that decide about the job must not wait behind that.
        with_output = self._channel.unsent_bytes < MOST_UNSENT_BYTES
        for event in self._command.events(with_output=with_output) if self._command is not None else ():
            self._channel.send(event)
            if event["event"] == "ended":
                self._command = None


def command_environment(orders: Orders) -> dict[str, str]:
    """Return the environment of the command: this host's, the forwarded one, and its network interface."""
    # gloo takes the interface of the host's own name, which on Debian and Ubuntu means 127.0.1.1 and reaches nobody.
    environ = {**environment.clean(environment.caller()), **orders.forwarded}
    addresses = placement.own_addresses()
    interface = placement.interface_of(addresses, [orders.host, *placement.resolve(orders.host)])
    if interface is None and orders.host.startswith("127."):
        interface = placement.interface_of(addresses, [placement.LOOPBACK])
    pinned = () if interface is None else placement.INTERFACE_VARIABLES
    return environ | dict.fromkeys(pinned, str(interface))


def _own_address(host: str) -> str:
    """Return the address of this machine that ``host`` means.

    Raises:
        UsageError: ``host`` is no address of this machine.
    """
    own_address = next((address for address in (host, *placement.resolve(host)) if placement.is_own(address)), None)
    if own_address is None:
        raise UsageError(
            f"{host} is no address of {os.uname().nodename}, whose addresses are "
            f"{', '.join(address for _, address in placement.own_addresses())}; correct --ips"
        )
    return own_address


def _enter(folder: str | None) -> None:
    """Make ``folder`` the working directory."""
    if folder is None:
        return
    try:
        # A missing one is created, because the run folder is created below it anyway.
        os.makedirs(folder, exist_ok=True)
        os.chdir(folder)
    except OSError as error:
        raise UsageError(
            f"the folder {folder}, in which the job was started, cannot be entered on {os.uname().nodename}: "
            f"{error.strerror or error}; make it there, or start the job in one that is"
        ) from error


def main() -> int:
    """Serve the leader at the other end of standard input and output; return the exit code."""
    # A scheduler may send SIGUSR1 before ``Requests`` takes it, and by default it ends a process.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    incoming, outgoing = os.dup(0), os.dup(1)
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)  # Output of libraries must not get between the messages on standard output.
    channel = Channel(incoming, outgoing, peer="leader", silence_s=FIRST_MESSAGE_S)
    channel.send(hello())
    try:
        with Requests() as requests, processes.adopting_orphans():
            farewell = Agent(channel, requests).serve()
    except Lost as lost:
        text = f"the leader of the job is lost: {lost}; everything of it was ended on this host"
        farewell = Farewell(code=1, text=text)
    finally:
        channel.close()
    if farewell.text:
        terminal.say(farewell.text, err=True)
    return farewell.code


if __name__ == "__main__":
    sys.exit(main())
