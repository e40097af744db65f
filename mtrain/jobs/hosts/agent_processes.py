"""Agents that one process starts on all hosts: through a command such as ssh, or as a child process on this machine."""

import os
import shutil
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import mtrain
from mtrain.core.interfaces import HostedJob
from mtrain.errors import LaunchError
from mtrain.jobs.commands import AGENT
from mtrain.jobs.hosts import start_failures
from mtrain.jobs.hosts.channel import Channel, Lost, Message
from mtrain.jobs.hosts.hosts import Member
from mtrain.jobs.hosts.start_failures import SSH, Means
from mtrain.jobs.preflight.findings import Finding
from mtrain.system import placement, processes

MAX_STDERR_LINES = 40
"""How many lines are kept of what the command, or an agent, writes to its standard error."""
MAX_SHOWN = 300
"""How many characters are shown of what a login shell has printed."""
RETRY_S = 10.0
"""Seconds between two tries to start the agent of a host that an elastic job does without, and that one may take."""
CLOSING_S = 5.0
"""Seconds that the command may take to end after its agent has."""


@dataclass(kw_only=True)
class Line:
    """The process that connects an agent (a command, or the agent itself on this machine), and the channel to it."""

    host: str
    """The host's address in the list of hosts."""
    node: int
    """Index of the host in that list."""
    channel: Channel
    process: "subprocess.Popen[bytes]"
    stderr_lines: deque[str] = field(default_factory=lambda: deque(maxlen=MAX_STDERR_LINES))
    """Last lines of the standard error of ``process``."""
    local: bool = False
    """Whether the agent is a child of this process."""
    means: Means = SSH
    """The program that reaches the host, for messages."""
    _reader: threading.Thread | None = None

    def start_reading(self) -> None:
        """Start the thread that keeps the last lines of standard error."""
        self._reader = threading.Thread(target=self._read_stderr, name=f"stderr of {self.host}", daemon=True)
        self._reader.start()

    def _read_stderr(self) -> None:
        assert self.process.stderr is not None
        with self.process.stderr as stream:
            for line in stream:
                self.stderr_lines.append(line.decode(errors="replace").rstrip()[:500])

    def end(self, *, wait_s: float) -> None:
        """Close the connection, upon which an agent that still runs ends what it has started.

        The process may take ``wait_s`` to end; then it and its children are killed, such as an agent on this machine
        that hangs.
        """
        # Only silence shortens the wait. An agent that was told to end may have closed its end first and needs its time
        # to exit.
        silent = self.channel.lost is not None and self.channel.lost.is_silence
        self.channel.close()
        try:
            self.process.wait(0.2 if silent else wait_s)
        except subprocess.TimeoutExpired:
            processes.end_tree(self.process.pid)
            self.process.wait()
        if self._reader is not None:
            self._reader.join(1.0)

    def last_words(self) -> str:
        """Return how the process ended and the last line that it wrote, or "" where it still runs."""
        try:
            status = self.process.wait(1.0)
        except subprocess.TimeoutExpired:
            return ""
        if self._reader is not None:
            self._reader.join(1.0)
        name = "its agent" if self.local else self.means.name
        how = f"{name} ended with " + (f"signal {-status}" if status < 0 else f"exit code {status}")
        return f"{how}: {self.stderr_lines[-1]}" if self.stderr_lines else how


