"""How much memory a rank needs to build, save and restore a model, for each backend and number of ranks.

    python -m benchmarks.memory [--millions 50] [--backends ddp,deepspeed:1,deepspeed:3,fsdp] [--ranks 1,2]
        [--native] [--llama [--files FOLDER]] [--only-build]
    python -m benchmarks.memory --llama --backends fsdp:tensor=2,fsdp:pipeline=2:tensor=2 --ranks 4

For every rank and phase it reads the peak of the resident set (``VmHWM``, reset before each phase), in float32 with AdamW and
an average. ``weights`` is the part of a build before the optimizer is made. Memory that the C library keeps is given back
before each phase, so that it cannot hide what a phase needs.

A build may need, beyond the imports, what the backend makes a rank hold, three times the largest array and 300 MiB. Start
values, a save and a restore may need the last two beyond what is held when they begin; a save in the background also one
copy of what the rank contributes. ``--former`` saves the whole state that every rank gathers, as sessions without
``Capabilities.stream`` do. ``--peer`` saves with ``torch.distributed.checkpoint`` besides, in turns.
"""

import argparse
import ctypes
import gc
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[1]
MIB = 1 << 20
ALLOWED_MIB = 300
"""What a phase may need beside arrays: libraries' own buffers."""


# ------------------------------------------------------------------------------------------------------------ one rank
def resident(peak: str = "VmRSS") -> int:
    """Return the resident set of this process, or with ``VmHWM`` its peak, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(peak)) * 1024


class Phases:
    """Peaks of the resident set by phase."""

    def __init__(self) -> None:
        self.found: dict[str, dict[str, float]] = {}

    def measure(self, name: str, work: Any) -> Any:
        """Do ``work``; note the resident set before, its peak meanwhile, and the seconds."""
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
        before, start, cpu = resident(), time.perf_counter(), time.process_time()
        result = work()
        self.found[name] = {
            "before": before,
            "peak": resident("VmHWM"),
            "after": resident(),
            "seconds": time.perf_counter() - start,
            "cpu": time.process_time() - cpu,
        }
        return result


def network(millions: int) -> Any:
    """Return a module of about ``millions`` million parameters: blocks of two matrices each."""
    import torch
    from torch import nn

    width = 2048 if millions >= 150 else 1024
    blocks = max(round(millions * 1e6 / (8 * width * width)), 1)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(
                nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
                for _ in range(blocks)
            )

        def forward(self, batch: Mapping[str, Any]) -> dict[str, Any]:
            x = batch["x"]
            for block in self.blocks:
                x = x + 0.1 * block(x)
            total = x.square().mean()
            return {"total": total, "part": total.detach()}

    torch.set_num_threads(1)
    return Net, width


def llama(millions: int, folder: Path | None) -> Any:
    """Return the config of a Llama of about ``millions`` million parameters, and what builds it, from the config or from files."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from mtrain_language import network
    from mtrain_language.loading import array_by_array

    width, vocabulary = (1024, 32768) if millions >= 150 else (512, 16384)
    layers = max(round((millions * 1e6 - 2 * vocabulary * width) / (12 * width * width)), 1)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=64 * round(width / 24),
        num_hidden_layers=layers,
        num_attention_heads=8,
        bos_token_id=None,
        eos_token_id=None,
    )

    def build() -> Any:
        if folder is None:
            return network.adapt(LlamaForCausalLM(config), path="its config")
        with array_by_array():
            module = LlamaForCausalLM.from_pretrained(folder, dtype="float32", local_files_only=True)
        return network.adapt(module, path=str(folder))

    torch.set_num_threads(1)
    return config, build


def texts(draws: np.random.Generator) -> dict[str, Any]:
    """Return a micro batch of two texts of 16 tokens."""
    tokens = draws.integers(0, 99, (2, 16))
    positions = np.tile(np.arange(16), (2, 1))
    return {"tokens": tokens, "positions": positions, "labels": tokens, "scale": np.full(2, 1 / 16, np.float32)}


