"""An update of a Llama on two ranks of the CPU: mtrain beside other loops, which take turns in the same processes.

    python -m benchmarks.language_speed [--millions 200 --rows 1] [--lora] [--titan FOLDER]

On ddp the peers are Accelerate and transformers' Trainer, on fsdp Accelerate and a loop by hand with FSDP2, each block a unit.
Accelerate leaves FSDP out on a CPU without a word, so its state is set from outside; the Trainer is no peer there. All have AdamW and
clipping, the same model and the same rows; the loss is that over tokens. mtrain keeps its records besides. With ``--titan FOLDER``
torchtitan's loop is a peer on fsdp, see ``titan.py``. Processor time of the Trainer has its start in it. Peaks of memory are those
of processes that build one side alone, and make three updates.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[1]
RANKS, ROWS, LENGTH, RATE, CLIP = 2, 4, 128, 1e-4, 1.0
CONFIG: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 2048, "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 256, "bos_token_id": None, "eos_token_id": 0,
}  # fmt: skip
LARGER: Mapping[int, Mapping[str, int]] = {
    4: {},
    10: {"hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 5},
    200: {
        "vocab_size": 12288, "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 15, "num_attention_heads": 16,
        "num_key_value_heads": 8,
    },
}  # fmt: skip
"""Maps millions of parameters to what differs in ``CONFIG``."""
BASE: Path | None = None
"""Folder of the weights on which adapters are trained; None: all weights are trained."""
Timed = Callable[[int], float]
"""Trains for some updates, and returns the seconds."""


def rows(rank: int) -> Iterator[dict[str, np.ndarray]]:
    """Yield micro batches as mtrain's task ``language`` makes them."""
    draws = np.random.default_rng(rank)
    while True:
        tokens = draws.integers(0, CONFIG["vocab_size"], (ROWS, LENGTH))
        positions = np.tile(np.arange(LENGTH), (ROWS, 1))
        scale = np.full(ROWS, 1 / LENGTH)
        yield {"tokens": tokens, "positions": positions, "labels": tokens, "scale": scale, "index": np.arange(ROWS)}


def plugin() -> Any:
    """Return mtrain's model."""
    from mtrain_language.adapters import LoraOptions
    from mtrain_language.model import HuggingFaceModel, HuggingFaceOptions

    if BASE is not None:
        return HuggingFaceModel(HuggingFaceOptions(path=str(BASE), attention="sdpa", lora=LoraOptions()))
    return HuggingFaceModel(HuggingFaceOptions(config=CONFIG, attention="sdpa"))


def network() -> Any:
    """Return the model as transformers makes it."""
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = {key: value for key, value in CONFIG.items() if key != "model_type"}
    library: Any = AutoModelForCausalLM
    if BASE is not None:
        from peft import LoraConfig, get_peft_model

        base = library.from_pretrained(BASE, attn_implementation="sdpa")
        return get_peft_model(base, LoraConfig(r=8, lora_alpha=16, target_modules="all-linear"))
    return library.from_config(AutoConfig.for_model("llama", **settings), attn_implementation="sdpa")


def ours(session: Any) -> Timed:
    """Return mtrain's own loop."""
    from benchmarks.turns import Endless
    from mtrain.core.interfaces import Progress, Rates, Recipe, Task
    from mtrain.core.samples.feed import LoaderFeed
    from mtrain.core.samples.sampler import Shares
    from mtrain.core.update.cadence import Cadences
    from mtrain.core.update.loop import Hooks, Job, Loop
    from mtrain.core.update.stepping import Stepper
    from mtrain.core.update.trainer import train

    details = {"vocabulary": CONFIG["vocab_size"], "end": 0, "length": LENGTH}
    recipe = Recipe(rule="adamw", groups=(("", {"weight_decay": 0.01}),), micro_batch=ROWS, clip_norm=CLIP, seed=1)
    made = plugin()
    task = Task(kind="language", class_names=(), image_size=0, global_batch=RANKS * ROWS, details=details)
    task = made.prepare_task(task, {})
    model, optimizer = session.prepare(lambda: made.build(task, session.collective), recipe)
    loader = Endless(rows(session.collective.rank))
    records: list[dict[str, Any]] = []
    feed = LoaderFeed(session=session, loader=loader, global_batch=RANKS * ROWS)

    def updates(count: int) -> float:
        work = Job(
            session=session,
            steppers=[Stepper(optimizer, lambda update: Rates(learning_rates=(RATE,)))],
            feed=feed,
            total_updates=count,
            shares=Shares.even(session.collective, rounds=1),
            sums_metrics=True,
        )
        begun = time.perf_counter()
        train(Loop(work, Cadences(evaluate_at_end=False), Hooks(on_update=records.append), Progress()), model)
        return time.perf_counter() - begun

    return updates


