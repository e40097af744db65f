"""An agent on every host, started from one: over the user's own ssh, and as a plain child process where the host is this machine."""

import os
import shlex
import shutil
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import mtrain
from mtrain.cluster import start_failures
from mtrain.cluster.channel import Channel, Lost, Message
from mtrain.cluster.hosts import Member
from mtrain.cluster.preflight.findings import Finding
from mtrain.errors import LaunchError
from mtrain.system import placement, processes

AGENT = ("-m", "mtrain.cluster.agent")
KEPT_LINES = 40
MOST_SHOWN = 300
"""Characters of what a login shell has printed."""
CLOSING_S = 5.0
"""For ssh to end after its agent has."""


@dataclass(kw_only=True)
class Line:
    """The process that connects an agent, and the channel to it."""

    host: str
    node: int
    channel: Channel
    process: "subprocess.Popen[bytes]"
    said: deque[str] = field(default_factory=lambda: deque(maxlen=KEPT_LINES))
    """Last lines of its standard error."""
    local: bool = False
    """Whether the agent is a child of this process."""
    _reader: threading.Thread | None = None

    def listen(self) -> None:
        """Keep what comes over standard error."""
        self._reader = threading.Thread(target=self._keep, name=f"stderr of {self.host}", daemon=True)
        self._reader.start()

    def _keep(self) -> None:
        assert self.process.stderr is not None
        with self.process.stderr as stream:
            for line in stream:
                self.said.append(line.decode(errors="replace").rstrip()[:500])

    def end(self, *, wait_s: float) -> None:
        """Close the connection; the agent behind it, if any is left, ends what it has started.

        What is left of the process then, and of its children, is killed: of an agent on this machine that is stuck.
        """
        # An agent that was told to end may close its end before this one does: that is no reason to kill it.
        silent = (self.channel.lost or "").startswith("silent")
        self.channel.close()
        try:
            self.process.wait(0.2 if silent else wait_s)
        except subprocess.TimeoutExpired:
            processes.end_tree(self.process.pid)
            self.process.wait()
        if self._reader is not None:
            self._reader.join(1.0)

    def last_words(self) -> str:
        """Why the connection ended, as far as the process behind it says."""
        try:
            status = self.process.wait(1.0)
        except subprocess.TimeoutExpired:
            return ""
        if self._reader is not None:
            self._reader.join(1.0)
        name = "its agent" if self.local else "ssh"
        how = f"{name} ended with " + (f"signal {-status}" if status < 0 else f"exit code {status}")
        return f"{how}: {self.said[-1]}" if self.said else how


def is_here(host: str) -> bool:
    """Whether a host of the list is this machine."""
    return any(placement.is_own(address) for address in (host, *placement.resolve(host)))


def open_line(
    host: str, node: int, *, brought: Sequence[str], python: str, environ: Mapping[str, str], local: bool | None = None
) -> Line:
    """Start the process that connects the agent of ``host``. Call it from the main thread: the process ends with it.

    Args:
        host: its address.
        node: its place among the hosts.
        brought: the command that gets there.
        python: interpreter for an agent on this machine.
        environ: of the process.
        local: whether ``host`` is this machine; None: found from its addresses.

    Raises:
        LaunchError: it cannot be started.
    """
    local = is_here(host) if local is None else local
    argv = [python, *AGENT] if local else list(brought)
    if not local and shutil.which(argv[0]) is None:
        raise LaunchError(
            f"{argv[0]} is not installed here; install the OpenSSH client, or start the job by hand on every host"
        )
    process = processes.start_piped(argv, env=environ)
    assert process.stdin is not None
    assert process.stdout is not None
    with process.stdin as stdin, process.stdout as stdout:
        channel = Channel(os.dup(stdout.fileno()), os.dup(stdin.fileno()), peer=host, behind_noise=True)
    line = Line(host=host, node=node, channel=channel, process=process, local=local)
    line.listen()
    return line


