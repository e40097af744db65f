"""One process that plays the agents of many hosts, in mtrain's own protocol, so that a leader can be measured alone.

The leader is the real one, ``mtrain train --cluster ssh``. A script named ``ssh`` takes the place of the real ssh: it joins
the leader's pipes with two named pipes of a host, and this process reads and writes at their other ends. The facts in the
answers are those of this machine, collected once, under the name and address of each host. No rank is started: a host that
is told to start is silent but for its heartbeats, until a fault is played or it is told to end.
"""

import argparse
import json
import os
import selectors
import stat
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mtrain
from mtrain.jobs.hosts.channel import BEAT_S
from mtrain.jobs.preflight import facts

SSH = """#!/bin/sh
# Stands in for ssh: finds the host among the arguments, waits as a connection does, and joins the pipes.
while [ "$1" != "--" ]; do shift; done
cd "{folder}"
printf '+%s\\n' "$2" >> connections
[ -p gate ] && read -r _ < gate
[ -e "$2.last" ] && read -r _ < last
[ -e "$2.slow" ] && sleep "$(cat "$2.slow")"
[ -e "$2.dead" ] && {{
    [ -e "$2.last" ] || sleep {dead_s}
    printf -- '-%s\\n' "$2" >> connections
    echo "ssh: connect to host $2 port 22: Connection timed out" >&2
    exit 255
}}
{connects}
printf '=%s\\n' "$2" >> connections
exec 3<&0
cat <&3 > "$2.in" &
exec 3<&-
exec cat < "$2.out"
"""
READ_BYTES = 1 << 20


def address(number: int) -> str:
    """Return the address of a host, which is none of this machine's."""
    return f"10.88.{number // 250}.{number % 250 + 1}"


@dataclass
class Host:
    """One host: the ends of its two named pipes, and what it has been told."""

    number: int
    incoming: int
    outgoing: int
    ranks: int
    partial: bytes = b""
    unsent: bytearray = field(default_factory=bytearray)
    greeted: bool = False
    started: bool = False
    starts: int = 0
    """How often it was told to start."""
    silent: bool = False
    closed: bool = False


