"""Agents that one process starts on all hosts: through a command such as ssh, or as a child process on this machine."""

import os
import shutil
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import mtrain
from mtrain.core.interfaces import HostedJob
from mtrain.errors import LaunchError
from mtrain.jobs.hosts import start_failures
from mtrain.jobs.hosts.channel import Channel, Lost
from mtrain.jobs.hosts.channel_thread import ChannelThread
from mtrain.jobs.hosts.hosts import Member
from mtrain.jobs.hosts.messages import Message
from mtrain.jobs.hosts.start_failures import SSH, Means
from mtrain.jobs.plan.commands import AGENT
from mtrain.jobs.preflight.findings import Finding
from mtrain.system import placement, processes

MAX_CONNECTING = 64
"""Most commands that run before the hello of their agent has come; further hosts wait for their turn."""
FILES_PER_HOST = 3
"""Files that this process keeps open for each host: standard input, output and error of its command."""
FLUSH_S = 1.0
"""Seconds that the last messages to a host may take."""
SILENT_END_S = 0.2
"""Seconds that the command may take to end if its host has been silent."""
MAX_SHOWN = 300
"""How many characters are shown of what a login shell has printed."""
RETRY_S = 10.0
"""Seconds between two tries to start the agent of a host that an elastic job does without, and that one may take."""
CLOSING_S = 5.0
"""Seconds that the command may take to end after its agent has."""
POLL_S = 0.02
"""Seconds between two looks at the agents that have not said hello."""


MAX_LINES = 40
"""How many lines are kept."""
MAX_CHARACTERS = 500
"""How much is kept of each."""
TICK_S = 3600.0
_CHUNK_BYTES = 1 << 16


class StderrLines:
    """Reads one pipe to its end. The thread of a channel does so, see ``channel_thread.Served``."""

    def __init__(self, descriptor: int, *, thread: ChannelThread) -> None:
        self.incoming = descriptor
        self.outgoing: int | None = None
        self.is_over = False
        self.lines: deque[str] = deque(maxlen=MAX_LINES)
        self._partial = b""
        self._finished = threading.Event()
        os.set_blocking(descriptor, False)
        thread.serve(self)

    def wait(self, timeout_s: float) -> None:
        """Wait until everything was read, or ``timeout_s`` seconds."""
        self._finished.wait(timeout_s)

    def tick(self, now: float) -> float:
        """Do nothing: nothing is ever due."""
        return now + TICK_S

    def read(self) -> None:
        """Read what the command has written."""
        try:
            content = os.read(self.incoming, _CHUNK_BYTES)
        except BlockingIOError:
            return
        self.is_over = not content
        *lines, self._partial = (self._partial + content).split(b"\n")
        if self.is_over and self._partial:
            lines.append(self._partial)
        self._partial = self._partial[:_CHUNK_BYTES]
        self.lines.extend(line.decode(errors="replace").rstrip()[:MAX_CHARACTERS] for line in lines)

    def write(self) -> None:
        """Write nothing."""

    def fail(self, error: Exception) -> None:
        """Stop reading."""
        del error
        self.is_over = True

    def finish(self) -> None:
        """Close the pipe."""
        os.close(self.incoming)
        self._finished.set()


