"""The process of a job on one of its hosts: starts that host's command, watches it, tells the leader, and dies with it.

``python -m mtrain.cluster.agent`` talks over its standard input and output, as ssh or the leader itself starts it; on hosts where
the job is started by hand, ``meeting.py`` hands it a socket. What it prints itself goes to standard error.

What the leader sends (``channel.ask``; every verb is answered, those of an attempt at once):

=========  ==========================================================  =====================================================
do         fields                                                      answer
=========  ==========================================================  =====================================================
names      base, name                                                  names: folders ``name``, ``name-2`` ... that are there
port       address, port (0: any)                                      port, free at ``address`` just now
check      spec, size, training, resumed, cwd                          notes; what ``preflight.check`` says of this host
prepare    run_dir, log_dir, node, files {name: text}, cwd, wait_s     nothing; the folder is made, written and taken
resume     given, base, name, cwd                                      run, checkpoint; see ``runfolder.find_resume``
newest     nothing                                                     checkpoint: path of the newest intact one, or null
start      ``Orders``                                                  nothing; events follow, "ended" is the last of them
stop       signal                                                      nothing; the ranks are asked to save and end
end        nothing                                                     nothing; all processes of the attempt are killed
bye        code, text, discard                                         nothing; the agent ends; discard: without its run folder
facts ...  see ``facts.py``                                            what ``Witness.answer`` says
=========  ==========================================================  =====================================================

What it tells (``{"event": ...}``):

=======  =====================================================================================================================
hello    the first message: version, host (its name), addresses [[interface, address]], cores, devices, hidden, cwd, pid;
         by hand also what the leader compares, see ``meeting.py``
record   record: a line of ``metrics.jsonl`` (host of rank 0)
failure  failure: what a rank left (``failures/rank-N.json``), age_s: seconds since it was written
ended    status, log (of the command), logs {rank: last lines}, ended_here (the agent has killed it), full (the disk of its
         run folder), summary, error
asked    signal: this process was asked to end the job; times: how often by now
=======  =====================================================================================================================

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
from mtrain.core.interfaces import Command
from mtrain.errors import MtrainError, UsageError
from mtrain.jobs.attempt import Attempt, Patience
from mtrain.jobs.supervisor import EXIT_CODES, NOTHING
from mtrain.report.history import Record
from mtrain.system import disk, environment, placement, processes, runfolder
from mtrain.system.processes import Requests
from mtrain.system.runfolder import RunFolder

LOG_CHARACTERS = 256 * 1024
"""Of the command's own output: its end says who failed."""
FIRST_WORD_S = 60.0
"""Silence that is allowed before the leader says how long it may be."""
IDLE_S = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class Orders:
    """One start of a host's command, as a message says it."""

    host: str
    """This host's address in the list of hosts."""
    argv: list[str]
    env: dict[str, str]
    forwarded: dict[str, str]
    """Variables of the leader's environment; beneath those of ``env``, over this host's own."""
    starts_ranks: bool
    first_rank: int
    ranks: int
    silence_s: float
    """Without a word of the leader, after which it is lost."""
    failure_s: float
    poll_s: float = 0.1

    @classmethod
    def of(cls, message: Mapping[str, Any]) -> "Orders":
        """From a message that may hold more."""
        return cls(**{field.name: message[field.name] for field in fields(cls) if field.name in message})


