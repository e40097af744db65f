"""The actor on each Ray node: it starts the node's agent and carries bytes between the agent and its leader.

Ray sends this class to the nodes by value, so it imports nothing of mtrain: the Python that runs Ray's workers need not be
the one that has mtrain.
"""

import os
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence

RAYS_OWN = re.compile(r"^(RAY_|SPT_)|^(PYTHONBREAKPOINT|OMP_NUM_THREADS)$")
"""Variables that Ray sets for its workers, and that mean nothing or something else to a rank.

``CUDA_VISIBLE_DEVICES``, which holds the devices that Ray has assigned, is not among them."""
# Ray kills the children of a worker with SIGKILL when the worker ends. An agent that is killed could not end its ranks;
# one that only loses its connection can.
DETACHED = """
import os, subprocess, sys
if os.fork():
    os._exit(0)
try:
    status = subprocess.call(sys.argv[1:])
except OSError as error:
    print(f"{sys.argv[1]}: {error.strerror or error}", file=sys.stderr)
    status = 127
print(f"mtrain-agent-status {status}", file=sys.stderr, flush=True)
"""
"""Program that starts the agent as a process that is no child of the actor, and reports its exit status."""
STATUS = re.compile(r"^mtrain-agent-status (-?\d+)$")
MAX_LINES = 40
"""How many lines are kept of what the agent writes to its standard error."""
CHUNK_BYTES = 1 << 16


class Bridge:
    """Starts an agent when it is created. Its methods are called from the leader, several at a time."""

    def __init__(self, argv: Sequence[str], sent: Mapping[str, str]) -> None:
        """``argv``: the command of the agent. ``sent``: variables that replace those of this node."""
        environ = {name: value for name, value in os.environ.items() if not RAYS_OWN.search(name)}
        self._process = subprocess.Popen(  # noqa: S603
            [sys.executable, "-I", "-S", "-c", DETACHED, *argv],
            env={**environ, **sent},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
        )
        self._lines: deque[str] = deque(maxlen=MAX_LINES)
        self._status: int | None = None
        self._reader = threading.Thread(target=self._read_stderr, daemon=True)
        self._reader.start()

    def node(self) -> str:
        """Return Ray's id of the node on which this actor runs."""
        import ray

        return str(ray.get_runtime_context().get_node_id())

    def receive(self, timeout_s: float) -> bytes | None:
        """Return what the agent has sent, b"" if there is nothing within ``timeout_s``; None: it has closed its end."""
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        if not select.select([descriptor], [], [], timeout_s)[0]:
            return b""
        return os.read(descriptor, CHUNK_BYTES) or None

    def send(self, content: bytes) -> None:
        """Pass ``content`` on to the agent; one that has ended takes nothing more."""
        assert self._process.stdin is not None
        view = memoryview(content)
        try:
            while view:
                view = view[os.write(self._process.stdin.fileno(), view) :]
        except (OSError, ValueError):
            return

    def close(self) -> None:
        """Close the connection to the agent, which then ends whatever it has started."""
        assert self._process.stdin is not None
        self._process.stdin.close()

    def words(self, wait_s: float) -> tuple[int | None, list[str]]:
        """Return the exit status of the agent and its last lines; the status is None after ``wait_s`` without an end."""
        deadline = time.monotonic() + wait_s
        while self._status is None and time.monotonic() < deadline:
            time.sleep(0.02)
        return self._status, list(self._lines)

    def kill(self) -> None:
        """Kill the agent; processes that it has started get SIGTERM from the system."""
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except OSError:
            return

    def _read_stderr(self) -> None:
        assert self._process.stderr is not None
        with self._process.stderr as stream:
            for raw in stream:
                line = raw.decode(errors="replace").rstrip()[:500]
                if status := STATUS.match(line):
                    self._status = int(status[1])
                else:
                    self._lines.append(line)