def mesh_of(name: str, ranks: int) -> Any:
    """Return the mesh of ``ranks`` ranks in the name of a backend, such as ``fsdp:tensor=2:pipeline=2``; None: it names none."""
    from mtrain.core.interfaces import Mesh

    kind, *values = name.split(":")
    if kind != "fsdp" or not values:
        return None
    lengths = {key: int(length) for key, _, length in (value.partition("=") for value in values) if length}
    rest = ranks // int(np.prod(list(lengths.values())))
    return Mesh(**{"replicate": 1, "shard": rest, "tensor": 1, **lengths}, sequence="sequence" in values)


def backend_of(name: str) -> Any:
    """Return the backend ``name``, such as ``deepspeed:1``."""
    kind, _, option = name.partition(":")
    if kind == "ddp":
        from mtrain.backends.ddp import DDP

        return DDP(DDP.Options(device="cpu"))
    if kind == "fsdp":
        from mtrain.backends.fsdp import Fsdp

        return Fsdp(Fsdp.Options(device="cpu"))
    from mtrain.backends.deepspeed import DeepSpeed

    return DeepSpeed(DeepSpeed.Options(device="cpu", stage=int(option)))


def recipe_of(options: argparse.Namespace, ranks: int) -> Any:
    """Return how the model is trained."""
    from mtrain.core.interfaces import Recipe

    def own(model: Any) -> Any:
        from torch.optim import AdamW

        return AdamW(model.parameters(), lr=1e-4)

    return Recipe(
        rule="adamw",
        groups=(("", {} if options.own_optimizer else {"weight_decay": 0.01}),),
        micro_batch=2,
        ema_decay=0.99,
        seed=1,
        own_model=options.native or options.llama,
        mesh=mesh_of(options.backend, ranks),
        native_optimizer=own if options.own_optimizer else None,
    )


def built(session: Any, build: Any, recipe: Any, phases: Phases) -> Any:
    """Build the model and its optimizer; note the peak of the weights alone, where the session makes both one after the other."""
    make_optimizer, before = session.optimizer, resident()

    def noted(*arguments: Any) -> Any:
        phases.found["weights"] = {
            "before": before,
            "peak": resident("VmHWM"),
            "after": resident(),
            "seconds": 0.0,
            "cpu": 0.0,
        }
        return make_optimizer(*arguments)

    session.optimizer = noted
    return session.prepare(build, recipe)


def rank_main(options: argparse.Namespace) -> None:
    """Measure on one rank, and write the result to ``options.out``."""
    from mtrain.core.collective import barrier
    from mtrain.core.interfaces import State

    phases = Phases()
    imported = resident()
    net, width = llama(options.millions, options.files)[::-1] if options.llama else network(options.millions)
    with backend_of(options.backend) as session:
        collective = session.collective
        recipe = recipe_of(options, collective.size)
        barrier(collective)
        prepared = phases.measure("build", lambda: built(session, net, recipe, phases))
        shapes = {name: outline.shape for name, outline in _outlines(session, *prepared).items()}
        if not (options.native or options.llama):
            phases.measure("start", lambda: session.restore(*prepared, State(weights=Drawn(shapes))))
        if not options.only_build:
            measure_job(options, phases, session, prepared, width)
        result: dict[str, Any] = {"phases": phases.found, "imported": imported}
        result |= {"parameters": sum(int(np.prod(shape)) for shape in shapes.values())}
        result["largest"] = 4 * max(int(np.prod(shape)) for shape in shapes.values())
        everyone = collective.all_gather(result)
        if collective.rank == 0:
            (options.out / "result.json").write_text(json.dumps(everyone))