def hello(**more: Any) -> Message:
    """The first message: what the leader needs to know of this host to make a plan."""
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
    """Serves a leader until it says goodbye or is lost. Lives in the main thread of its process."""

    def __init__(self, channel: Channel, requests: Requests) -> None:
        self._channel = channel
        self._requests = requests
        self._asked = _Asked()
        self._run: RunFolder | None = None
        self._node = 0
        self._held = ExitStack()
        self._told = 0
        self._farewell: tuple[int, str] | None = None
        self._discards = False
        self._witness: Any = None
        self._verbs: dict[str, Callable[[Message], dict[str, Any]]] = {
            "names": self._names,
            "port": self._port,
            "check": self._check,
            "prepare": self._prepare,
            "resume": self._resume,
            "newest": self._newest,
        }

    def serve(self) -> tuple[int, str]:
        """Do what the leader says; returns exit code and closing words.

        Raises:
            Lost: the leader has gone; nothing that was started is left.
        """
        with self._held:
            while self._farewell is None:
                self.pass_on_requests()
                if self._requests.count > 1 and self._run is None:
                    return EXIT_CODES[self._requests.first or signal.SIGTERM], NOTHING
                message = self._channel.wait(IDLE_S)
                if message is None:
                    continue
                if message.get("do") == "start":
                    self._attempt(message)
                else:
                    self.take(message)
        if self._discards and self._run is not None:
            shutil.rmtree(self._run.path, ignore_errors=True)
        return self._farewell

    def take(self, message: Message) -> None:
        """Answer one message; those of an attempt change what it is asked."""
        verb = message.get("do")
        if verb == "bye":
            self._farewell = int(message.get("code", 0)), str(message.get("text", ""))
            self._discards = bool(message.get("discard"))
            self._asked.at_once()
        elif verb == "stop":
            self._asked.politely(signal.Signals(int(message.get("signal", signal.SIGTERM))))
        elif verb == "end":
            self._asked.at_once()
        elif "ask" in message:
            self._channel.send({"answer": message["ask"], **self._answer(str(verb), message)})

    def pass_on_requests(self) -> None:
        """A signal to this process asks the leader to end the whole job; a second one ends what is here, whatever the leader does."""
        if self._requests.count > self._told:
            self._told = self._requests.count
            number = int(self._requests.first or signal.SIGTERM)
            self._channel.send({"event": "asked", "signal": number, "times": self._requests.count})
            if self._requests.count > 1:
                self._asked.at_once()

    # ---------------------------------------------------------------------------------------------------------- answers
    def _answer(self, verb: str, message: Message) -> dict[str, Any]:
        try:
            if verb in self._verbs:
                return self._verbs[verb](message)
            return self._testimony(message)
        except MtrainError as error:
            return {"error": str(error), "code": error.exit_code}
        except Exception as error:  # the leader tells it; this process serves on
            return {"error": f"{type(error).__name__}: {error}", "code": 1}

    def _testimony(self, message: Message) -> dict[str, Any]:
        from mtrain.cluster.preflight.facts import Witness

        self._witness = self._witness or self._held.enter_context(_closing(Witness()))
        return dict(self._witness.answer(message))

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
            if ".next." not in name:  # one that waits, of a job that was refused, would be read instead
                runfolder.pending(path).unlink(missing_ok=True)
            runfolder.write_once(path, text, writer=message["node"])
        self._run, self._node = run, message["node"]
        return {}

    def _hold(self, run: RunFolder, node: int, *, wait_s: float) -> None:
        """Take the folder; an agent of before, which its leader had lost, may need ``wait_s`` to end."""
        deadline = time.monotonic() + wait_s
        while True:
            try:
                self._held.enter_context(runfolder.taken(run, node=node))
                return
            except UsageError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(IDLE_S)

    def _resume(self, message: Message) -> dict[str, Any]:
        _enter(message.get("cwd"))
        found = runfolder.find_resume(message["given"], base=Path(message["base"]), name=message["name"])
        return {"run": str(found.run.absolute()), "checkpoint": str(found.checkpoint.absolute())}

    def _newest(self, message: Message) -> dict[str, Any]:
        from mtrain.core.checkpoint import store

        found = store.newest(self._run.checkpoints) if self._run is not None else None
        return {"checkpoint": None if found is None else str(found)}

    # --------------------------------------------------------------------------------------------------------- attempts
    def _attempt(self, message: Message) -> None:
        assert self._run is not None, "the leader prepares before it starts"
        orders = Orders.of(message)
        self._channel.silence_s = orders.silence_s
        self._asked.reset()
        listener = _Reporter(self, self._channel)
        attempt = Attempt(
            command=Command(host=orders.host, argv=orders.argv, env=orders.env),
            run_folder=self._run,
            environ=self._environ(orders),
            starts_ranks=orders.starts_ranks,
            listener=listener,
            asked=self._asked,
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
        listener.tell_failures()
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
        """This host's cleaned environment, the leader's forwarded one, and the interface that owns this host's address."""
        environ = {**environment.cleaned(environment.caller()), **orders.forwarded}
        addresses = placement.own_addresses()
        interface = placement.interface_of(addresses, [orders.host, *placement.resolve(orders.host)])
        if interface is None and orders.host.startswith("127."):
            interface = placement.interface_of(addresses, [placement.LOOPBACK])
        pinned = () if interface is None else placement.INTERFACE_VARIABLES
        return environ | dict.fromkeys(pinned, str(interface))


class _Asked:
    """What the leader has asked of an attempt, as ``Attempt`` looks at it."""

    first_at: float | None = None
    """The leader knows; it tells why the job ended."""

    def __init__(self) -> None:
        self.count = 0
        self.first: signal.Signals | None = None

    def reset(self) -> None:
        self.count, self.first = 0, None

    def politely(self, number: signal.Signals) -> None:
        self.first = self.first or number
        self.count = max(self.count, 1)

    def at_once(self) -> None:
        self.first = self.first or signal.SIGTERM
        self.count = max(self.count, 2)


class _Reporter:
    """Passes what happens on to the leader, and hears it."""

    def __init__(self, agent: Agent, channel: Channel) -> None:
        self.attempt: Attempt | None = None
        self._agent = agent
        self._channel = channel
        self._told: set[tuple[Any, Any]] = set()

    def record(self, record: Record) -> None:
        """To the leader, which shows it."""
        self._channel.send({"event": "record", "record": record})

    def note(self, text: str) -> None:
        """Nothing: the leader knows what it has asked."""

    def tick(self) -> None:
        """Hear the leader; without it, end."""
        self._agent.pass_on_requests()
        for message in self._channel.receive():
            self._agent.take(message)
        if self._channel.lost is not None:
            self._agent.take({"do": "end"})
        self.tell_failures()

    def tell_failures(self) -> None:
        """Each once."""
        for failure in self.attempt.failures() if self.attempt is not None else ():
            key = failure.get("rank"), failure.get("time")
            if key not in self._told:
                self._told.add(key)
                age = time.time() - float(failure.get("time") or time.time())
                self._channel.send({"event": "failure", "failure": failure, "age_s": age})


class _closing:
    """Closes what it holds, which has ``close`` and no more."""

    def __init__(self, held: Any) -> None:
        self._held = held

    def __enter__(self) -> Any:
        return self._held

    def __exit__(self, *error: object) -> None:
        self._held.close()


def _own_address(host: str) -> str:
    """``host`` as an address of this machine.

    Raises:
        UsageError: it is none.
    """
    found = next((address for address in (host, *placement.resolve(host)) if placement.is_own(address)), None)
    if found is None:
        raise UsageError(
            f"{host} is no address of {os.uname().nodename}, whose addresses are "
            f"{', '.join(address for _, address in placement.own_addresses())}; correct --ips"
        )
    return found


def _enter(folder: str | None) -> None:
    """Work in ``folder``; where it is missing it is made, as the run folder below it would be."""
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
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def main() -> int:
    """Serve the leader at the other end of standard input and output."""
    incoming, outgoing = os.dup(0), os.dup(1)
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)  # whatever prints must not end up between messages
    channel = Channel(incoming, outgoing, peer="leader", silence_s=FIRST_WORD_S)
    channel.send(hello())
    try:
        with Requests() as requests, processes.adopting_orphans():
            code, text = Agent(channel, requests).serve()
    except Lost as lost:
        code, text = 1, f"the leader of the job is lost: {lost}; everything of it was ended on this host"
    finally:
        channel.close()
    if text:
        print(text, file=sys.stderr, flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
