"""The agent of a host: the process that starts a job's command on that host, watches it, and reports to the leader.

``python -m mtrain.cluster.agent`` communicates over its standard input and output when ssh or the leader itself starts
it. On hosts where the job is started by hand, ``rendezvous.py`` gives it a socket. Its own output goes to standard
error.

Messages from the leader. Those with an answer are sent with ``channel.ask``:

=========  ==========================================================  =================================================
do         fields                                                      answer
=========  ==========================================================  =================================================
names      base, name                                                  names: existing folders ``name``, ``name-2`` ...
port       address, port (0: any)                                      port: one that is free at ``address`` just now
check      spec, size, training, resumed, cwd                          notes: those of ``preflight.check`` on this host
prepare    run_dir, log_dir, node, files {name: text}, cwd, wait_s     empty; the folder was made, locked and written
resume     given, base, name, cwd                                      run, checkpoint; see ``runfolder.find_resume``
newest     none                                                        checkpoint: path of the newest intact one or null
start      ``Orders``                                                  none; events follow, "ended" is the last of them
stop       signal                                                      none; the ranks are asked to save and end
end        none                                                        none; all processes of the attempt are killed
bye        ``Farewell``                                                none; the agent ends
facts ...  see ``facts.py``                                            what ``FactCollector.answer`` returns
=========  ==========================================================  =================================================

Events that the agent sends (``{"event": ...}``):

=======  ===============================================================================================================
hello    the first message: version, host (its name), addresses [[interface, address]], cores, devices, hidden, cwd,
         pid; where the job is started by hand also the description that the first host compares, see ``rendezvous.py``
record   record: a line of ``metrics.jsonl`` (host of rank 0)
failure  failure: the file that a failed rank wrote (``failures/rank-N.json``), age_s: seconds since it was written
ended    status, log (of the command), logs {rank: last lines}, ended_here (the agent has killed it), full (the disk of
         its run folder is full), summary, error
asked    signal: this process received a signal to end the job; times: how many by now
=======  ===============================================================================================================

A leader that closes the channel or is silent for too long is lost: the agent kills what it started, and ends.
"""

import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import mtrain
from mtrain.cluster.channel import Channel, Lost, Message
from mtrain.cluster.farewell import Farewell
from mtrain.core.interfaces import Command
from mtrain.errors import MtrainError, UsageError
from mtrain.jobs.attempt import Attempt, Patience
from mtrain.jobs.supervisor import EXIT_CODES, NOTHING
from mtrain.report.history import Record
from mtrain.system import disk, environment, placement, processes, runfolder
from mtrain.system.processes import Requests
from mtrain.system.runfolder import RunFolder

LOG_CHARACTERS = 256 * 1024
"""How many characters of the command's output are sent, counted from its end, where it names the rank that failed."""
FIRST_MESSAGE_S = 60.0
"""Seconds of silence after which a peer is lost, until the leader sets another limit with its orders."""
IDLE_S = 0.5
"""Seconds between two looks at signals while no attempt runs, and between two tries to lock the run folder."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Orders:
    """How to run a host's command once: the fields of a "start" message."""

    host: str
    """This host's address in the list of hosts."""
    argv: list[str]
    """The command."""
    env: dict[str, str]
    """Variables that the plan sets for the command."""
    forwarded: dict[str, str]
    """Variables of the leader's environment. They override this host's own, and ``env`` overrides them."""
    starts_ranks: bool
    """Whether the command starts the ranks itself, as torchrun does."""
    first_rank: int
    """The first rank on this host."""
    ranks: int
    """How many ranks run on this host."""
    silence_s: float
    """Seconds of silence after which the leader is lost."""
    failure_s: float
    """Seconds that the other ranks have to end after one has failed."""
    poll_s: float = 0.1
    """Seconds between two looks at the command."""

    @classmethod
    def of(cls, message: Mapping[str, Any]) -> "Orders":
        """Read the orders from a message that may have other fields as well."""
        return cls(**{field.name: message[field.name] for field in fields(cls) if field.name in message})