def hear(line: Line, *, timeout_s: float, stop: Callable[[], bool] = lambda: False) -> Message | Finding:
    """The first message of the agent, or why there is none; ``stop``: whether to wait no longer."""
    deadline = time.monotonic() + timeout_s
    try:
        while (left := deadline - time.monotonic()) > 0 and not stop():
            message = line.channel.wait(min(left, 0.2))
            if message is not None and message.get("event") == "hello":
                return _judged(line, message)
    except Lost:
        return _unreached(line)
    printed = line.channel.printed
    if printed:
        return _finding(
            line,
            f"no agent has come up for {timeout_s:.0f} s; its login shell printed: {' / '.join(printed)[:MOST_SHOWN]!r}",
            "log in there: what its shell reads at the start (~/.bashrc, ~/.profile) must end by itself and start nothing that waits",
        )
    return _finding(
        line,
        f"has said nothing for {timeout_s:.0f} s: {'' if line.local else 'ssh is still connecting, or '}its agent does not start",
        "log in there, and see what keeps Python from starting, or give it longer with --failure-timeout-s",
    )


def _judged(line: Line, hello: Message) -> Message | Finding:
    if hello.get("version") != mtrain.__version__:
        return _finding(
            line, f"has mtrain {hello.get('version')}, expected {mtrain.__version__} as here", "install the same there"
        )
    return hello


def _unreached(line: Line) -> Finding:
    """Why the process ended before its agent said anything."""
    line.last_words()
    argv = line.process.args
    words = [str(word) for word in argv] if isinstance(argv, list) else []
    there = words if line.local else shlex.split(" ".join(words[-1:]))
    return start_failures.why(
        line.host,
        status=line.process.poll(),
        said=[*line.channel.noise, *line.said],
        python=there[there.index(AGENT[0]) - 1] if AGENT[0] in there else "its command",
        local=line.local,
    )


def _finding(line: Line, text: str, remedy: str) -> Finding:
    return Finding(check="ssh", state="bad", hosts=(line.host,), text=text, remedy=remedy)


class SshGathering:
    """Agents that this process starts."""

    forwards = True

    def __init__(
        self, hosts: Sequence[str], *, brought: Sequence[Sequence[str]], python: str, environ: Mapping[str, str]
    ) -> None:
        """``brought``: the command that gets to each of ``hosts``; ``python``: for an agent on this machine."""
        self._hosts = hosts
        self._brought = brought
        self._python = python
        self._environ = environ
        self._lines: dict[int, Line] = {}

    def gather(
        self, nodes: Sequence[int], *, timeout_s: float, stop: Callable[[], bool]
    ) -> tuple[dict[int, Member], list[Finding]]:
        """Start all of them at once. Called by the main thread: see ``open_line``."""
        for node in nodes:
            self.let_go(node)
            self._lines[node] = open_line(
                self._hosts[node], node, brought=self._brought[node], python=self._python, environ=self._environ
            )
        deadline = time.monotonic() + timeout_s
        members, findings = {}, []
        for node in nodes:
            line = self._lines[node]
            said = hear(line, timeout_s=max(0.5, deadline - time.monotonic()), stop=stop)
            if isinstance(said, Finding):
                findings.append(said)
                self.let_go(node)
            else:
                members[node] = Member(node=node, host=line.host, channel=line.channel, hello=said)
        return members, findings

    def last_words(self, node: int) -> str:
        """What ssh says of its end."""
        return self._lines[node].last_words() if node in self._lines else ""

    def let_go(self, node: int) -> None:
        """End the connection."""
        line = self._lines.pop(node, None)
        if line is not None:
            line.end(wait_s=CLOSING_S)

    def close(self) -> None:
        """End all connections."""
        for line in self._lines.values():
            line.channel.close(flush_s=0.5)
        for node in list(self._lines):
            self.let_go(node)