def measure_job(options: argparse.Namespace, phases: Phases, session: Any, prepared: Any, width: Any) -> None:
    """Measure training, saves and a restore; ``width``: of the inputs of a model that is no Llama."""
    from mtrain.core.checkpoint.sharing import load_everywhere
    from mtrain.core.checkpoint.store import Checkpoints, NoCheckpoints
    from mtrain.core.collective import barrier
    from mtrain.core.interfaces import Progress, Rates
    from mtrain.core.state.streams import WholeStream, stream_of

    collective, folder = session.collective, options.out / "checkpoints"
    model, optimizer = prepared

    def updates() -> None:
        mesh = mesh_of(options.backend, collective.size)
        draws = np.random.default_rng(collective.rank if mesh is None else mesh.data_rank(collective.rank))
        given = texts(draws) if options.llama else {"x": draws.standard_normal((2, width), dtype=np.float32)}
        for batch in session.batches(given for _ in range(2)):
            with optimizer.micro_batch(last=True):
                optimizer.backward(model(batch)["total"])
            optimizer.step(Rates(learning_rates=(1e-4,)))

    phases.measure("train", updates)

    def save(update: int, asynchronous: bool) -> None:
        store = (
            Checkpoints(folder, keep_last=1, keep_best=0, asynchronous=asynchronous)
            if collective.rank == 0
            else NoCheckpoints(asynchronous=asynchronous)
        )
        state = (
            WholeStream(session.state(model, optimizer))
            if options.former
            else stream_of(session, model, optimizer, copied=asynchronous)
        )
        if not options.former or collective.rank == 0:
            store.save(state, Progress(update=update), score=None, spec={}, extra={})
        store.wait()
        barrier(collective)

    phases.measure("save", lambda: save(1, False))
    if not options.no_background:
        phases.measure("save in the background", lambda: save(2, True))

    if options.peer:
        # In turns, so that what else the machine does meets both. Each removes what it has saved before, as part of its time: a file that
        # is written into memory which another one has just left is written several times as fast. So the first turns do not count.
        for turn in range(7):
            phases.measure(f"save, turn {turn}", lambda turn=turn: save(3 + turn, False))
            phases.measure(
                f"peer, turn {turn}", lambda turn=turn: save_by_peer(model, optimizer, options.out / f"peer-{turn}")
            )
            barrier(collective)

    def restore() -> None:
        saved = load_everywhere(max(folder.glob("step-*")), collective)
        session.restore(model, optimizer, saved.state)

    phases.measure("restore", restore)


def save_by_peer(model: Any, optimizer: Any, folder: Path) -> None:
    """Save the same arrays with ``torch.distributed.checkpoint``, which lets each rank write its parts."""
    import torch
    from torch.distributed import checkpoint
    from torch.distributed.tensor import DTensor

    weights = model.state_dict()

    def placed(name: str, part: Any) -> Any:
        like = weights[name.partition("/")[2] or name]
        if not isinstance(like, DTensor):
            return part
        return DTensor.from_local(
            part, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
        )

    others = {
        part: {name: placed(name, x.detach()) for name, x in arrays.items()}
        for part, arrays in (("ema", optimizer.ema()), ("moments", optimizer.moments()))
    }
    checkpoint.save({"weights": weights, **others}, checkpoint_id=folder)
    if torch.distributed.get_rank() == 0:
        for former in folder.parent.glob("peer-*"):
            if former != folder:
                shutil.rmtree(former)


def _outlines(session: Any, model: Any, optimizer: Any) -> Any:
    from mtrain.core.state.streams import stream_of

    return stream_of(session, model, optimizer, copied=False).outlines["weights"]


