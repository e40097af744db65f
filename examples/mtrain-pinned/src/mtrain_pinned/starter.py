"""Start the ranks of one host, and wait for them: `python -m mtrain_pinned.starter ... -- COMMAND OF A RANK`.

It imports neither mtrain nor a framework, so it starts at once and takes little memory.
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from types import FrameType

POLL_S = 0.1
"""How often it looks for ranks that have ended."""


def main(argv: Sequence[str]) -> int:
    """Return 0 if every rank has ended well, else 1; each rank that fails first is named in a line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--first-rank", type=int, required=True)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--master", nargs=2, required=True)
    parser.add_argument("--endpoints", required=True)
    parser.add_argument("--grace-s", type=float, required=True)
    parser.add_argument("--pin", action="store_true")
    parser.add_argument("command", nargs="+")
    given = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, _stop)
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        for number in range(given.ranks):
            ranks.append(_start(given, number))
        return _wait(ranks, first_rank=given.first_rank)
    finally:
        _end(ranks, grace_s=given.grace_s)


def _start(given: argparse.Namespace, number: int) -> "subprocess.Popen[bytes]":
    """Start rank `number` of this host. It inherits the cores of this process, which are set for a moment."""
    everywhere = os.sched_getaffinity(0)
    env = {**os.environ, **variables(given, number)}
    if given.pin:
        os.sched_setaffinity(0, cores_of(sorted(everywhere), number, given.ranks))
    try:
        return subprocess.Popen(given.command, env=env)  # noqa: S603 - the command line of mtrain's plan
    finally:
        os.sched_setaffinity(0, everywhere)


def variables(given: argparse.Namespace, number: int) -> Mapping[str, str]:
    """Return the environment variables by which a rank of torch or of Paddle finds its place and the others."""
    endpoints = given.endpoints.split(",")
    rank, size = given.first_rank + number, len(endpoints)
    address, port = given.master
    of_torch = {
        "MASTER_ADDR": address.strip("[]"),
        "MASTER_PORT": port,
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(number),
        "LOCAL_WORLD_SIZE": str(given.ranks),
    }
    of_paddle = {
        "PADDLE_TRAINER_ID": str(rank),
        "PADDLE_TRAINERS_NUM": str(size),
        "PADDLE_LOCAL_RANK": str(number),
        "PADDLE_TRAINER_ENDPOINTS": given.endpoints,
        "PADDLE_CURRENT_ENDPOINT": endpoints[rank],
    }
    return of_torch | of_paddle


def cores_of(cores: Sequence[int], number: int, ranks: int) -> set[int]:
    """Return the cores of rank `number`: an equal share in order; all of them where ranks outnumber cores."""
    if len(cores) < ranks:
        return set(cores)
    return set(cores[number * len(cores) // ranks : (number + 1) * len(cores) // ranks])


def _wait(ranks: Sequence["subprocess.Popen[bytes]"], *, first_rank: int) -> int:
    """Wait until all ranks have ended well, or one has failed."""
    while True:
        statuses = [rank.poll() for rank in ranks]
        failed = [(first_rank + number, status) for number, status in enumerate(statuses) if status]
        for rank, status in failed:
            print(f"pinned: rank {rank} ended with status {status}", flush=True)
        if failed or all(status == 0 for status in statuses):
            return 1 if failed else 0
        time.sleep(POLL_S)


def _end(ranks: Sequence["subprocess.Popen[bytes]"], *, grace_s: float) -> None:
    """End the ranks that are left: SIGTERM, then SIGKILL after `grace_s` seconds."""
    until = time.monotonic() + grace_s
    for rank in ranks:
        if rank.poll() is None:
            rank.terminate()
    for rank in ranks:
        try:
            rank.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            rank.kill()
            rank.wait()


def _stop(signum: int, frame: FrameType | None) -> None:
    sys.exit(128 + signum)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
