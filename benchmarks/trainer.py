"""Measure milliseconds per update: the Trainer against a hand-written loop of each stack, and against other libraries'
loops.

Every case trains YOLOv5n at 320 px, global batch 8 on 2 ranks, SGD with nesterov, three groups, clipping, EMA, with the
same memory layout, the same model and the same batches. Both loops run in the same two processes, which mtrain's own
plan of the backend starts, and take turns.
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


@dataclass(frozen=True)
class Case:
    """A backend with its options, and the peer with which it is compared."""

    name: str
    backend: str
    peer: str
    """module:class of the peer in ``benchmarks.peers``."""
    needs: tuple[str, ...] = ()
    """Modules that the peer requires."""
    target: float | None = 1.02
    options: dict[str, Any] = field(default_factory=dict)
    channels_last: bool = False
    """Whether both loops use the channels-last layout. Horovod and DeepSpeed undo it in the hand-written loop, so it is
    off for both there."""


ZERO1, ZERO3 = {"stage": 1}, {"stage": 3}
CASES = {
    "ddp": Case("Trainer / DDP loop", "ddp", "torch_loops:DDPLoop", channels_last=True),
    "horovod": Case("Trainer / Horovod loop", "horovod", "torch_loops:HorovodLoop", ("horovod",)),
    "deepspeed1": Case(
        "Trainer / ZeRO-1 loop", "deepspeed", "torch_loops:DeepSpeedLoop", ("deepspeed",), options=ZERO1
    ),
    "deepspeed3": Case(
        "Trainer / ZeRO-3 loop", "deepspeed", "torch_loops:DeepSpeed3Loop", ("deepspeed",), options=ZERO3
    ),
    "fleet": Case("Trainer / Paddle loop", "fleet", "paddle_loop:FleetLoop", ("paddle",)),
    "accelerate": Case(
        "ddp / Accelerate", "ddp", "torch_loops:AccelerateLoop", ("accelerate",), 1.0, channels_last=True
    ),
    "fabric": Case(
        "ddp / Lightning Fabric", "ddp", "torch_loops:FabricLoop", ("lightning_fabric",), 1.0, channels_last=True
    ),
    "accelerate1": Case(
        "ZeRO-1 / Accelerate with DeepSpeed",
        "deepspeed",
        "torch_loops:AccelerateZeroLoop",
        ("accelerate", "deepspeed", "transformers"),
        1.0,
        options=ZERO1,
    ),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", choices=[*CASES, []], default=[])
    parser.add_argument("--json", type=Path, default=Path("/dev/null"))
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--updates", type=int, default=4, help="per block")
    parser.add_argument("--rank", action="store_true", help="run as a rank")
    arguments = parser.parse_args()
    if arguments.rank:
        return run(CASES[arguments.cases[0]], arguments)
    rows = []
    for name in arguments.cases or CASES:
        missing = [module for module in CASES[name].needs if find_spec(module) is None]
        if missing:
            print(f"{CASES[name].name}: skipped, {' and '.join(missing)} not installed", flush=True)
            continue
        rows += started(name, arguments)
    arguments.json.write_text(json.dumps(rows))
    return 0


def started(name: str, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Start two ranks by mtrain's own plan; return the rows that rank 0 wrote."""
    from benchmarks.turns import RANKS
    from mtrain.core.interfaces import Host
    from mtrain.spec import plugins
    from mtrain.system.environment import caller, clean
    from mtrain.system.placement import free_port

    rendezvous = plugins.load("backends", CASES[name].backend).rendezvous
    starter = {"torch": "torchrun", "horovod": "horovodrun", "paddle": "fleetrun"}[rendezvous]
    launcher = plugins.load("launchers", starter)
    options = launcher.Options(python=sys.executable, master_port=free_port(), interface="lo")
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "rows.json"
        script = [__file__, name, "--rank", "--json", str(target)]
        script += ["--blocks", str(arguments.blocks), "--updates", str(arguments.updates)]
        [command] = launcher(options).plan(script, [Host(address="127.0.0.1", slots=RANKS)], RANKS)
        env = {**clean(caller()), **command.env, "PYTHONPATH": str(ROOT)}
        subprocess.run([str(word) for word in command.argv], env=env, cwd=folder, check=True)
        rows: list[dict[str, Any]] = json.loads(target.read_text())
        return rows


def run(case: Case, arguments: argparse.Namespace) -> int:
    """Run one rank, in which both loops take turns."""
    from benchmarks import job, turns
    from mtrain.spec import plugins

    loaded = plugins.load("backends", case.backend)
    backend = loaded(loaded.Options(device="cpu", **case.options))
    with backend as session:
        job.bind(backend.framework)
        module, _, name = case.peer.partition(":")
        ours = turns.Ours(session, channels_last=case.channels_last)
        peer = getattr(import_module(f"benchmarks.peers.{module}"), name)(session, channels_last=case.channels_last)
        times = turns.take(ours, peer, turns.Turns(blocks=arguments.blocks, updates=arguments.updates))
        gap = turns.difference(ours, peer)  # collective: every rank
        if session.collective.rank == 0:
            turns.report(case.name, times, arguments.json, gap=gap, bound=case.target)
    sys.stdout.flush()
    os._exit(0)  # libraries that were not shut down leave threads running


if __name__ == "__main__":
    sys.exit(main())