@dataclass(kw_only=True)
class Line:
    """The process that connects an agent (a command, or the agent itself on this machine), and the channel to it."""

    host: str
    """The host's address in the list of hosts."""
    node: int
    """Index of the host in that list."""
    channel: Channel
    process: "subprocess.Popen[bytes]"
    stderr: StderrLines
    """Last lines of the standard error of ``process``."""
    local: bool = False
    """Whether the agent is a child of this process."""
    means: Means = SSH
    """The program that reaches the host, for messages."""

    @property
    def is_silent(self) -> bool:
        """Return whether the host was lost because it fell silent."""
        return self.channel.lost is not None and self.channel.lost.is_silence

    def end(self, *, wait_s: float) -> None:
        """Close the connection, upon which an agent that still runs ends what it has started.

        The process may take ``wait_s`` to end; then it and its children are killed.
        """
        end_lines([self], wait_s=lambda line: wait_s)

    def has_ended(self, *, wait_s: float) -> bool:
        """Return whether the process has ended, at the latest after ``wait_s``."""
        try:
            self.process.wait(wait_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def last_words(self) -> str:
        """Return how the process ended and the last line that it wrote, or "" where it still runs."""
        if not self.has_ended(wait_s=1.0):
            return ""
        status = self.process.wait()
        self.stderr.wait(1.0)
        name = "its agent" if self.local else self.means.name
        how = f"{name} ended with " + (f"signal {-status}" if status < 0 else f"exit code {status}")
        return f"{how}: {self.stderr.lines[-1]}" if self.stderr.lines else how


def end_lines(lines: Sequence[Line], *, wait_s: Callable[[Line], float]) -> None:
    """End the connections to hosts as ``Line.end`` does, so that those which take their time do so beside one another."""
    # Only silence shortens the wait. An agent that was told to end may have closed its end first and needs its time to exit.
    ends_at = [
        time.monotonic() + (min(SILENT_END_S, wait_s(line)) if line.is_silent else wait_s(line)) for line in lines
    ]
    for line in lines:
        line.channel.begin_closing(flush_s=FLUSH_S)
    for line in lines:
        line.channel.close(flush_s=FLUSH_S)
    remaining = [
        line
        for line, at in zip(lines, ends_at, strict=True)
        if not line.has_ended(wait_s=max(0.0, at - time.monotonic()))
    ]
    # Such as an agent on this machine that hangs, or an ssh whose host has gone.
    processes.end_trees([line.process.pid for line in remaining])
    for line in lines:
        line.process.wait()
        line.stderr.wait(1.0)


def open_line(  # noqa: PLR0913 - what a process and its channel need
    host: str,
    node: int,
    *,
    argv: Sequence[str],
    environ: Mapping[str, str],
    local: bool = False,
    means: Means = SSH,
    thread: ChannelThread | None = None,
) -> Line:
    """Start the process that connects the agent of ``host``.

    Call it from the main thread: the process ends with that thread.

    Args:
        host: the host's address.
        node: the host's index in the list of hosts.
        argv: the command that starts the agent on the host, or with ``local`` the agent itself.
        environ: environment of the process.
        local: whether the agent is a child of this process.
        means: the program that reaches the host, for messages.
        thread: reads and writes for this host and others; None: it gets one of its own.

    Raises:
        LaunchError: the command is not installed.
    """
    if not local and shutil.which(argv[0]) is None:
        install = "the OpenSSH client" if argv[0] == "ssh" else "it"
        raise LaunchError(f"{argv[0]} is not installed here; install {install}, or start the job by hand on every host")
    process = processes.start_piped(list(argv), env=environ)
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    # The channel owns copies of the descriptors: ``Popen`` would close its own while the thread may still read.
    thread = ChannelThread(f"channel {host}", many=True) if thread is None else thread
    with process.stdin as stdin, process.stdout as stdout, process.stderr as stderr:
        incoming, outgoing, errors = (os.dup(stream.fileno()) for stream in (stdout, stdin, stderr))
    channel = Channel(incoming, outgoing, peer=host, skips_noise=True, thread=thread)
    lines = StderrLines(errors, thread=thread)
    return Line(host=host, node=node, channel=channel, process=process, stderr=lines, local=local, means=means)


def open_own_line(
    host: str,
    node: int,
    *,
    python: str,
    environ: Mapping[str, str],
    means: Means = SSH,
    thread: ChannelThread | None = None,
) -> Line:
    """Start the agent of ``host``, which is this machine, as a child of this process; otherwise like ``open_line``."""
    argv, means = (python, *AGENT), replace(means, python=python)
    return open_line(host, node, argv=argv, environ=environ, local=True, means=means, thread=thread)


def hear(line: Line, *, timeout_s: float, stop: Callable[[], bool] = lambda: False) -> Message | Finding:
    """Wait for the hello of the agent; return it, or a finding that says why there is none.

    ``stop`` ends the waiting by returning True.
    """
    deadline = time.monotonic() + timeout_s
    while (remaining_s := deadline - time.monotonic()) > 0 and not stop():
        greeting = _greeting(line, wait_s=min(remaining_s, 0.2))
        if greeting is not None:
            return greeting
    return _silence_finding(line, timeout_s)


def _greeting(line: Line, *, wait_s: float = 0.0) -> Message | Finding | None:
    """Return the hello of the agent, a finding where it cannot come any more, or None where it has not come yet."""
    try:
        message = line.channel.wait(wait_s)
    except Lost:
        return _failure_finding(line)
    if message is None or message.get("event") != "hello":
        return None
    return _check_version(line, message)


def _silence_finding(line: Line, timeout_s: float) -> Finding:
    """Return a finding on a host whose hello has not come within ``timeout_s``."""
    printed = line.channel.shell_output
    if printed:
        return _finding(
            line,
            f"no agent has come up for {timeout_s:.0f} s; its login shell printed: {' / '.join(printed)[:MAX_SHOWN]!r}",
            "log in there: what its shell reads at the start (~/.bashrc, ~/.profile) must end by itself and start "
            "nothing that waits",
        )
    return _finding(
        line,
        f"has said nothing for {timeout_s:.0f} s: {'' if line.local else f'{line.means.name} is still connecting, or '}"
        "its agent does not start",
        "log in there, and see what keeps Python from starting, or give it longer with --failure-timeout-s",
    )


def _check_version(line: Line, hello: Message) -> Message | Finding:
    """Return the hello, or a finding where the host has another version of mtrain."""
    if hello.get("version") != mtrain.__version__:
        return _finding(
            line, f"has mtrain {hello.get('version')}, expected {mtrain.__version__} as here", "install the same there"
        )
    return hello


def _failure_finding(line: Line) -> Finding:
    """Return a finding that says why the process ended before its agent sent its hello."""
    # It waits until the process has ended and its standard error was read, which may come after the end of the channel.
    line.last_words()
    return start_failures.explain(
        line.host,
        status=line.process.poll(),
        printed=[*line.channel.noise, *line.stderr.lines],
        python=line.means.python,
        local=line.local,
        means=line.means,
    )


def _finding(line: Line, text: str, remedy: str) -> Finding:
    return Finding(check=line.means.name, state="bad", hosts=(line.host,), text=text, remedy=remedy)


class AgentProcesses:
    """A ``Gathering`` that runs one command for each host, which starts the host's agent and talks to it over pipes."""

    forwards = True

    def __init__(
        self,
        job: HostedJob,
        commands: Sequence[Sequence[str]],
        *,
        environ: Mapping[str, str],
        means: Means | None = None,
        directly_here: bool = False,
    ) -> None:
        """Keep the commands for ``gather``, which runs them.

        Args:
            job: the hosts, and the agent's command line.
            commands: the command of each host. Its standard input and output must be those of the agent.
            environ: environment of the commands.
            means: the program that reaches the hosts, for messages; None: known by the name of the cluster alone.
            directly_here: whether the agent of a host that is this machine is started without the command.
        """
        self._job = job
        self._commands = commands
        self._environ = environ
        self._means = replace(means or Means(name=job.cluster), python=job.agent[0])
        self._directly_here = directly_here
        self._lines: dict[int, Line] = {}
        self._thread = ChannelThread("channels of hosts", many=True)
        self._next_try: dict[int, float] = {}
        """When the agent of an absent host may be started next, in monotonic time."""
        self._noted: set[str] = set()
        """Notes on hosts that came and do not fit; each is shown once."""

    def _open(self, node: int) -> Line:
        host = self._job.hosts[node]
        common: dict[str, Any] = {"environ": self._environ, "means": self._means, "thread": self._thread}
        if self._directly_here and placement.is_here(host):
            return open_own_line(host, node, python=sys.executable, **common)
        return open_line(host, node, argv=self._commands[node], **common)

    def gather(
        self, nodes: Sequence[int], *, timeout_s: float, stop: Callable[[], bool]
    ) -> tuple[dict[int, Member], list[Finding]]:
        """Start the agents of ``nodes``, at most ``MAX_CONNECTING`` at a time. Call it from the main thread, see ``open_line``."""
        processes.allow_open_files(FILES_PER_HOST * len(self._job.hosts), what=f"{len(self._job.hosts)} hosts")
        # Hosts that come back have a former connection, whose agent must end before a new one locks the run folder.
        self.let_go(nodes)
        members: dict[int, Member] = {}
        findings: dict[int, Finding] = {}
        waiting, deadlines = deque(nodes), dict[int, float]()
        while waiting or deadlines:
            while waiting and len(deadlines) < MAX_CONNECTING:
                node = waiting.popleft()
                self._lines[node] = self._open(node)
                # Time counts from the start of a host's own command, so that one that waits for its turn loses nothing.
                deadlines[node] = time.monotonic() + timeout_s
            stopped = stop()
            failed = []
            for node, deadline in list(deadlines.items()):
                is_late = stopped or time.monotonic() > deadline
                greeting = _greeting(self._lines[node]) or (
                    _silence_finding(self._lines[node], timeout_s) if is_late else None
                )
                if greeting is None:
                    continue
                del deadlines[node]
                if isinstance(greeting, Finding):
                    findings[node] = greeting
                    failed.append(node)
                else:
                    members[node] = self._member(node, greeting)
            self._end(failed, wait_s=lambda line: SILENT_END_S)
            if stopped:
                break
            time.sleep(POLL_S)
        in_order = {node: members[node] for node in nodes if node in members}
        return in_order, [findings[node] for node in nodes if node in findings]

    def _member(self, node: int, greeting: Message) -> Member:
        line = self._lines[node]
        return Member(node=node, host=line.host, channel=line.channel, hello=greeting)

    def arrivals(self, nodes: Sequence[int]) -> dict[int, Member]:
        """Start the agents of absent hosts, again where that failed ``RETRY_S`` ago. Call it from the main thread.

        At most ``MAX_CONNECTING`` have not spoken at a time; of the others, those come first that were not tried for longest.
        """
        now = time.monotonic()
        connecting = [node for node in nodes if node in self._lines]
        members, given_up = self._heard(connecting, now)
        # The leader of a job that runs must not wait for what never spoke.
        self._end(given_up, wait_s=lambda line: 0.0)
        waiting = [node for node in nodes if node not in self._lines and now >= self._next_try.get(node, 0.0)]
        places = MAX_CONNECTING - (len(connecting) - len(members) - len(given_up))
        for node in sorted(waiting, key=lambda node: self._next_try.get(node, 0.0))[: max(0, places)]:
            self._next_try[node] = now + RETRY_S
            self._lines[node] = self._open(node)
        return members

    def _heard(self, nodes: Sequence[int], now: float) -> tuple[dict[int, Member], list[int]]:
        """Return the hosts that have said hello, and those whose agents are given up for now."""
        members, given_up = {}, []
        for node in nodes:
            line = self._lines[node]
            hellos = [message for message in line.channel.receive() if message.get("event") == "hello"]
            greeting = _check_version(line, hellos[0]) if hellos else None
            if isinstance(greeting, Finding):
                self._note_once(greeting.line())
                given_up.append(node)
            elif greeting is not None:
                members[node] = self._member(node, greeting)
            elif line.channel.lost is not None or now > self._next_try[node] + RETRY_S:
                given_up.append(node)
        return members, given_up

    def _note_once(self, text: str) -> None:
        if text not in self._noted:
            self._noted.add(text)
            self._job.note(text)

    def last_words(self, node: int) -> str:
        """Return how the host's command ended, see ``Line.last_words``."""
        return self._lines[node].last_words() if node in self._lines else ""

    def leave_alone(self, node: int, *, seconds: float) -> None:
        """Do not start the agent of a host before so many seconds have passed."""
        self._next_try[node] = time.monotonic() + seconds

    def let_go(self, nodes: Sequence[int]) -> None:
        """End the connections to hosts; their processes may take ``CLOSING_S`` to end."""
        self._end(nodes, wait_s=lambda line: CLOSING_S)

    def _end(self, nodes: Sequence[int], *, wait_s: Callable[[Line], float]) -> None:
        lines = [line for node in nodes if (line := self._lines.pop(node, None)) is not None]
        end_lines(lines, wait_s=wait_s)

    def close(self) -> None:
        """End all connections."""
        self.let_go(list(self._lines))