class StandIns:
    """All hosts of a job."""

    def __init__(self, folder: Path, *, count: int, ranks: int, odd: int) -> None:
        self._odd = odd
        self._facts: dict[str, Any] = {}
        self._selector = selectors.DefaultSelector()
        self.received: dict[str, list[int]] = {}
        """Verb -> messages and bytes that came."""
        self.sent: dict[str, list[int]] = {}
        """Kind -> messages and bytes that were sent."""
        self.started_at = 0.0
        self.hosts = [self._made(folder, number, ranks) for number in range(count)]

    def _made(self, folder: Path, number: int, ranks: int) -> Host:
        paths = [folder / f"{address(number)}.{end}" for end in ("in", "out")]
        for path in paths:
            if not (path.exists() and stat.S_ISFIFO(path.stat().st_mode)):
                os.mkfifo(path)
        host = Host(
            number, os.open(paths[0], os.O_RDONLY | os.O_NONBLOCK), os.open(paths[1], os.O_RDWR | os.O_NONBLOCK), ranks
        )
        self._selector.register(host.incoming, selectors.EVENT_READ, host)
        self._send(host, "hello", self._hello(number))
        return host

    def _hello(self, number: int) -> dict[str, Any]:
        return {
            "event": "hello",
            "version": mtrain.__version__,
            "host": f"node{number}",
            "addresses": [["eth0", address(number)]],
            "cores": 96,
            "free_bytes": 1 << 38,
            "devices": 0,
            "hidden": False,
            "cwd": "/",
            "pid": 1,
        }

    def _send(self, host: Host, kind: str, message: dict[str, Any] | None) -> None:
        if host.silent or host.closed:
            return
        line = b"{}\n" if message is None else json.dumps(message).encode() + b"\n"
        entry = self.sent.setdefault(kind, [0, 0])
        entry[0] += 1
        entry[1] += len(line)
        host.unsent += line
        self._flush(host)

    def _flush(self, host: Host) -> None:
        try:
            while host.unsent:
                del host.unsent[: os.write(host.outgoing, host.unsent[:65536])]
        except BlockingIOError:
            pass

    def turn(self, timeout_s: float) -> None:
        """Read what has come and answer it."""
        for key, _ in self._selector.select(timeout_s):
            self._read(key.data)
        for host in self.hosts:
            if host.unsent:
                self._flush(host)

    def beat(self) -> None:
        """Send the heartbeat of every host."""
        for host in self.hosts:
            self._send(host, "heartbeat", None)

    def _read(self, host: Host) -> None:
        content = os.read(host.incoming, READ_BYTES)
        if not content:
            self.close(host)
            return
        *lines, host.partial = (host.partial + content).split(b"\n")
        for line in lines:
            message = json.loads(line)
            verb = str(message.get("do", "heartbeat"))
            entry = self.received.setdefault(verb, [0, 0])
            entry[0] += 1
            entry[1] += len(line) + 1
            self._answer(host, verb, message)

    def close(self, host: Host) -> None:
        """Close the connection of a host."""
        if not host.closed:
            self._flush(host)
            host.closed = True
            self._selector.unregister(host.incoming)
            os.close(host.incoming)
            os.close(host.outgoing)

    def _answer(self, host: Host, verb: str, message: dict[str, Any]) -> None:
        if verb == "start":
            host.started = True
            host.starts += 1
            self.started_at = self.started_at or time.monotonic()
            host.ranks = int(message["ranks"])
            if message["first_rank"] == 0:  # Hosts that come wait for the first update of a start.
                update = {"kind": "update", "update": 0, "time": time.time(), "losses": {}}
                self._send(host, "record", {"event": "record", "record": update})
        elif verb in ("end", "stop"):
            self._send(host, "ended", {"event": "ended", "status": 1, "log": "", "logs": {}, "ended_here": True})
        elif "ask" in message:
            self._send(host, verb, {"answer": message["ask"], **self._content(host, verb, message)})

    def _content(self, host: Host, verb: str, message: dict[str, Any]) -> dict[str, Any]:
        if verb == "facts":
            return {"facts": self._facts_of(host, message["wanted"]), "clock": time.time()}
        own: dict[str, dict[str, Any]] = {
            "names": {"names": []},
            "port": {"port": 29500},
            "listen": {"port": 40000, "word": "0" * 32, "clock": time.time()},
            "resolve": {"addresses": {name: [name] for name in message.get("hosts", ())}},
            "connect": {"reached": [""] * len(message.get("targets", ()))},
            "check": {"notes": []},
            "newest": {"checkpoint": None},
        }
        return own.get(verb, {})

    def _facts_of(self, host: Host, wanted: dict[str, Any]) -> dict[str, Any]:
        if not self._facts:
            self._facts = facts.collect({**wanted, "names": []})
        own = {"host": f"node{host.number}", "addresses": [["eth0", address(host.number)]], "identity": ""}
        answer = {**self._facts, **own, "names": {name: [name] for name in wanted["names"]}}
        if self._odd and host.number % self._odd == 1:  # Some hosts have another version of a library.
            python = answer["python"]
            answer["python"] = {**python, "packages": {**python["packages"], "numpy": "1.0.0"}}
        return answer

    # ----------------------------------------------------------------------------------------------------------- faults
    def bring_back(self, host: Host, folder: Path) -> None:
        """Let a host that was lost answer the next connection again."""
        self.hosts[host.number] = self._made(folder, host.number, host.ranks)

    def lose(self, lost: Sequence[Host], *, silently: bool) -> None:
        """Lose hosts. Where their connections are closed, the ranks of all others fail in the collective at once."""
        if silently:
            for host in lost:
                host.silent = True
            return
        first = time.time()
        for host in lost:
            self.close(host)
        for other in self.hosts:
            for rank in range(other.number * other.ranks, (other.number + 1) * other.ranks):
                failure = {
                    "rank": rank,
                    "host": f"node{other.number}",
                    "error": "RuntimeError: connection reset by peer",
                }
                self._send(other, "failure", {"event": "failure", "failure": {**failure, "time": first}, "age_s": 0.0})


