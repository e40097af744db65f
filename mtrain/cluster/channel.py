"""Messages between the leader of a job and the agent of a host: JSON objects, one per line, both ways, over pipes or a socket.

Each side beats once a second, so that a peer that says nothing is one that cannot. A channel ends when the peer closes it, when
the peer has been silent for ``silence_s``, or when what comes is no message; it then says why (``lost``) and never recovers.

Closing waits for the other end of a socket to close as well: one that is closed on bytes which nobody has read is reset, and takes
along what was said last.

Nothing here blocks on the peer: a thread of its own reads and writes. Only JSON is read, and no line longer than
``LIMIT_BYTES``.

Three kinds of messages: ``{"do": verb, "ask": number, ...}`` asks for something, ``{"answer": number, ...}`` answers it (with
``"error"`` where it could not be done), and ``{"event": name, ...}`` tells. ``agent.py`` lists the verbs and the events.
"""

import json
import os
import select
import socket
import stat
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

Message = dict[str, Any]

BEAT_S = 1.0
STOP_S = 0.2
"""Between two looks at whether an answer is still wanted."""
LIMIT_BYTES = 8 * 1024 * 1024
"""Of one message."""
WAITING_BYTES = 64 * 1024 * 1024
"""Of messages that the peer has not taken yet."""
NOISE_LINES = 20
"""Kept of what a login shell prints in front of the first message."""
NOISE_BYTES = 500
"""Kept of each of these lines."""
HELLO = b'{"event": "hello"'
"""How the first message of an agent begins. What a login shell prints may look like JSON, too, and need not end with a newline."""
CLOSED = "closed here"
"""The reason of a channel that was closed at this end."""
_CHUNK_BYTES = 1 << 16


class Lost(Exception):
    """The peer has gone, is silent, or does not speak our language; the text says which."""


class Refused(Exception):
    """The peer could not do what it was asked; the text is its own, and the exit code, where it gave one."""

    def __init__(self, text: str, *, code: int | None = None) -> None:
        self.code = code
        super().__init__(text)