class Drawn(Mapping[str, Any]):
    """Start values that are drawn when they are accessed."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._shapes = shapes

    def __getitem__(self, name: str) -> Any:
        seed = list(name.encode())
        return np.random.default_rng(seed).standard_normal(self._shapes[name], dtype=np.float32) * np.float32(0.02)

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)


# -------------------------------------------------------------------------------------------------------- all the ranks
def start(backend: str, ranks: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Run the ranks; return what each has measured."""
    with tempfile.TemporaryDirectory(dir=options.folder) as folder, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        argv = [sys.executable, "-m", "benchmarks.memory", "--backend", backend, "--out", folder]
        argv += ["--millions", str(options.millions)]
        argv += ["--llama"] * options.llama + (["--files", str(options.files)] if options.files else [])
        argv += ["--native"] * options.native + ["--former"] * options.former + ["--peer"] * options.peer
        argv += ["--own-optimizer"] * options.own_optimizer
        argv += ["--no-background"] * options.no_background + ["--only-build"] * options.only_build
        shared = {
            "WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
        }
        processes = [
            subprocess.Popen(argv, cwd=ROOT, env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)})
            for rank in range(ranks)
        ]
        codes = [process.wait() for process in processes]
        if any(codes):
            sys.exit(f"{backend} on {ranks} ranks ended with {codes}")
        found: list[dict[str, Any]] = json.loads((Path(folder) / "result.json").read_text())
        return found


def held(backend: str, ranks: int, parameters: int) -> float:
    """Return the bytes that the backend makes a rank hold: weights, gradients, two moments and the average.

    DeepSpeed keeps a second copy of what is trained in float32, also where the model is in float32.
    """
    kind, _, stage = backend.partition(":")
    array = 4.0 * parameters
    if kind == "ddp" or stage == "0":
        return 5 * array
    if kind == "fsdp":
        mesh = mesh_of(backend, ranks)
        return 5 * array / ranks * (1 if mesh is None else mesh.replicate)
    if stage == "3":
        return 6 * array / ranks
    return 2 * array + 4 * array / ranks


def copied(backend: str, ranks: int, parameters: int) -> float:
    """Return the bytes that a rank copies for a save in the background: weights, two moments and the average."""
    return 16.0 * parameters / (1 if backend == "ddp" else ranks)