def plain(rank: int, prepare: Callable[[Any, Any], tuple[Any, Any, Any]]) -> Timed:
    """Return a loop by hand; ``prepare`` returns (model, optimizer, function that runs a backward pass)."""
    import torch

    inner = network()
    model, optimizer, backward = prepare(
        inner, lambda of: torch.optim.AdamW(of.parameters(), lr=RATE, weight_decay=0.01)
    )
    source = rows(rank)

    def updates(count: int) -> float:
        begun = time.perf_counter()
        for _ in range(count):
            batch = {name: torch.from_numpy(array) for name, array in next(source).items()}
            logits = model(input_ids=batch["tokens"], position_ids=batch["positions"], use_cache=False).logits
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), batch["labels"].flatten())
            backward(loss)
            torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad()
        return time.perf_counter() - begun

    return updates


def by_hand(inner: Any, made: Any) -> tuple[Any, Any, Any]:
    """FSDP2, each block a unit."""
    from torch.distributed.fsdp import fully_shard

    for block in inner.model.layers:
        fully_shard(block)
    fully_shard(inner)
    return inner, made(inner), lambda loss: loss.backward()


def accelerated(inner: Any, made: Any) -> tuple[Any, Any, Any]:
    """Accelerate, which has DDP on a CPU."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(inner, made(inner))
    return model, optimizer, accelerator.backward


def accelerated_fsdp(inner: Any, made: Any) -> tuple[Any, Any, Any]:
    """Accelerate with FSDP2, which it leaves out on a CPU unless its state is told from outside."""
    from accelerate import Accelerator
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

    sharding = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        state_dict_type="SHARDED_STATE_DICT",
        cpu_ram_efficient_loading=False,
    )
    accelerator = Accelerator(cpu=True, fsdp_plugin=sharding)
    accelerator.state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = sharding
    model, optimizer = accelerator.prepare(inner, made(inner))
    return model, optimizer, accelerator.backward


def trainer(rank: int, folder: Path) -> Timed:
    """Return transformers' Trainer; it is made anew for each turn, and its first two updates are not timed."""
    import torch
    from transformers import Trainer, TrainerCallback, TrainingArguments

    inner, source = network(), rows(rank)

    class Rows(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
        def __iter__(self) -> Iterator[dict[str, Any]]:
            while True:
                batch = next(source)
                for place in range(ROWS):
                    shown = {"input_ids": "tokens", "position_ids": "positions", "labels": "labels"}
                    yield {name: torch.from_numpy(batch[ours][place]) for name, ours in shown.items()}

    class Clock(TrainerCallback):
        begun = ended = 0.0

        def on_step_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            if state.global_step == 2:
                self.begun = time.perf_counter()

        def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            self.ended = time.perf_counter()

    def updates(count: int) -> float:
        clock = Clock()
        arguments = TrainingArguments(
            output_dir=str(folder), use_cpu=True, max_steps=count + 2, per_device_train_batch_size=ROWS, learning_rate=RATE,
            weight_decay=0.01, max_grad_norm=CLIP, report_to=[], save_strategy="no", logging_strategy="no", disable_tqdm=True,
            dataloader_num_workers=0, accelerator_config={"dispatch_batches": False, "split_batches": False},
        )  # fmt: skip
        Trainer(model=inner, args=arguments, train_dataset=Rows(), callbacks=[clock]).train()
        return clock.ended - clock.begun

    return updates


def titan(rank: int, options: argparse.Namespace) -> Timed:
    """Return torchtitan's loop."""
    from benchmarks.titan import loop

    made: Timed = loop(options.titan, CONFIG, rows(rank), rows=ROWS, length=LENGTH, rate=RATE, out=options.out)
    return made


def rank_main(options: argparse.Namespace) -> None:
    """Measure on one rank; rank 0 writes ``times.json``."""
    global BASE, ROWS
    BASE, ROWS = (options.out / "base" if options.lora else None), options.rows
    CONFIG.update(LARGER[options.millions])
    import torch

    from benchmarks.memory import MIB, backend_of, resident
    from mtrain.backends._torch import nn, ops
    from mtrain.core.binding import bind

    bind(nn, ops)
    torch.set_num_threads(1)
    with backend_of(options.backend) as session:
        rank = session.collective.rank
        makers: dict[str, Callable[[], Timed]] = {"mtrain": lambda: ours(session)}
        if options.backend == "fsdp":
            makers["FSDP2 by hand"] = lambda: plain(rank, by_hand)
            makers["Accelerate with FSDP2"] = lambda: plain(rank, accelerated_fsdp)
            if options.titan and not options.lora:
                makers["torchtitan"] = lambda: titan(rank, options)
        else:
            makers["Accelerate"] = lambda: plain(rank, accelerated)
            makers["transformers.Trainer"] = lambda: trainer(rank, options.out)
        loops = {name: make() for name, make in makers.items() if options.only in ("", name)}
        for loop in loops.values():
            loop(3)
        peaks = {"peak MiB": over_ranks(session, {name: [resident("VmHWM") / MIB] for name in loops})}
        times: Mapping[str, list[float]] = {name: [] for name in loops}
        worked: Mapping[str, list[float]] = {name: [] for name in loops}
        for turn in range(0 if options.only else options.turns):
            names = list(loops) if turn % 2 else list(loops)[::-1]
            for name in names:
                begun = time.process_time()
                times[name].append(loops[name](options.updates) / options.updates)
                worked[name].append((time.process_time() - begun) / options.updates)
        found = {"time": over_ranks(session, times), "processor time": over_ranks(session, worked)}
        found = peaks if options.only else found
        if rank == 0:
            (options.out / "times.json").write_text(json.dumps(found))


def over_ranks(session: Any, times: Mapping[str, list[float]]) -> dict[str, list[float]]:
    """Return the largest over the ranks; every rank must call."""
    return {
        name: [max(of) for of in zip(*session.collective.all_gather(own), strict=True)] for name, own in times.items()
    }


def main() -> None:
    """Start the ranks and print ratios, or measure on one rank."""
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n")[0])
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--updates", type=int, default=5, help="of each loop in a turn")
    parser.add_argument(
        "--titan", type=Path, help="a checkout of torchtitan, whose packages are installed; see titan.py"
    )
    parser.add_argument("--backends", default="ddp,fsdp")
    parser.add_argument("--millions", type=int, default=4, choices=LARGER, help="parameters of the model")
    parser.add_argument("--rows", type=int, default=ROWS, help=f"of {LENGTH} tokens, on each rank")
    parser.add_argument("--lora", action="store_true", help="train adapters")
    parser.add_argument("--backend", help=argparse.SUPPRESS)
    parser.add_argument("--only", default="", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.backend:
        rank_main(options)
        return
    with tempfile.TemporaryDirectory() as folder:
        if options.lora:
            CONFIG.update(LARGER[options.millions])
            network().save_pretrained(Path(folder) / "base")
        for backend in options.backends.split(","):
            found = measured(backend, folder)
            names = list(found["time"])
            alone = [measured(backend, folder, only=name)["peak MiB"] for name in names]
            found["peak MiB"] = {name: peak for of in alone for name, peak in of.items()}
            for kind, times in found.items():
                mine = times.pop("mtrain")
                for name, theirs in times.items():
                    ratios = sorted(a / b for a, b in zip(mine, theirs, strict=True))
                    half = f"{ratios[len(ratios) // 4]:.2f} to {ratios[-len(ratios) // 4]:.2f}"
                    pair = f"{median(mine):.4g} | {median(theirs):.4g}"
                    print(f"| {backend} | {name} | {kind} | {pair} | {median(ratios):.2f} | {half} |", flush=True)


def measured(backend: str, folder: str, *, only: str = "") -> dict[str, dict[str, list[float]]]:
    """Start the ranks with the arguments of this process, and return what they have measured; ``only``: of one side."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    argv = [sys.executable, "-m", "benchmarks.language_speed", *sys.argv[1:]]
    argv += ["--backend", backend, "--out", folder, "--only", only]
    shared = {"WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(argv, cwd=ROOT, env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(RANKS)
    ]
    codes = [rank.wait() for rank in ranks]
    if any(codes):
        sys.exit(f"{backend}: the ranks ended with {codes}")
    found: dict[str, dict[str, list[float]]] = json.loads((Path(folder) / "times.json").read_text())
    return found


if __name__ == "__main__":
    main()