class Channel:
    """One end of a connection. Owns the file descriptors that it is given, which may be one and the same."""

    def __init__(
        self,
        incoming: int,
        outgoing: int,
        *,
        peer: str,
        silence_s: float = float("inf"),
        beat_s: float = BEAT_S,
        behind_noise: bool = False,
    ) -> None:
        """``behind_noise``: whether a login shell may print something in front of the peer's first message, a hello."""
        self._behind_noise = behind_noise
        self.peer = peer
        """For people."""
        self.silence_s = silence_s
        """Seconds without a byte from the peer after which it is lost; may be changed."""
        self.noise: deque[str] = deque(maxlen=NOISE_LINES)
        """Lines that came in front of the first message and are none."""
        self._incoming, self._outgoing = incoming, outgoing if outgoing != incoming else os.dup(incoming)
        self._beat_s = beat_s
        self._heard = time.monotonic()
        self._lost: str | None = None
        self._spoken = False
        self._changed = threading.Condition()
        self._inbox: deque[Message] = deque()
        self._answers: dict[int, Message] = {}
        self._asked = 0
        self._partial = b""
        self._unsent = bytearray()
        self._closing = False
        self._deadline = float("inf")
        self._wake_read, self._wake_write = os.pipe()
        for descriptor in (self._incoming, self._outgoing, self._wake_read, self._wake_write):
            os.set_blocking(descriptor, False)
        self._thread = threading.Thread(target=self._work, name=f"channel {peer}", daemon=True)
        self._thread.start()

    # ---------------------------------------------------------------------------------------------------------- talking
    @property
    def lost(self) -> str | None:
        """Why the channel has ended; None: it has not."""
        return self._lost

    @property
    def spoken(self) -> bool:
        """Whether the peer has said anything yet."""
        return self._spoken

    @property
    def printed(self) -> list[str]:
        """What came instead of a first message, a line that has not ended included; empty once there is one."""
        if self._spoken:
            return []
        rest = self._partial[:NOISE_BYTES].decode(errors="replace").strip()
        return [*self.noise, *([rest] if rest and self._lost is None else [])]

    @property
    def silent_s(self) -> float:
        """Seconds since anything was heard."""
        return time.monotonic() - self._heard

    def send(self, message: Mapping[str, Any]) -> None:
        """Queue a message; one to a lost peer is dropped.

        Raises:
            ValueError: it is longer than ``LIMIT_BYTES``.
        """
        line = json.dumps(message, ensure_ascii=False, allow_nan=False).encode(errors="replace") + b"\n"
        if len(line) > LIMIT_BYTES:
            raise ValueError(f"a message of {len(line)} bytes; at most {LIMIT_BYTES} are sent")
        with self._changed:
            if self._lost is not None:
                return
            if len(self._unsent) > WAITING_BYTES:
                self._lose("takes nothing of what is sent")
                return
            self._unsent += line
        self._wake()

    def receive(self) -> list[Message]:
        """What has come meanwhile, answers apart."""
        with self._changed:
            found = list(self._inbox)
            self._inbox.clear()
        return found

    def holds(self, event: str) -> bool:
        """Whether such an event has come that nobody has taken yet."""
        with self._changed:
            return any(message.get("event") == event for message in self._inbox)

    def wait(self, timeout_s: float) -> Message | None:
        """The next message; None: none came in time.

        Raises:
            Lost: nothing is left, and nothing will come.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._inbox or self._lost is not None, timeout_s)
            if self._inbox:
                return self._inbox.popleft()
            if self._lost is not None:
                raise Lost(self._lost)
            return None

    def ask(self, verb: str, **fields: Any) -> int:
        """Ask the peer to do something; returns the number of the question, for ``answer``."""
        with self._changed:
            self._asked += 1
            number = self._asked
        self.send({"do": verb, "ask": number, **fields})
        return number

    def answer(self, number: int, *, timeout_s: float, stop: Callable[[], bool] = lambda: False) -> Message:
        """Wait for the answer to a question; ``stop``: whether it is not wanted any more.

        Raises:
            Refused: the peer says why it could not.
            Lost: the peer has gone.
            TimeoutError: nothing came in time, or before ``stop`` said so.
        """
        left, deadline = timeout_s, time.monotonic() + timeout_s
        with self._changed:
            while not self._changed.wait_for(
                lambda: number in self._answers or self._lost is not None, min(left, STOP_S)
            ):
                left = deadline - time.monotonic()
                if left <= 0 or stop():
                    break
            found = self._answers.pop(number, None)
        if found is None:
            if self._lost is not None:
                raise Lost(self._lost)
            raise TimeoutError(f"{self.peer} did not answer within {timeout_s:g} s")
        if "error" in found:
            raise Refused(str(found["error"]), code=found.get("code"))
        return found

    def close(self, *, flush_s: float = 1.0) -> None:
        """Send what is queued and let the peer read it, for ``flush_s`` at most, and end. Can be called twice."""
        with self._changed:
            self._deadline = time.monotonic() + flush_s
            self._closing = True
        self._wake()
        if threading.current_thread() is not self._thread:
            self._thread.join(flush_s + 5.0)

    # ------------------------------------------------------------------------------------------------------- the thread
    def _wake(self) -> None:
        with self._changed, suppress(OSError):  # full, so it will wake; or closed
            os.write(self._wake_write, b".")

    def _lose(self, reason: str) -> None:
        with self._changed:
            if self._lost is None:
                self._lost = reason
            self._changed.notify_all()

    def _work(self) -> None:
        next_beat = time.monotonic() + self._beat_s
        try:
            while self._lost is None:
                now = time.monotonic()
                if self._closing and (now > self._deadline or not (self._unsent or self._lingers())):
                    self._lose(CLOSED)
                    return
                if self.silent_s > self.silence_s:
                    self._lose(f"silent for {self.silent_s:.0f} s")
                    return
                if now >= next_beat and not self._closing:
                    next_beat = now + self._beat_s
                    with self._changed:
                        self._unsent += b"" if self._unsent else b"{}\n"
                self._turn(0.05 if self._closing else next_beat - now)
        except Exception as error:  # a thread that dies in silence would look like a peer that does
            self._lose(f"failed: {error}")
        finally:
            with self._changed:
                descriptors = {self._incoming, self._outgoing, self._wake_read, self._wake_write}
                self._wake_write = self._wake_read = -1
                for descriptor in descriptors:  # not outside: their numbers may be others' by then
                    os.close(descriptor)

    def _lingers(self) -> bool:
        """Whether the end of the peer is waited for: where it is behind a socket; it is told that nothing more comes."""
        if not stat.S_ISSOCK(os.fstat(self._outgoing).st_mode):
            return False
        with suppress(OSError), socket.socket(fileno=os.dup(self._outgoing)) as connection:
            connection.shutdown(socket.SHUT_WR)
        return True

    def _turn(self, timeout_s: float) -> None:
        poll = select.poll()
        poll.register(self._incoming, select.POLLIN)
        poll.register(self._wake_read, select.POLLIN)
        if self._unsent:
            poll.register(self._outgoing, select.POLLOUT)
        ready = dict(poll.poll(max(timeout_s, 0.0) * 1000))
        if self._wake_read in ready:
            os.read(self._wake_read, _CHUNK_BYTES)
        if self._incoming in ready:
            self._read()
        if self._outgoing in ready:
            self._write()

    def _read(self) -> None:
        try:
            content = os.read(self._incoming, _CHUNK_BYTES)
        except BlockingIOError:
            return
        except ConnectionResetError:  # closed by a peer that had not read everything
            content = b""
        except OSError as error:
            self._lose(f"the connection failed: {error.strerror or error}")
            return
        if not content:
            if self._partial and not self._spoken:
                self._note_noise(self._partial)
            self._lose("the connection was closed")
            return
        self._heard = time.monotonic()
        *lines, self._partial = (self._partial + content).split(b"\n")
        for line in lines:
            self._take(line)
        if len(self._partial) > LIMIT_BYTES:
            self._lose(f"sent a line of more than {LIMIT_BYTES} bytes")

    def _take(self, line: bytes) -> None:
        message = _first_message(line) if self._behind_noise and not self._spoken else _read(line)
        if message is None:
            if self._spoken:
                self._lose(f"sent what is no message: {line[:80].decode(errors='replace')!r}")
            else:
                self._note_noise(line)
            return
        self._spoken = True
        if not message:
            return
        with self._changed:
            if isinstance(message.get("answer"), int):
                self._answers[message["answer"]] = message
            else:
                self._inbox.append(message)
            self._changed.notify_all()

    def _note_noise(self, line: bytes) -> None:
        text = line[:NOISE_BYTES].decode(errors="replace").rstrip()
        self.noise.append("".join(letter if letter.isprintable() else " " for letter in text))

    def _write(self) -> None:
        try:
            with self._changed:
                sent = os.write(self._outgoing, self._unsent[:_CHUNK_BYTES])
                del self._unsent[:sent]
        except BlockingIOError:
            return
        except OSError:  # what the peer said last may still be there to read; reading finds its end
            self._unsent.clear()


def _read(line: bytes) -> Message | None:
    """A line as a message; None: it is none."""
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return message if isinstance(message, dict) else None


def _first_message(line: bytes) -> Message | None:
    """The hello that ends a line, whatever stands in front of it; None: it holds none."""
    begin = line.find(HELLO)
    return None if begin < 0 else _read(line[begin:])


def ask_all(
    channels: Sequence[Channel],
    verb: str,
    *,
    timeout_s: float,
    each: Sequence[Mapping[str, Any]] | None = None,
    stop: Callable[[], bool] = lambda: False,
    **fields: Any,
) -> list[Message]:
    """Ask every peer at once; one answer for each, in the same order.

    ``each``: fields for one peer each; ``stop``: whether to wait no longer. Where a peer could not, is gone or is late, its
    answer is ``{"error": text}``, with the ``code`` that it gave.
    """
    deadline = time.monotonic() + timeout_s
    own = each or [{}] * len(channels)
    numbers = [channel.ask(verb, **fields, **extra) for channel, extra in zip(channels, own, strict=True)]
    answers = []
    for channel, number in zip(channels, numbers, strict=True):
        try:
            answers.append(channel.answer(number, timeout_s=max(0.0, deadline - time.monotonic()), stop=stop))
        except Refused as error:
            answers.append({"error": str(error)} | ({} if error.code is None else {"code": error.code}))
        except (Lost, TimeoutError) as error:
            answers.append({"error": str(error)})
    return answers