def hello(**more: Any) -> Message:
    """Return the first message: the facts about this host that the leader needs for the plan, and ``more`` fields."""
    environ = environment.cleaned(environment.caller())
    return {
        "event": "hello",
        "version": mtrain.__version__,
        "host": os.uname().nodename,
        "addresses": [list(pair) for pair in placement.own_addresses()],
        "cores": placement.usable_cores(),
        "devices": placement.count_devices(environ),
        "hidden": placement.hides_devices(environ),
        "cwd": os.getcwd(),
        "pid": os.getpid(),
        **more,
    }


class Agent:
    """Serves a leader until the leader sends its farewell or is lost. Runs in the main thread of its process."""

    def __init__(self, channel: Channel, requests: Requests) -> None:
        self._channel = channel
        self._requests = requests
        self._remote_requests = _RemoteRequests()
        self._run: RunFolder | None = None
        self._node = 0
        self._resources = ExitStack()
        self._sent = 0
        """How many of ``requests`` the leader has been told about."""
        self._farewell: Farewell | None = None
        self._fact_collector: Any = None
        self._verbs: dict[str, Callable[[Message], dict[str, Any]]] = {
            "names": self._names,
            "port": self._port,
            "check": self._check,
            "prepare": self._prepare,
            "resume": self._resume,
            "newest": self._newest,
        }

    def serve(self) -> Farewell:
        """Carry out the leader's messages until its farewell, which is returned.

        Raises:
            Lost: the connection to the leader has ended; every process that was started has been ended.
        """
        with self._resources:
            while self._farewell is None:
                self.pass_on_requests()
                if self._requests.count > 1 and self._run is None:
                    return Farewell(code=EXIT_CODES[self._requests.first or signal.SIGTERM], text=NOTHING)
                message = self._channel.wait(IDLE_S)
                if message is None:
                    continue
                if message.get("do") == "start":
                    self._attempt(message)
                else:
                    self.take(message)
        if self._farewell.discard and self._run is not None:
            shutil.rmtree(self._run.path, ignore_errors=True)
        return self._farewell

    def take(self, message: Message) -> None:
        """Handle one message, also while an attempt runs; "stop", "end" and "bye" end that attempt."""
        verb = message.get("do")
        if verb == "bye":
            self._farewell = Farewell.of(message)
            self._remote_requests.end_at_once()
        elif verb == "stop":
            self._remote_requests.ask_to_end(signal.Signals(int(message.get("signal", signal.SIGTERM))))
        elif verb == "end":
            self._remote_requests.end_at_once()
        elif "ask" in message:
            self._channel.send({"answer": message["ask"], **self._answer(str(verb), message)})

    def pass_on_requests(self) -> None:
        """Report signals that this process has received: the leader then ends the whole job.

        From the second signal on, the attempt on this host is ended at once, without waiting for the leader.
        """
        if self._requests.count > self._sent:
            self._sent = self._requests.count
            number = int(self._requests.first or signal.SIGTERM)
            self._channel.send({"event": "asked", "signal": number, "times": self._requests.count})
            if self._requests.count > 1:
                self._remote_requests.end_at_once()

    # ---------------------------------------------------------------------------------------------------------- answers
    def _answer(self, verb: str, message: Message) -> dict[str, Any]:
        try:
            if verb in self._verbs:
                return self._verbs[verb](message)
            return self._collect_facts(message)
        except MtrainError as error:
            return {"error": str(error), "code": error.exit_code}
        except Exception as error:  # The leader reports it to the user; the agent must keep running.
            return {"error": f"{type(error).__name__}: {error}", "code": 1}

    def _collect_facts(self, message: Message) -> dict[str, Any]:
        from mtrain.cluster.preflight.facts import FactCollector

        self._fact_collector = self._fact_collector or self._resources.enter_context(_closing(FactCollector()))
        return dict(self._fact_collector.answer(message))

    def _names(self, message: Message) -> dict[str, Any]:
        return {"names": runfolder.names_like(Path(message["base"]), message["name"])}

    def _port(self, message: Message) -> dict[str, Any]:
        address = _own_address(message["address"])
        if message["port"]:
            placement.check_port(address, message["port"])
            return {"port": message["port"]}
        return {"port": placement.free_port(address)}

    def _check(self, message: Message) -> dict[str, Any]:
        from mtrain.jobs import preflight
        from mtrain.spec import config

        _enter(message.get("cwd"))
        spec = config.from_json(message["spec"])
        resumed = Path(message["resumed"]) if message.get("resumed") else None
        notes = preflight.check(spec, size=message["size"], training=message["training"], resumed=resumed)
        return {"notes": notes}

    def _prepare(self, message: Message) -> dict[str, Any]:
        _enter(message.get("cwd"))
        log_dir = message.get("log_dir")
        run = RunFolder(Path(message["run_dir"]), Path(log_dir) if log_dir else None, node=message["node"])
        if self._run is None:
            runfolder.keep_private()
            run.make()
            self._hold(run, message["node"], wait_s=float(message.get("wait_s", 0.0)))
        for name, text in message["files"].items():
            path = run.path / Path(name).name
            if ".next." not in name:  # A pending file that a refused job has left would be read in place of this one.
                runfolder.pending(path).unlink(missing_ok=True)
            runfolder.write_once(path, text, writer=message["node"])
        self._run, self._node = run, message["node"]
        return {}

    def _hold(self, run: RunFolder, node: int, *, wait_s: float) -> None:
        """Lock the folder, waiting up to ``wait_s`` for an agent of an earlier attempt that is still ending."""
        deadline = time.monotonic() + wait_s
        while True:
            try:
                self._resources.enter_context(runfolder.taken(run, node=node))
                return
            except UsageError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(IDLE_S)

    def _resume(self, message: Message) -> dict[str, Any]:
        _enter(message.get("cwd"))
        resume = runfolder.find_resume(message["given"], base=Path(message["base"]), name=message["name"])
        return {"run": str(resume.run.absolute()), "checkpoint": str(resume.checkpoint.absolute())}

    def _newest(self, message: Message) -> dict[str, Any]:
        from mtrain.core.checkpoint import store

        checkpoint = store.newest(self._run.checkpoints) if self._run is not None else None
        return {"checkpoint": None if checkpoint is None else str(checkpoint)}

    # --------------------------------------------------------------------------------------------------------- attempts
    def _attempt(self, message: Message) -> None:
        assert self._run is not None, "the leader prepares before it starts"
        orders = Orders.of(message)
        self._channel.silence_s = orders.silence_s
        self._remote_requests.reset()
        listener = _Reporter(self, self._channel)
        attempt = Attempt(
            command=Command(host=orders.host, argv=orders.argv, env=orders.env),
            run_folder=self._run,
            environ=self._environ(orders),
            starts_ranks=orders.starts_ranks,
            listener=listener,
            asked=self._remote_requests,
            patience=Patience(poll_s=orders.poll_s, failure_s=orders.failure_s, leftover_s=1.0),
            ranks=range(orders.first_rank, orders.first_rank + orders.ranks),
            reads_records=orders.first_rank == 0,
        )
        listener.attempt = attempt
        try:
            ending = attempt.run()
        except MtrainError as error:
            self._channel.send({"event": "ended", "status": 1, "log": "", "error": str(error)})
            return
        listener.report_failures()
        self._channel.send(
            {
                "event": "ended",
                "status": ending.status,
                "log": ending.log[-LOG_CHARACTERS:],
                "ended_here": ending.ended_here,
                "full": disk.is_full(self._run.path),
                "logs": {str(rank): text for rank, text in ending.rank_logs.items()},
                "summary": _read(self._run.summary) if orders.first_rank == 0 else None,
            }
        )

    def _environ(self, orders: Orders) -> dict[str, str]:
        """Return the environment of the command: this host's, the forwarded one, and its network interface."""
        environ = {**environment.cleaned(environment.caller()), **orders.forwarded}
        addresses = placement.own_addresses()
        interface = placement.interface_of(addresses, [orders.host, *placement.resolve(orders.host)])
        if interface is None and orders.host.startswith("127."):
            interface = placement.interface_of(addresses, [placement.LOOPBACK])
        pinned = () if interface is None else placement.INTERFACE_VARIABLES
        return environ | dict.fromkeys(pinned, str(interface))


