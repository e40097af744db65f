"""How the cost of a leader grows with the hosts of a job: its start, a quiet minute, one lost host, the end."""

import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parents[2]
SIZES = (4, 16, 64, 256, 1000)
ELASTIC_SIZES = (4, 64, 256, 1000)
BACK_SIZES = (128, 500, 1000)
SSH_SIZES = (4, 16, 100)
STAND_IN = "benchmarks.growth.stand_in_hosts"


def measure(  # noqa: PLR0913 - the conditions of one measurement
    count: int,
    *,
    ranks: int = 8,
    quiet_s: float = 20.0,
    silently: bool = False,
    odd: int = 0,
    connect_s: float = 0.0,
    slow: dict[int, float] | None = None,
    dead: tuple[int, ...] = (),
    last: tuple[int, ...] = (),
    gate: int = 0,
    timeout_s: int = 30,
    beat_s: float | None = None,
    elastic: bool = False,
    lose: int = 1,
) -> dict[str, Any]:
    """Run the real leader of ``count`` stand-in hosts to its end; return what it cost.

    Args:
        count: hosts.
        ranks: ranks on each.
        quiet_s: seconds without an event between the start and the loss of one host.
        silently: whether the lost host falls silent; else its connection ends, and the ranks of all others fail.
        odd: every so many hosts have another version of a library, 0: none.
        connect_s: seconds that each connection takes.
        slow: the seconds that the connections of some hosts take, by their numbers.
        dead: hosts that never answer, so that ssh gives them up after eight seconds.
        last: hosts that connect, or are given up, once all others are connected, however long that takes.
        gate: no host connects before so many connections were begun, and a second has passed.
        timeout_s: ``cluster.failure_timeout_s``.
        beat_s: seconds between two heartbeats of each host; None: as the agents of real hosts.
        elastic: whether the job goes on without the lost hosts, and again with them; then it is asked to end.
        lose: hosts that are lost at once.
    """
    from benchmarks.growth.stand_in_hosts import address

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for number, seconds in (slow or {}).items():
            (folder / f"{address(number)}.slow").write_text(str(seconds))
        for number in dead:
            (folder / f"{address(number)}.dead").touch()
        for number in last:
            (folder / f"{address(number)}.last").touch()
        flags = ["--hosts", str(count), "--ranks", str(ranks), "--quiet-s", str(quiet_s), "--connect-s", str(connect_s)]
        flags += ["--gate", str(gate), "--lose", str(lose)]
        flags += ["--odd", str(odd), *(["--silently"] if silently else []), *(["--elastic"] if elastic else [])]
        flags += [] if beat_s is None else ["--beat-s", str(beat_s)]
        stand_ins = subprocess.Popen([sys.executable, "-m", STAND_IN, str(folder), *flags], cwd=ROOT)
        try:
            return _lead(folder, count, ranks, timeout_s, elastic=elastic)
        finally:
            stand_ins.terminate()
            stand_ins.wait()


