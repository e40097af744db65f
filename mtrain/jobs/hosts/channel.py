"""Messages between the leader of a job and the agent of a host: one JSON object per line, over pipes or a socket.

Each side sends a heartbeat once a second, so a peer from which nothing arrives has stopped or cannot be reached. A
channel ends when the peer closes it, when the peer has been silent for ``silence_s``, or when a line arrives that is no
message. ``lost`` then says why, and the channel never recovers. Time during which this very process was stopped (SIGSTOP,
``scontrol suspend``) does not count as silence, since it could hear nothing.

Closing a socket waits until the peer has closed its end, too. TCP resets a connection that is closed while received
bytes are unread, and a reset discards data that is still on its way to the peer, such as the last message.

No call here blocks on the peer: a thread reads and writes (``channel_thread.py``), one for all channels of a leader. Only
JSON is read, and no line longer than ``MAX_MESSAGE_BYTES``.

There are three kinds of messages: ``{"do": verb, "ask": number, ...}`` is a request, ``{"answer": number, ...}``
answers it (with ``"error"`` where it failed), and ``{"event": name, ...}`` is a notification. ``agent.py`` lists the
verbs and the events.
"""

import json
import os
import socket
import stat
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from mtrain.jobs.hosts.channel_thread import ChannelThread
from mtrain.jobs.hosts.disconnection import Cause, Disconnection
from mtrain.jobs.hosts.messages import Message
from mtrain.spec.terminal import one_line

BEAT_S = 1.0
"""Seconds between two heartbeats."""
PAUSED_BEATS = 3
"""If the thread of a channel, which turns at least once a beat, has not run for so many, this process was stopped."""
CLOSING_S = 0.05
"""Seconds between two looks at a channel that is being closed."""
STOP_POLL_S = 0.2
"""Seconds between two calls of ``stop`` while an answer is awaited."""
MAX_MESSAGE_BYTES = 8 * 1024 * 1024
"""Largest message."""
MAX_UNSENT_BYTES = 64 * 1024 * 1024
"""Most bytes that may be queued for a peer that reads nothing; beyond that it is lost."""
NOISE_LINES = 20
"""How many lines are kept of what a login shell prints before the first message."""
NOISE_BYTES = 500
"""How many bytes are kept of each of these lines."""
HELLO = b'{"event": "hello"'
"""How the first message of an agent begins. What a login shell prints may look like JSON, too, and need not end with a
newline."""
_CHUNK_BYTES = 1 << 16


class Lost(Exception):
    """The connection to the peer has ended; the text says why."""

    def __init__(self, disconnection: Disconnection) -> None:
        self.disconnection = disconnection
        super().__init__(str(disconnection))


class Refused(Exception):
    """The peer answered a request with an error: its text, and its exit code where the answer has one."""

    def __init__(self, text: str, *, code: int | None = None) -> None:
        self.code = code
        super().__init__(text)