class _RemoteRequests:
    """The leader's requests to end an attempt, in the form in which ``Attempt`` reads signals of its own process."""

    first_at: float | None = None
    """Always None: the time of the first request is known to the leader, which words the reason of the end."""

    def __init__(self) -> None:
        self.count = 0
        self.first: signal.Signals | None = None

    def reset(self) -> None:
        """Forget all requests, before another attempt."""
        self.count, self.first = 0, None

    def ask_to_end(self, number: signal.Signals) -> None:
        """Ask the ranks to save and end, as a first signal does."""
        self.first = self.first or number
        self.count = max(self.count, 1)

    def end_at_once(self) -> None:
        """End the attempt without saving, as a second signal does."""
        self.first = self.first or signal.SIGTERM
        self.count = max(self.count, 2)


class _Reporter:
    """Listener of an attempt that sends its events to the leader, and handles the leader's messages meanwhile."""

    def __init__(self, agent: Agent, channel: Channel) -> None:
        self.attempt: Attempt | None = None
        self._agent = agent
        self._channel = channel
        self._sent: set[tuple[Any, Any]] = set()

    def record(self, record: Record) -> None:
        """Send a record to the leader, which shows it."""
        self._channel.send({"event": "record", "record": record})

    def note(self, text: str) -> None:
        """Do nothing: a note of the attempt only repeats what the leader has asked for."""

    def tick(self) -> None:
        """Handle the leader's messages; end the attempt where the leader is lost."""
        self._agent.pass_on_requests()
        for message in self._channel.receive():
            self._agent.take(message)
        if self._channel.lost is not None:
            self._agent.take({"do": "end"})
        self.report_failures()

    def report_failures(self) -> None:
        """Send the failures of ranks, each one once."""
        for failure in self.attempt.failures() if self.attempt is not None else ():
            key = failure.get("rank"), failure.get("time")
            if key not in self._sent:
                self._sent.add(key)
                age = time.time() - float(failure.get("time") or time.time())
                self._channel.send({"event": "failure", "failure": failure, "age_s": age})


class _closing:
    """Context manager that closes an object with a ``close`` method on exit."""

    def __init__(self, resource: Any) -> None:
        self._resource = resource

    def __enter__(self) -> Any:
        return self._resource

    def __exit__(self, *error: object) -> None:
        self._resource.close()


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
    """Make ``folder`` the working directory.

    A missing one is created, because the run folder is created below it anyway.
    """
    if folder is None:
        return
    try:
        os.makedirs(folder, exist_ok=True)
        os.chdir(folder)
    except OSError as error:
        raise UsageError(
            f"the folder {folder}, in which the job was started, cannot be entered on {os.uname().nodename}: "
            f"{error.strerror or error}; make it there, or start the job in one that is"
        ) from error


def _read(path: Path) -> dict[str, Any] | None:
    """Return the JSON object in a file, or None where there is none."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def main() -> int:
    """Serve the leader at the other end of standard input and output; return the exit code."""
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
        print(farewell.text, file=sys.stderr, flush=True)
    return farewell.code


if __name__ == "__main__":
    sys.exit(main())