def _lead(folder: Path, count: int, ranks: int, timeout_s: int, *, elastic: bool) -> dict[str, Any]:
    _await(folder / "ready")
    words = ["train", "-c", "digits", "--cluster", "ssh", "--ips", (folder / "ready").read_text()]
    words += ["--nproc-per-node", str(ranks), "--backend", "ddp", "--failure-timeout-s", str(timeout_s)]
    words += ["-o", f"report.dir={folder / 'runs'}", f"train.batch_size={count * ranks}", "report.display=plain"]
    words += ["--nnodes", f"1:{count}", "-o", "evaluate.enabled=false"] if elastic else []
    env = {**os.environ, "PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT), "HOME": str(folder)}
    began = time.time()
    with (folder / "console").open("wb") as console:
        leader = psutil.Popen(
            [sys.executable, "-m", "mtrain", *words], env=env, cwd=folder, stdout=console, stderr=console
        )
        row = _watch(leader, folder, began)
    row["connections"] = (folder / "connections").read_text().split()
    row |= {"hosts": count, "code": leader.wait(), "console": (folder / "console").read_text(errors="replace")}
    return row


def measure_ssh(count: int) -> dict[str, Any]:
    """Start a job of which one host is dead and one takes three seconds to connect; return what was counted and waited for."""
    row = measure(count, dead=(count // 2,), slow={1: 3.0})
    seen = connecting(row["connections"])
    return {
        "hosts": count,
        "code": row["code"],
        "begun": len(seen["begun"]),
        "most_connecting": seen["most_connecting"],
        "connected_before_one_is_given_up": seen["connected_before_one_is_given_up"],
        "whole_s": row["whole_s"],
        "cpu_s": row["cpu_s"],
        "named": sum("bad" in line for line in row["console"].splitlines()),
    }


def connecting(connections: Sequence[str]) -> dict[str, Any]:
    """Return what the signs of connections tell, which are in the order of time.

    Args:
        connections: ``+ADDRESS`` where a command has begun, ``=ADDRESS`` where it has connected, ``-ADDRESS`` where it has
            given its host up.
    """
    signs = [line[0] for line in connections]
    open_now = list(itertools.accumulate({"+": 1, "=": -1, "-": -1}[sign] for sign in signs))
    first_dead = signs.index("-") if "-" in signs else len(signs)
    return {
        "begun": [line[1:] for line in connections if line[0] == "+"],
        "most_connecting": max(open_now, default=0),
        "connected_before_one_is_given_up": signs[:first_dead].count("="),
    }


def _watch(leader: psutil.Popen, folder: Path, began: float) -> dict[str, Any]:
    """Sample the leader until it has ended."""
    row: dict[str, Any] = {"fds": 0, "threads": 0, "rss_mib": 0.0}
    marks: dict[str, tuple[float, float]] = {}
    asked = False
    while leader.poll() is None:
        try:
            with leader.oneshot():
                cpu = leader.cpu_times()
                used = cpu.user + cpu.system
                row["fds"] = max(row["fds"], leader.num_fds())
                row["threads"] = max(row["threads"], leader.num_threads())
                row["rss_mib"] = max(row["rss_mib"], leader.memory_info().rss / (1 << 20))
        except psutil.Error:
            break
        for mark in ("started", "lost", "shrunk", "grown"):
            if mark not in marks and (folder / mark).exists():
                marks[mark] = (time.time(), used)
        if "started" in marks:
            row.setdefault("rss_mib_over_time", []).append((time.time(), leader.memory_info().rss / (1 << 20)))
        if "grown" in marks and not asked:
            asked = True
            leader.terminate()
        row["cpu_s"] = used
        time.sleep(0.05)
    ended = time.time()
    if "started" in marks:
        row |= {"start_s": marks["started"][0] - began, "start_cpu_s": marks["started"][1]}
        row["messages"] = _read(folder / "started")
    if "lost" in marks:
        quiet_s = marks["lost"][0] - marks["started"][0]
        row["quiet_cpu_s_per_min"] = (marks["lost"][1] - marks["started"][1]) / quiet_s * 60
        row["verdict_s"] = ended - marks["lost"][0]
    if "grown" in marks:
        for name, before in (("shrunk", "lost"), ("grown", "shrunk")):
            (to, cpu), (since, cpu_since) = marks[name], marks[before]
            row |= {f"{name}_s": to - since, f"{name}_cpu_s": cpu - cpu_since}
        del row["verdict_s"]
        row |= _returned(_read(folder / "shrunk"), _read(folder / "grown"))
    row["whole_s"] = ended - began
    return row


def _returned(shrunk: dict[str, Any], grown: dict[str, Any]) -> dict[str, Any]:
    """Return what the leader has sent from the moment at which it ran without some hosts until all took part again."""
    sent = {
        verb: [now - before for now, before in zip(both, shrunk["received"].get(verb, [0, 0]), strict=True)]
        for verb, both in grown["received"].items()
    }
    return {
        "attempts": grown["attempts"],
        "surveys": sent.get("port", [0, 0])[0],
        "grown_messages": sum(count for count, _ in sent.values()),
        "grown_mb": sum(size for _, size in sent.values()) / 1e6,
    }


def _read(path: Path) -> Any:
    return json.loads(path.read_text())


def _await(path: Path, timeout_s: float = 120.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