class Channel:
    """One end of a connection.

    It owns the file descriptors that it is given and closes them; they may be the same one.
    """

    def __init__(  # noqa: PLR0913 - each but the first three has a default
        self,
        incoming: int,
        outgoing: int,
        *,
        peer: str,
        silence_s: float = float("inf"),
        beat_s: float = BEAT_S,
        skips_noise: bool = False,
        thread: ChannelThread | None = None,
    ) -> None:
        """``skips_noise``: whether a login shell may print something before the peer's first message, a hello.

        ``thread``: reads and writes for this channel and others; None: it gets one of its own.
        """
        self._skips_noise = skips_noise
        self.peer = peer
        """Name of the peer in messages to people."""
        self.silence_s = silence_s
        """Seconds without a byte from the peer after which it is lost; may be changed at any time."""
        self.noise: deque[str] = deque(maxlen=NOISE_LINES)
        """The last lines that came before the first message and are no messages."""
        # Each is closed by itself, and a socket that is both would be closed twice.
        self.incoming, self._outgoing = incoming, outgoing if outgoing != incoming else os.dup(incoming)
        """Descriptors to read from and to write to."""
        self._beat_s = beat_s
        self._last_read = self._ticked_at = time.monotonic()
        self._was_paused = False
        """Whether this process stood still since the peer was last heard."""
        self._next_beat = self._last_read + beat_s
        self.lost: Disconnection | None = None
        """Why the channel has ended; None while it is open."""
        self.spoken = False
        """Whether a message or heartbeat has arrived from the peer yet."""
        self._changed = threading.Condition()
        self._inbox: deque[Message] = deque()
        self._answers: dict[int, Message] = {}
        self._requests = 0
        self._partial = b""
        self._unsent = bytearray()
        self._closing = False
        self._deadline = float("inf")
        self._finished = threading.Event()
        for descriptor in (self.incoming, self._outgoing):
            os.set_blocking(descriptor, False)
        self._thread = ChannelThread(f"channel {peer}", many=False) if thread is None else thread
        self._thread.serve(self)

    # --------------------------------------------------------------------------------------------------------- messages
    @property
    def shell_output(self) -> list[str]:
        """Return the lines that came before a first message, an unfinished one included.

        Empty once a message has come.
        """
        if self.spoken:
            return []
        rest = self._partial[:NOISE_BYTES].decode(errors="replace").strip()
        return [*self.noise, *([rest] if rest and self.lost is None else [])]

    @property
    def unsent_bytes(self) -> int:
        """Return how many bytes wait to be sent."""
        return len(self._unsent)

    @property
    def silent_s(self) -> float:
        """Return the seconds since the last byte from the peer."""
        return time.monotonic() - self._last_read

    def send(self, message: Mapping[str, Any]) -> None:
        """Queue a message for the peer. Once the channel has ended, messages are dropped.

        Raises:
            ValueError: the message is longer than ``MAX_MESSAGE_BYTES``.
        """
        line = json.dumps(message, ensure_ascii=False, allow_nan=False).encode(errors="replace") + b"\n"
        if len(line) > MAX_MESSAGE_BYTES:
            raise ValueError(f"a message of {len(line)} bytes; at most {MAX_MESSAGE_BYTES} are sent")
        with self._changed:
            if self.lost is not None:
                return
            if len(self._unsent) > MAX_UNSENT_BYTES:
                self._lose(Disconnection(cause=Cause.NOT_READING))
            else:
                self._unsent += line
        self._thread.attend(self)

    def receive(self) -> list[Message]:
        """Take all messages that have arrived, except answers, out of the inbox. Never blocks."""
        if not self._inbox:  # A leader asks each of its hosts many times a second, and nearly always there is nothing.
            return []
        with self._changed:
            messages = list(self._inbox)
            self._inbox.clear()
        return messages

    def holds(self, event: str) -> bool:
        """Return whether an event of this name is in the inbox."""
        with self._changed:
            return any(message.get("event") == event for message in self._inbox)

    def wait(self, timeout_s: float) -> Message | None:
        """Return the next message, or None where none arrives within ``timeout_s``.

        Raises:
            Lost: the channel has ended, and every message that had arrived has been taken.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._inbox or self.lost is not None, timeout_s)
            if self._inbox:
                return self._inbox.popleft()
            if self.lost is not None:
                raise Lost(self.lost)
            return None

    def ask(self, verb: str, **fields: Any) -> int:
        """Send a request to the peer; return its number, to be given to ``answer``."""
        with self._changed:
            self._requests += 1
            number = self._requests
        self.send({"do": verb, "ask": number, **fields})
        return number

    def answer(self, number: int, *, timeout_s: float, stop: Callable[[], bool] = lambda: False) -> Message:
        """Wait for the answer to request ``number``.

        ``stop`` is called repeatedly and ends the waiting by returning True.

        Raises:
            Refused: the peer answered with an error.
            Lost: the channel has ended.
            TimeoutError: no answer arrived within ``timeout_s``, or before ``stop`` returned True.
        """
        # Even with no time left, an answer that has arrived already is taken: ``ask_all`` waits for one peer after the other.
        remaining_s, deadline = timeout_s, time.monotonic() + timeout_s
        with self._changed:
            while not self._changed.wait_for(
                lambda: number in self._answers or self.lost is not None, min(remaining_s, STOP_POLL_S)
            ):
                remaining_s = deadline - time.monotonic()
                if remaining_s <= 0 or stop():
                    break
            answer = self._answers.pop(number, None)
        if answer is None:
            if self.lost is not None:
                raise Lost(self.lost)
            raise TimeoutError(f"{self.peer} did not answer within {timeout_s:g} s")
        if "error" in answer:
            raise Refused(str(answer["error"]), code=answer.get("code"))
        return answer

    def close(self, *, flush_s: float = 1.0) -> None:
        """End the channel after queued messages were sent and read, or after ``flush_s``. Can be called twice."""
        self.begin_closing(flush_s=flush_s)
        if not self._thread.is_current():
            self._finished.wait(flush_s + 5.0)
            self._thread.join(5.0)

    def begin_closing(self, *, flush_s: float) -> None:
        """Begin what ``close`` does, and do not wait for its end, so that many channels can be closed at once."""
        with self._changed:
            self._deadline = time.monotonic() + flush_s
            self._closing = True
        self._thread.attend(self)

    # ------------------------------------------------------------------------------- what the thread calls, see `Served`
    @property
    def outgoing(self) -> int | None:
        """Return the descriptor to write to while there is something to write."""
        return self._outgoing if self._unsent else None

    @property
    def is_over(self) -> bool:
        """Return whether the channel has ended."""
        return self.lost is not None

    def tick(self, now: float) -> float:
        """Notice silence, send the heartbeat, end a channel that is closed; return when this is due again."""
        # Once only until the peer is heard again, or a peer that is gone would never be missed on a host with too much work.
        if not self._was_paused and now - self._ticked_at > PAUSED_BEATS * self._beat_s:
            self._was_paused = True
            self._last_read += now - self._ticked_at
        self._ticked_at = now
        if self._closing and (now > self._deadline or not (self._unsent or self._awaits_peer_close())):
            self._lose(Disconnection(cause=Cause.CLOSED_HERE))
            return now
        if self.silent_s > self.silence_s:
            self._lose(Disconnection(cause=Cause.SILENT, silent_s=self.silent_s))
            return now
        if now >= self._next_beat and not self._closing:
            self._next_beat = now + self._beat_s
            with self._changed:
                # What waits to be sent shows the peer that this end lives, so no heartbeat is put behind it.
                self._unsent += b"" if self._unsent else b"{}\n"
        if self._unsent:
            self.write()
        return now + CLOSING_S if self._closing else self._next_beat

    def fail(self, error: Exception) -> None:
        """End the channel because of an error of the code itself."""
        self._lose(Disconnection(cause=Cause.FAILED_HERE, detail=str(error)))

    def finish(self) -> None:
        """Close the descriptors."""
        for descriptor in (self.incoming, self._outgoing):
            os.close(descriptor)
        self._finished.set()

    def _lose(self, disconnection: Disconnection) -> None:
        """End the channel; of several causes the first one stands."""
        with self._changed:
            if self.lost is None:
                self.lost = disconnection
            self._changed.notify_all()

    def _awaits_peer_close(self) -> bool:
        """Return whether the peer must close first, which holds for sockets; it is told that nothing more is sent."""
        # TCP resets a connection that is closed with unread bytes, and the last message would be lost with it.
        if not stat.S_ISSOCK(os.fstat(self._outgoing).st_mode):
            return False
        with suppress(OSError), socket.socket(fileno=os.dup(self._outgoing)) as connection:
            connection.shutdown(socket.SHUT_WR)
        return True

    def read(self) -> None:
        """Read what has arrived, and take whole lines as messages."""
        try:
            content = os.read(self.incoming, _CHUNK_BYTES)
        except BlockingIOError:
            return
        except ConnectionResetError:  # the peer closed its end while it had unread bytes
            content = b""
        except OSError as error:
            self._lose(Disconnection(cause=Cause.CONNECTION_FAILED, detail=str(error.strerror or error)))
            return
        if not content:
            if self._partial and not self.spoken:
                self._note_noise(self._partial)
            self._lose(Disconnection(cause=Cause.CLOSED_THERE))
            return
        self._last_read, self._was_paused = time.monotonic(), False
        *lines, self._partial = (self._partial + content).split(b"\n")
        for line in lines:
            self._take(line)
        if len(self._partial) > MAX_MESSAGE_BYTES:
            self._lose(Disconnection(cause=Cause.LINE_TOO_LONG, limit_bytes=MAX_MESSAGE_BYTES))

    def _take(self, line: bytes) -> None:
        message = _first_message(line) if self._skips_noise and not self.spoken else _parse(line)
        if message is None:
            if self.spoken:
                self._lose(Disconnection(cause=Cause.NO_MESSAGE, detail=line[:80].decode(errors="replace")))
            else:
                self._note_noise(line)
            return
        self.spoken = True
        if not message:  # a heartbeat
            return
        with self._changed:
            if isinstance(message.get("answer"), int):
                self._answers[message["answer"]] = message
            else:
                self._inbox.append(message)
            self._changed.notify_all()

    def _note_noise(self, line: bytes) -> None:
        text = line[:NOISE_BYTES].decode(errors="replace").rstrip()
        self.noise.append(one_line(text))

    def write(self) -> None:
        """Write what can be written at once of what is queued."""
        try:
            with self._changed:
                sent = os.write(self._outgoing, self._unsent[:_CHUNK_BYTES])
                del self._unsent[:sent]
        except BlockingIOError:
            return
        except (
            OSError
        ):  # The peer has closed. Its last messages may still be unread, so `_read` is what ends the channel.
            self._unsent.clear()


def _parse(line: bytes) -> Message | None:
    """Parse a line as a message; return None where it is none."""
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return message if isinstance(message, dict) else None


def _first_message(line: bytes) -> Message | None:
    """Return the hello at the end of a line, without what a login shell printed before it.

    None where there is no hello.
    """
    begin = line.find(HELLO)
    return None if begin < 0 else _parse(line[begin:])


def ask_all(
    channels: Sequence[Channel],
    verb: str,
    *,
    timeout_s: float,
    each: Sequence[Mapping[str, Any]] | None = None,
    stop: Callable[[], bool] = lambda: False,
    **fields: Any,
) -> list[Message]:
    """Send one request to all peers at once; return their answers in the order of ``channels``.

    ``each`` holds additional fields for each peer; ``stop`` ends the waiting by returning True. For a peer that
    refuses, is lost or does not answer in time, the answer is ``{"error": text}``, with the exit ``code`` that a
    refusal had.
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