def open_line(
    host: str,
    node: int,
    *,
    argv: Sequence[str],
    environ: Mapping[str, str],
    local: bool = False,
    means: Means = SSH,
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

    Raises:
        LaunchError: the command is not installed.
    """
    if not local and shutil.which(argv[0]) is None:
        install = "the OpenSSH client" if argv[0] == "ssh" else "it"
        raise LaunchError(f"{argv[0]} is not installed here; install {install}, or start the job by hand on every host")
    process = processes.start_piped(list(argv), env=environ)
    assert process.stdin is not None
    assert process.stdout is not None
    with process.stdin as stdin, process.stdout as stdout:
        channel = Channel(os.dup(stdout.fileno()), os.dup(stdin.fileno()), peer=host, skips_noise=True)
    line = Line(host=host, node=node, channel=channel, process=process, local=local, means=means)
    line.start_reading()
    return line


def open_own_line(host: str, node: int, *, python: str, environ: Mapping[str, str], means: Means = SSH) -> Line:
    """Start the agent of ``host``, which is this machine, as a child of this process; otherwise like ``open_line``."""
    argv = (python, *AGENT)
    return open_line(host, node, argv=argv, environ=environ, local=True, means=replace(means, python=python))


def hear(line: Line, *, timeout_s: float, stop: Callable[[], bool] = lambda: False) -> Message | Finding:
    """Wait for the hello of the agent; return it, or a finding that says why there is none.

    ``stop`` ends the waiting by returning True.
    """
    deadline = time.monotonic() + timeout_s
    try:
        while (remaining_s := deadline - time.monotonic()) > 0 and not stop():
            message = line.channel.wait(min(remaining_s, 0.2))
            if message is not None and message.get("event") == "hello":
                return _check_version(line, message)
    except Lost:
        return _failure_finding(line)
    printed = line.channel.printed
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
    line.last_words()  # waits until the process has ended and its standard error was read
    return start_failures.explain(
        line.host,
        status=line.process.poll(),
        printed=[*line.channel.noise, *line.stderr_lines],
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
        self._next_try: dict[int, float] = {}
        """When the agent of an absent host may be started next, in monotonic time."""
        self._noted: set[str] = set()
        """Notes on hosts that came and do not fit; each is shown once."""

    def _open(self, node: int) -> Line:
        host = self._job.hosts[node]
        if self._directly_here and placement.is_here(host):
            return open_own_line(host, node, python=sys.executable, environ=self._environ, means=self._means)
        return open_line(host, node, argv=self._commands[node], environ=self._environ, means=self._means)

    def gather(
        self, nodes: Sequence[int], *, timeout_s: float, stop: Callable[[], bool]
    ) -> tuple[dict[int, Member], list[Finding]]:
        """Start the agents of ``nodes``, all at once. Call it from the main thread, see ``open_line``."""
        for node in nodes:
            self.let_go(node)
            self._lines[node] = self._open(node)
        deadline = time.monotonic() + timeout_s
        members, findings = {}, []
        for node in nodes:
            line = self._lines[node]
            greeting = hear(line, timeout_s=max(0.5, deadline - time.monotonic()), stop=stop)
            if isinstance(greeting, Finding):
                findings.append(greeting)
                self.let_go(node)
            else:
                members[node] = Member(node=node, host=line.host, channel=line.channel, hello=greeting)
        return members, findings

    def arrivals(self, nodes: Sequence[int]) -> dict[int, Member]:
        """Start the agents of absent hosts, again where that failed ``RETRY_S`` ago. Call it from the main thread."""
        members, now = {}, time.monotonic()
        for node in nodes:
            line = self._lines.get(node)
            if line is None:
                if now >= self._next_try.get(node, 0.0):
                    self._next_try[node] = now + RETRY_S
                    self._lines[node] = self._open(node)
                continue
            hellos = [message for message in line.channel.receive() if message.get("event") == "hello"]
            greeting = _check_version(line, hellos[0]) if hellos else None
            if isinstance(greeting, Finding):
                self._note_once(greeting.line())
                self.let_go(node)
            elif greeting is not None:
                members[node] = Member(node=node, host=line.host, channel=line.channel, hello=greeting)
            elif line.channel.lost is not None or now > self._next_try[node] + RETRY_S:
                self.let_go(node, wait_s=0.0)  # The leader of a job that runs must not wait for what never spoke.
        return members

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

    def let_go(self, node: int, *, wait_s: float = CLOSING_S) -> None:
        """End the connection to a host; its process may take ``wait_s`` to end."""
        line = self._lines.pop(node, None)
        if line is not None:
            line.end(wait_s=wait_s)

    def close(self) -> None:
        """End all connections."""
        for line in self._lines.values():
            line.channel.close(flush_s=0.5)
        for node in list(self._lines):
            self.let_go(node)