def rows(backend: str, ranks: int, results: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the rows of the table; the bound is that of the docstring above."""
    parameters, largest = results[0]["parameters"], results[0]["largest"]
    for phase in results[0]["phases"]:
        measured = [of["phases"][phase] for of in results]
        needs = [(of["peak"] - of["before"]) / MIB for of in measured]
        allowed = 3 * largest / MIB + ALLOWED_MIB
        if phase == "build":
            allowed += held(backend, ranks, parameters) / MIB
        if phase == "save in the background":
            allowed += copied(backend, ranks, parameters) / MIB
        mark = (
            ""
            if phase.startswith(("train", "peer", "weights"))
            else f"{allowed:.0f} {'ok' if max(needs) <= allowed else 'OVER'}"
        )
        shown = " ".join(f"{need:.0f}" for need in needs)
        before, peak = (max(of[key] for of in measured) / MIB for key in ("before", "peak"))
        seconds, cpu = max(of["seconds"] for of in measured), sum(of["cpu"] for of in measured)
        yield f"| {backend} | {ranks} | {phase} | {before:.0f} | {peak:.0f} | {shown} | {mark} | {seconds:.2f} | {cpu:.2f} |"
    found = [of["phases"] for of in results]
    turns = sum(phase.startswith("peer, turn") for phase in found[0])
    for kind, total in (("seconds", max), ("cpu", sum)):
        ratios = [
            total(of[f"save, turn {turn}"][kind] for of in found)
            / total(of[f"peer, turn {turn}"][kind] for of in found)
            for turn in range(1, turns)
        ]
        if ratios:
            yield f"{backend}, {ranks} ranks: {kind} of a save, ours / theirs {median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def plot(everything: list[dict[str, Any]], path: Path) -> None:
    """Draw, over the number of ranks, what a rank needed above its imports, and what a build may need."""
    from matplotlib import pyplot

    backends = list(dict.fromkeys(case["backend"] for case in everything))
    size = (5.2 * len(backends), 3.8)
    figure, plots = pyplot.subplots(1, len(backends), figsize=size, sharey=True, squeeze=False, layout="constrained")
    for axes, backend in zip(plots[0], backends, strict=True):
        _plot_backend(axes, [case for case in everything if case["backend"] == backend])
        axes.set_title(backend.replace("deepspeed:", "ZeRO-"))
    plots[0][0].set_ylabel("MiB of a rank above imports")
    plots[0][0].legend(frameon=False)
    figure.savefig(path, metadata={"Date": None})


def _plot_backend(axes: Any, cases: list[dict[str, Any]]) -> None:
    """Draw the peaks of one backend; both axes are logarithmic, so that a straight line is a power."""
    ranks = [case["ranks"] for case in cases]
    for phase in ("build", "save", "save in the background", "restore"):
        if phase in cases[0]["results"][0]["phases"]:
            peaks = [
                max(of["phases"][phase]["peak"] - of["phases"]["build"]["before"] for of in case["results"]) / MIB
                for case in cases
            ]
            axes.plot(ranks, peaks, "o-", label=phase)
    first = cases[0]["results"][0]
    extra = 3 * first["largest"] / MIB + ALLOWED_MIB
    bound = [held(case["backend"], case["ranks"], first["parameters"]) / MIB + extra for case in cases]
    axes.plot(ranks, bound, "k--", label="bound of a build")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xticks(ranks, [str(count) for count in ranks])
    marks = [512, 1024, 2048, 4096]
    axes.set_yticks(marks, [f"{mark:,}" for mark in marks])
    axes.set_xlabel("ranks")


def main() -> None:
    """Print the table, or measure one rank."""
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n")[0])
    parser.add_argument("--millions", type=int, default=50, help="parameters of the model, in millions")
    parser.add_argument("--backends", default="ddp,deepspeed:1,deepspeed:3,fsdp")
    parser.add_argument("--ranks", default="1,2")
    parser.add_argument("--native", action="store_true", help="the model is a user's own")
    parser.add_argument("--llama", action="store_true", help="the model is a Llama of transformers")
    parser.add_argument(
        "--files", type=Path, default=None, help="a folder with its weights; it is made if it does not exist"
    )
    parser.add_argument("--former", action="store_true", help="every rank gathers the whole state")
    parser.add_argument("--own-optimizer", action="store_true", help="the optimizer is one of torch, as a script's own")
    parser.add_argument("--only-build", action="store_true", help="leave out training, saves and the restore")
    parser.add_argument("--no-background", action="store_true", help="leave out the save that copies first")
    parser.add_argument("--peer", action="store_true", help="save with torch.distributed.checkpoint too (fsdp)")
    parser.add_argument("--json", type=Path, default=None, help="a file for the peaks, as points of a plot")
    parser.add_argument(
        "--plot", type=Path, default=None, help="draw the peaks in the file of --json as SVG; nothing is measured"
    )
    parser.add_argument("--folder", default=None, help="where checkpoints are written")
    parser.add_argument("--backend", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.backend:
        rank_main(options)
        return
    if options.plot:
        plot(json.loads(options.json.read_text()), options.plot)
        return
    if options.files and not options.files.exists():
        from transformers import LlamaForCausalLM

        LlamaForCausalLM(llama(options.millions, None)[0]).save_pretrained(options.files)
    print(
        "| backend | ranks | phase | MiB before | peak | needed by each rank | allowed | s | CPU s |\n|---|--:|---|--:|--:|--:|--:|--:|--:|"
    )
    everything = []
    for ranks in map(int, options.ranks.split(",")):
        for backend in options.backends.split(","):
            results = start(backend, ranks, options)
            everything.append({"backend": backend, "ranks": ranks, "results": results})
            print("\n".join(rows(backend, ranks, results)), flush=True)
            if options.json is not None:
                options.json.write_text(json.dumps(everything))


if __name__ == "__main__":
    main()