class Gates:
    """Holds connections up until others have been made, so that their order does not depend on how fast this machine is.

    ``gate`` opens a second after the first ones have begun, ``last`` once all are connected that do not wait for it.
    """

    def __init__(self, folder: Path, *, first: int, hosts: int) -> None:
        self._file = folder / "connections"
        self._file.touch()
        self._first = first
        self._early = hosts - len(list(folder.glob("*.last")))
        self._hosts = hosts
        self._begun_at = 0.0
        self._closed = {"gate": self._made(folder / "gate")} if first else {}
        self._closed |= {"last": self._made(folder / "last")} if self._early < hosts else {}

    def _made(self, path: Path) -> int:
        os.mkfifo(path)
        return os.open(path, os.O_RDWR)

    def look(self) -> None:
        """Open the gates whose time has come."""
        if not self._closed:
            return
        lines = self._file.read_text().splitlines()
        begun, connected = (sum(line.startswith(sign) for line in lines) for sign in "+=")
        self._begun_at = self._begun_at or (time.monotonic() if begun >= self._first else 0.0)
        if "gate" in self._closed and self._begun_at and time.monotonic() > self._begun_at + 1:
            self._open("gate")
        if "last" in self._closed and connected >= self._early:
            self._open("last")

    def _open(self, name: str) -> None:
        # Each connection reads one line. The descriptor stays open, so that later ones do not wait either.
        os.write(self._closed.pop(name), b"\n" * self._hosts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--hosts", type=int, required=True)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--odd", type=int, default=0, help="every so many hosts have another version of numpy")
    parser.add_argument("--quiet-s", type=float, default=30.0, help="seconds after the start until a host is lost")
    parser.add_argument(
        "--lose", type=int, default=1, help="hosts that are lost at once, from the middle of the list on"
    )
    parser.add_argument("--silently", action="store_true", help="the lost host falls silent; else its connection ends")
    parser.add_argument("--connect-s", type=float, default=0.0, help="seconds that each connection takes")
    parser.add_argument(
        "--dead-s", type=float, default=8.0, help="seconds after which ssh gives up a host that is dead"
    )
    parser.add_argument(
        "--gate", type=int, default=0, help="no connection comes before so many were begun; 0: none waits"
    )
    parser.add_argument("--beat-s", type=float, default=BEAT_S, help="seconds between two heartbeats of a host")
    parser.add_argument("--elastic", action="store_true", help="the lost host comes back after the others have gone on")
    arguments = parser.parse_args()
    folder: Path = arguments.folder.absolute()
    (folder / "bin").mkdir(exist_ok=True)
    ssh = folder / "bin" / "ssh"
    connects = f"sleep {arguments.connect_s}" if arguments.connect_s else ""
    ssh.write_text(SSH.format(folder=folder, dead_s=arguments.dead_s, connects=connects))
    ssh.chmod(0o755)
    gates = Gates(folder, first=arguments.gate, hosts=arguments.hosts)
    stand_ins = StandIns(folder, count=arguments.hosts, ranks=arguments.ranks, odd=arguments.odd)
    (folder / "ready").write_text(",".join(host for host in map(address, range(arguments.hosts))))
    next_beat, lost_at = time.monotonic(), 0.0
    try:
        while not all(host.closed for host in stand_ins.hosts):
            stand_ins.turn(max(0.0, min(next_beat - time.monotonic(), 0.2)))
            gates.look()
            if time.monotonic() >= next_beat:
                next_beat += arguments.beat_s
                stand_ins.beat()
            started = all(host.started for host in stand_ins.hosts if not host.closed) and stand_ins.started_at
            if started and not (folder / "started").exists():
                (folder / "started").write_text(json.dumps({"time": time.time(), **counts(stand_ins)}))
                stand_ins.started_at = time.monotonic()
            if started and not lost_at and time.monotonic() > stand_ins.started_at + arguments.quiet_s:
                lost_at = time.time()
                (folder / "lost").write_text(json.dumps({"time": lost_at, **counts(stand_ins)}))
                stand_ins.lose(lost(stand_ins, arguments.lose), silently=arguments.silently)
            if arguments.elastic and lost_at:
                _play_return(stand_ins, folder, count=arguments.lose)
    finally:
        (folder / "ended").write_text(json.dumps({"time": time.time(), **counts(stand_ins)}))


def lost(stand_ins: StandIns, count: int) -> list[Host]:
    """Return the hosts that are lost."""
    middle = len(stand_ins.hosts) // 2
    return stand_ins.hosts[middle : middle + count]


def _play_return(stand_ins: StandIns, folder: Path, *, count: int) -> None:
    """Note when the others go on without the lost hosts; then bring them back, and note when all go on with them."""
    gone = lost(stand_ins, count)
    numbers = {host.number for host in gone}
    fewest = min(host.starts for host in stand_ins.hosts if host.number not in numbers)
    if fewest >= 2 and all(host.closed for host in gone) and not (folder / "shrunk").exists():
        (folder / "shrunk").write_text(json.dumps({"time": time.time(), **counts(stand_ins)}))
        for host in gone:
            stand_ins.bring_back(host, folder)
        return
    # Some may start before others are there, so all are back once each was started since.
    are_back = (folder / "shrunk").exists() and fewest >= 3 and all(host.starts for host in gone)
    if are_back and not (folder / "grown").exists():
        now = {"time": time.time(), "attempts": fewest, **counts(stand_ins)}
        (folder / "grown").write_text(json.dumps(now))


def counts(stand_ins: StandIns) -> dict[str, Any]:
    """Return messages and bytes so far, by verb."""
    return {"received": stand_ins.received, "sent": stand_ins.sent}


if __name__ == "__main__":
    main()
