"""Milliseconds per update: the Trainer against a hand-written loop of each stack, and against other libraries' loops.

Every case trains YOLOv5n at 320 px, global batch 8 on 2 ranks, SGD with nesterov, three groups, clipping, EMA, with the same
layout of memory, the same model and the same batches. Both loops live in the same two processes, which mtrain's own plan of the
backend starts, and take turns.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))


@dataclass(frozen=True, kw_only=True)
class Case:
    """A backend, its options, and whom it is compared with."""

    name: str
    backend: str
    peer: str
    """module:class in ``benchmarks.peers``."""
    options: dict[str, Any] = field(default_factory=dict)
    channels_last: bool = False
    """Of both; Horovod and DeepSpeed take it from the hand-written loop, so that neither has it there."""
    target: float | None = 1.02
    needs: str = ""
    """A module without which there is no such peer."""


ZERO1, ZERO3 = {"stage": 1}, {"stage": 3}
CASES = {
    "ddp": Case(name="Trainer / DDP loop", backend="ddp", peer="torch_loops:DDPLoop", channels_last=True),
    "horovod": Case(name="Trainer / Horovod loop", backend="horovod", peer="torch_loops:HorovodLoop", needs="horovod"),
    "deepspeed1": Case(
        name="Trainer / ZeRO-1 loop",
        backend="deepspeed",
        options=ZERO1,
        peer="torch_loops:DeepSpeedLoop",
        needs="deepspeed",
    ),
    "deepspeed3": Case(
        name="Trainer / ZeRO-3 loop",
        backend="deepspeed",
        options=ZERO3,
        peer="torch_loops:DeepSpeed3Loop",
        needs="deepspeed",
    ),
    "fleet": Case(name="Trainer / Paddle loop", backend="fleet", peer="paddle_loop:FleetLoop", needs="paddle"),
    "accelerate": Case(
        name="ddp / Accelerate",
        backend="ddp",
        peer="torch_loops:AccelerateLoop",
        channels_last=True,
        target=1.0,
        needs="accelerate",
    ),
    "fabric": Case(
        name="ddp / Lightning Fabric",
        backend="ddp",
        peer="torch_loops:FabricLoop",
        channels_last=True,
        target=1.0,
        needs="lightning_fabric",
    ),
    "accelerate1": Case(
        name="ZeRO-1 / Accelerate with DeepSpeed",
        backend="deepspeed",
        options=ZERO1,
        peer="torch_loops:AccelerateZeroLoop",
        target=1.0,
        needs="accelerate",
    ),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", choices=[*CASES, []], default=[])
    parser.add_argument("--json", type=Path, default=Path("/dev/null"))
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--updates", type=int, default=4, help="per block")
    parser.add_argument("--rank", action="store_true", help="this is a rank")
    given = parser.parse_args()
    if given.rank:
        return run(CASES[given.cases[0]], given)
    rows = []
    for name in given.cases or CASES:
        if CASES[name].needs and find_spec(CASES[name].needs) is None:
            print(f"{CASES[name].name}: skipped, {CASES[name].needs} is not installed", flush=True)
            continue
        rows += started(name, given)
    given.json.write_text(json.dumps(rows))
    return 0


def started(name: str, given: argparse.Namespace) -> list[dict[str, Any]]:
    """Two ranks by mtrain's own plan; the rows that rank 0 wrote."""
    from benchmarks.turns import RANKS
    from mtrain.core import plugins
    from mtrain.core.interfaces import Host
    from mtrain.core.placement import free_port
    from mtrain.launchers.environment import caller, cleaned

    rendezvous = plugins.load("backends", CASES[name].backend).rendezvous
    starter = {"torch": "torchrun", "horovod": "horovodrun", "paddle": "fleetrun"}[rendezvous]
    launcher = plugins.load("launchers", starter)
    options = launcher.Options(python=sys.executable, master_port=free_port(), interface="lo")
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "rows.json"
        script = [__file__, name, "--rank", "--json", str(target)]
        script += ["--blocks", str(given.blocks), "--updates", str(given.updates)]
        [command] = launcher(options).plan(script, [Host(address="127.0.0.1", slots=RANKS)], RANKS)
        env = {**cleaned(caller()), **command.env, "PYTHONPATH": str(ROOT)}
        subprocess.run([str(word) for word in command.argv], env=env, cwd=folder, check=True)
        rows: list[dict[str, Any]] = json.loads(target.read_text())
        return rows


def run(case: Case, given: argparse.Namespace) -> int:
    """One rank: both loops in turns."""
    from benchmarks import job, turns
    from mtrain.core import plugins

    loaded = plugins.load("backends", case.backend)
    with loaded(loaded.Options(device="cpu", **case.options)) as backend:
        job.bind(backend.framework)
        module, _, name = case.peer.partition(":")
        ours = turns.Ours(backend, channels_last=case.channels_last)
        peer = getattr(import_module(f"benchmarks.peers.{module}"), name)(backend, channels_last=case.channels_last)
        times = turns.take(ours, peer, turns.Turns(blocks=given.blocks, updates=given.updates))
        gap = turns.difference(ours, peer)  # collective: every rank
        if backend.collective.rank == 0:
            turns.report(case.name, times, given.json, gap=gap, bound=case.target)
    sys.stdout.flush()
    os._exit(0)  # libraries that were not asked to end leave threads behind


if __name__ == "__main__":
    sys.exit(main())
