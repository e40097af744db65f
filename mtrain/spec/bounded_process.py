"""A process of its own for what a stranger's file makes a library do: bounded in memory and time, and its end has words.

A chat template, a tokenizer or a graph may ask for all memory, run without end, or end the process that works with it. The caller
names a class; the process makes one object of it, calls its methods as it is asked to, and answers in JSON and bytes.
"""

import json
import math
import os
import resource
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from importlib import import_module
from typing import IO, Any

from mtrain.spec.bounds import bounded_growth

_CODE = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from mtrain.spec.bounded_process import answer; answer()"
)
_ENVIRON = ("PATH", "HOME", "TMPDIR", "LANG", "LC_ALL", "LD_LIBRARY_PATH")
"""What the process sees of the environment: it gets no secret."""
_POLL_S = 1.0
Payloads = Sequence[bytes | memoryview]


class Failed(Exception):
    """What was asked of the process cannot be done, or has ended it; the message says why. ``kind``: the class of its error."""

    def __init__(self, message: str, *, kind: str = "") -> None:
        super().__init__(message)
        self.kind = kind


class BoundedProcess:
    """An object in a process of its own. The process begins with the first call, and again with the next one after its end."""

    def __init__(self, worker: str, *arguments: Any, limit_bytes: int, seconds: int | None = None) -> None:
        """Name the object.

        Args:
            worker: ``module:Class``.
            arguments: With which it is made, as JSON can hold them.
            limit_bytes: Memory that it may take to make it, and in each call.
            seconds: Processor time that making it may take, and a call that names no other; None: any.
        """
        self._made = {"worker": worker, "arguments": arguments}
        self._limit_bytes, self._seconds = limit_bytes, seconds
        self._process: subprocess.Popen[bytes] | None = None
        self._end: Any = lambda: None
        self._lock = threading.Lock()

    def call(
        self,
        method: str,
        *arguments: Any,
        payloads: Payloads = (),
        limit_bytes: int | None = None,
        seconds: int | None = None,
    ) -> tuple[Any, list[bytes]]:
        """Return what a method returns for ``(*arguments, payloads)``: a value and bytes.

        Raises:
            Failed: The method raises, needs more than its bounds, or ends the process.
        """
        with self._lock:
            if self._process is None:
                self._start()
                self._ask(self._made, (), self._limit_bytes, self._seconds)
            request = {"method": method, "arguments": arguments}
            return self._ask(request, payloads, limit_bytes or self._limit_bytes, seconds or self._seconds)

    def close(self) -> None:
        """End the process, if there is one."""
        self._end()
        self._process = None

    def _start(self) -> None:
        environ = {name: os.environ[name] for name in _ENVIRON if name in os.environ}
        self._process = subprocess.Popen(  # noqa: S603
            # -I ignores variables such as PYTHONPATH, so the search path is handed
            # over; without the current folder, in which a stranger's files may lie.
            [sys.executable, "-I", "-c", _CODE, json.dumps([entry for entry in sys.path if entry])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # a library that ends the process prints its own traceback
            env={**environ, "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"},
        )
        # Also where nobody calls ``close``: the process ends with the object, and with Python.
        self._end = weakref.finalize(self, _end, self._process, os.getpid())

    def _ask(
        self, request: dict[str, Any], payloads: Payloads, limit_bytes: int, seconds: int | None
    ) -> tuple[Any, list[bytes]]:
        assert self._process is not None
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        bounded = {**request, "limit_bytes": limit_bytes, "seconds": seconds}
        try:
            _send(self._process.stdin, bounded, payloads)
            told, content = _receive(self._process.stdout)
        except (OSError, EOFError):
            status = self._process.wait()
            self.close()
            raise Failed(_ending(status, limit_bytes, seconds)) from None
        except BaseException:
            self.close()  # an answer that nobody has read would be taken for that of the next call
            raise
        if "error" in told:
            # A process without its object could only repeat the error.
            if "worker" in request:
                self.close()
            raise Failed(told["error"], kind=told["kind"])
        return told["value"], content


def _end(process: "subprocess.Popen[bytes]", owner: int) -> None:
    if os.getpid() != owner:  # a copy of the process that owns it
        return
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        try:
            assert pipe is not None
            pipe.close()
        except OSError:  # what was not sent yet
            pass


def _ending(status: int, limit_bytes: int, seconds: int | None) -> str:
    if status == -signal.SIGXCPU:
        return f"takes more than {seconds} s of processor time"
    name = signal.Signals(-status).name if status < 0 else f"exit code {status}"
    # A library whose allocation fails usually aborts, or writes to address 0.
    memory = "" if name in ("SIGFPE", "SIGILL") else f", or more than {limit_bytes / 2**30:.1f} GiB of memory"
    return f"has ended the process that works with it by {name}: a fault in the library{memory}"


def _send(stream: IO[bytes], message: dict[str, Any], payloads: Payloads) -> None:
    # Payloads follow the text as they are: JSON would need a third more for bytes, and copies of them.
    text = json.dumps({**message, "sizes": [len(payload) for payload in payloads]}).encode()
    stream.write(len(text).to_bytes(8, "little") + text)
    for payload in payloads:
        stream.write(payload)
    stream.flush()


def _receive(stream: IO[bytes]) -> tuple[dict[str, Any], list[bytes]]:
    message = json.loads(_exactly(stream, int.from_bytes(_exactly(stream, 8), "little")))
    return message, [_exactly(stream, size) for size in message["sizes"]]


def _exactly(stream: IO[bytes], size: int) -> bytes:
    content = stream.read(size)
    if len(content) < size:
        raise EOFError
    return content


# ------------------------------------------------------------------------------------------------------- in the process
def _end_with(owner: int) -> None:
    """End this process, which may be computing without end, when the one that has started it is gone."""
    while os.getppid() == owner:
        time.sleep(_POLL_S)
    os._exit(0)


def answer() -> None:
    """Be the process: make the object that the first request names, and answer those that follow until there are no more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group, and is the caller's business
    # A core file would hold what the process has read, and take as much room as its memory.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    source, target = sys.stdin.buffer, sys.stdout.buffer
    # What a library prints would otherwise lie between the answers.
    sys.stdout = sys.stderr
    made: Any = None
    while True:
        try:
            request, payloads = _receive(source)
        except EOFError:
            return
        if request["seconds"] is not None:
            hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
            # The limit counts from the process's begin, so each request moves it on from what is used.
            resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(time.process_time()) + request["seconds"], hard))
        content: Payloads = ()
        try:
            with bounded_growth(request["limit_bytes"]):
                if made is None:
                    module, _, name = request["worker"].partition(":")
                    made, value = getattr(import_module(module), name)(*request["arguments"]), None
                else:
                    value, content = getattr(made, request["method"])(*request["arguments"], payloads)
            reply = {"value": value}
        except MemoryError:
            reply = {
                "error": f"takes more than {request['limit_bytes'] / 2**30:.1f} GiB of memory",
                "kind": "MemoryError",
            }
        except RecursionError:
            reply = {"error": "is nested too deeply", "kind": "RecursionError"}
        except BaseException as error:  # a library in Rust raises BaseException itself
            reply = {"error": " ".join(str(error).split())[:300], "kind": type(error).__name__}
        _send(target, reply, content)
