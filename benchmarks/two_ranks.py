"""How much of a rank's speed is left when there are two: mtrain beside the loop that people write by hand for the same stack.

    python -m benchmarks.two_ranks [ddp] [horovod] [fleet] [--rounds 3] [--json rows.json]

Both loops train YOLOv5n on the same batches, four images of 320 px for each rank, in the same processes and by turns. Each round
starts them on one rank and on two. The efficiency is the time of an update on one rank, divided by that on two: 1 is perfect.
CPU seconds are those of a rank, all its threads included; they depend less on the other load of a machine than wall seconds.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.turns import Loop, Ours, difference

ROOT = Path(__file__).parents[1]
PEERS = {"ddp": "torch_loops:DDPLoop", "horovod": "torch_loops:HorovodLoop", "fleet": "paddle_loop:FleetLoop"}
NEEDS = {"ddp": "torch", "horovod": "horovod", "fleet": "paddle"}
STARTERS = {"ddp": "torchrun", "horovod": "horovodrun", "fleet": "fleetrun"}
WARMUP = 3
CLOCKS = {"cpu": time.process_time, "wall": time.perf_counter}
Medians = dict[str, dict[str, float]]
"""``ours`` and ``peer`` -> clock -> ms per update."""


def main() -> int:
    """Measure the named backends, or run as a rank."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("backends", nargs="*", choices=[*PEERS, []], default=[])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--blocks", type=int, default=6)
    parser.add_argument("--updates", type=int, default=3, help="per block")
    parser.add_argument("--rank", type=Path, metavar="FILE", help="run as a rank")
    flags = parser.parse_args()
    if flags.rank:
        return _rank(flags.backends[0], flags)
    rows: list[dict[str, Any]] = []
    for backend in flags.backends or PEERS:
        if find_spec(NEEDS[backend]) is None:
            print(f"{backend}: skipped, {NEEDS[backend]} not installed", flush=True)
            continue
        rounds = []
        for number in range(flags.rounds):
            sizes = (1, 2) if number % 2 else (2, 1)
            rounds.append({size: _started(backend, size, flags) for size in sizes})
        rows += _rows(backend, rounds)
        if flags.json:
            flags.json.write_text(json.dumps(rows, indent=1))
    return 0


def _rows(backend: str, rounds: list[dict[int, Medians]]) -> list[dict[str, Any]]:
    """Print and return a row for each clock: medians over rounds, in which each loop is compared with itself."""
    rows = []
    for clock in CLOCKS:
        efficiency = {
            loop: [each[1][loop][clock] / each[2][loop][clock] for each in rounds] for loop in ("ours", "peer")
        }
        ratios = sorted(a / b for a, b in zip(efficiency["ours"], efficiency["peer"], strict=True))
        times = {
            f"{loop}_{size}": median(each[size][loop][clock] for each in rounds)
            for loop in ("ours", "peer")
            for size in (1, 2)
        }
        row = {"name": f"1 to 2 ranks, {backend}, {clock}", **times, "ratio": median(ratios), "ratios": ratios}
        row |= {f"efficiency_{loop}": median(values) for loop, values in efficiency.items()}
        print(
            f"{row['name']}: mtrain {times['ours_1']:.0f} -> {times['ours_2']:.0f} ms, efficiency {row['efficiency_ours']:.3f}; "
            f"by hand {times['peer_1']:.0f} -> {times['peer_2']:.0f} ms, efficiency {row['efficiency_peer']:.3f}; "
            f"ratio {row['ratio']:.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f})",
            flush=True,
        )
        rows.append(row)
    return rows


def _started(backend: str, size: int, flags: argparse.Namespace) -> Medians:
    """Start ranks by mtrain's own plan; return what they have measured."""
    from mtrain.core.interfaces import Host
    from mtrain.spec import plugins
    from mtrain.system.environment import caller, clean
    from mtrain.system.placement import free_port

    launcher = plugins.load("launchers", STARTERS[backend])
    options = launcher.Options(python=sys.executable, master_port=free_port(), interface="lo", threads=1)
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "medians.json"
        script = [__file__, backend, "--rank", str(target)]
        script += ["--blocks", str(flags.blocks), "--updates", str(flags.updates)]
        [command] = launcher(options).plan(script, [Host(address="127.0.0.1", slots=size)], size)
        env = {**clean(caller()), **command.env, "PYTHONPATH": str(ROOT)}
        subprocess.run([str(word) for word in command.argv], env=env, cwd=folder, check=True)
        found: Medians = json.loads(target.read_text())
        return found


def _rank(name: str, flags: argparse.Namespace) -> int:
    """Run one rank, in which both loops take turns."""
    from benchmarks import job
    from mtrain.spec import plugins

    loaded = plugins.load("backends", name)
    backend = loaded(loaded.Options(device="cpu"))
    with backend as session:
        job.bind(backend.framework)
        module, _, kind = PEERS[name].partition(":")
        ours = Ours(session, channels_last=False)
        peer = getattr(import_module(f"benchmarks.peers.{module}"), kind)(session, channels_last=False)
        blocks = _blocks(session.collective, ours, peer, count=flags.blocks, updates=flags.updates)
        gap = difference(ours, peer)  # collective: every rank
        if session.collective.rank == 0:
            print(f"{name} on {session.collective.size}: largest difference of a weight {gap:.1e}", flush=True)
            found = {
                loop: {clock: median(values) for clock, values in clocks.items()} for loop, clocks in blocks.items()
            }
            flags.rank.write_text(json.dumps(found))
    sys.stdout.flush()
    os._exit(0)  # libraries that were not shut down leave threads running


def _blocks(
    collective: Any, ours: Loop, peer: Loop, *, count: int, updates: int
) -> Mapping[str, Mapping[str, list[float]]]:
    """Return for each loop and clock the ms per update of each block, the mean over ranks."""
    for loop in (ours, peer):
        loop.updates(WARMUP)
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for block in range(count):
        order = [("ours", ours), ("peer", peer)]
        for name, loop in order if block % 2 else order[::-1]:
            collective.all_gather(None)
            began = {clock: read() for clock, read in CLOCKS.items()}
            loop.updates(updates)
            spent = {clock: (read() - began[clock]) / updates * 1000 for clock, read in CLOCKS.items()}
            everyone = collective.all_gather(spent)
            for clock in CLOCKS:
                found[name][clock].append(sum(each[clock] for each in everyone) / collective.size)
    return found


if __name__ == "__main__":
    sys.exit(main())
