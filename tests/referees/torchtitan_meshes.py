"""torchtitan's debug model on its own meshes beside its one rank: the table of debug_model.py for torchtitan, where it is installed.

usage: python -m tests.referees.torchtitan_meshes FOLDER [UPDATES]

It is made for GPUs. Here it has a CPU, float64 in place of float32 everywhere, attention of torch without its masks (one text a row has
none), batches that do not depend on the mesh, and weights drawn by their names; all else is its own: parallel layers, pipelines, loss,
clipping, optimizer, schedule.
"""

import dataclasses
import os
import signal
import sys
import time
import traceback
import types
import zlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor, distribute_tensor

from tests.referees.debug_model import MESHES, ranks

BATCH, LENGTH, PORT, MOST_S = 8, 16, 29800, 900
Result = tuple[dict[str, torch.Tensor], list[float]]


class Batches:
    """The same texts on every mesh: each data rank has its part of the global batch."""

    def __init__(self, updates: int, *, dp_world_size: int, dp_rank: int, local_batch_size: int, **_: Any) -> None:
        tokens = torch.randint(257, (updates, BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(3))
        each = BATCH // dp_world_size
        self._mine = tokens[:, dp_rank * each : (dp_rank + 1) * each]
        self._micro = local_batch_size

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        """Yield inputs and labels of each micro batch."""
        for update in self._mine:
            for part in update.split(self._micro):
                positions = torch.arange(LENGTH).repeat(len(part), 1)
                yield {"input": part[:, :-1].contiguous(), "positions": positions}, part[:, 1:].contiguous()


def fit_to_cpu() -> None:
    """Put a CPU and float64 in the place of GPUs and float32."""
    torch._utils._get_available_device_type = lambda: "cpu"  # type: ignore[attr-defined]
    torch.Tensor.float = lambda x, **_: x.double()  # type: ignore[method-assign,assignment]
    import torchtitan.components.metrics as metrics
    import torchtitan.config
    import torchtitan.models.llama3 as llama
    from torchtitan.models.common.attention import ScaledDotProductAttention

    torchtitan.config.TORCH_DTYPE_MAP["float32"] = torch.float64
    llama.get_attention_config = lambda _: ScaledDotProductAttention.Config()
    memory = types.SimpleNamespace(max_reserved_gib=0, max_reserved_pct=0)
    metrics.build_device_memory_monitor = lambda: types.SimpleNamespace(
        device_name="cpu", get_peak_stats=lambda: memory, reset_peak_stats=lambda: None
    )


def make_trainer(folder: Path, updates: int, mesh: dict[str, int]) -> Any:
    """Return its trainer for a mesh."""
    from torchtitan.models.llama3 import config_registry, model_registry
    from torchtitan.trainer import Trainer

    config: Any = config_registry.llama3_debugmodel_ce_loss()
    config.model_spec = model_registry("debugmodel", attn_backend="sdpa")
    data_ranks = mesh.get("replicate", 1) * mesh.get("shard", 1)
    sizes = {"local_batch_size": BATCH // data_ranks, "seq_len": LENGTH, "steps": updates}
    config.training = dataclasses.replace(
        config.training, **sizes, mixed_precision_param="float32", disable_cuda_graphs=True
    )
    config.parallelism = dataclasses.replace(
        config.parallelism,
        data_parallel_replicate_degree=mesh.get("replicate", 1),
        data_parallel_shard_degree=mesh.get("shard", 1),
        tensor_parallel_degree=mesh.get("tensor", 1),
        enable_sequence_parallel="sequence" in mesh,
        pipeline_parallel_degree=mesh.get("pipeline", 1),
        pipeline_parallel_schedule="1F1B",
        pipeline_parallel_microbatch_size=2 if data_ranks < 4 else 1,
        spmd_backend="partial_dtensor",  # FSDP of torch 2.13 refuses weights of its default
    )
    config.activation_checkpoint = None
    config.dataloader = types.SimpleNamespace(build=lambda **given: Batches(updates, **given))
    config.tokenizer = types.SimpleNamespace(build=lambda **_: None)
    config.validator.enable = False
    config.dump_folder = str(folder)
    return Trainer(config)


def train(folder: Path, updates: int, mesh: dict[str, int]) -> None:
    """Train on this rank, and save the weights of its stage and the losses."""
    trainer = make_trainer(folder, updates, mesh)
    weights = {name: x for part in trainer.model_parts for name, x in part.named_parameters()}
    for name, x in weights.items():
        draws = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        is_norm = x.ndim == 1
        drawn = torch.randn(x.shape, generator=draws, dtype=torch.float64) * (0.1 if is_norm else 0.02) + is_norm
        with torch.no_grad():
            x.copy_(distribute_tensor(drawn, x.device_mesh, x.placements) if isinstance(x, DTensor) else drawn)
    losses: list[float] = []
    trainer.metrics_processor.log = lambda _step, loss, *_, **__: losses.append(loss)
    trainer.metrics_processor.should_log = lambda _: True
    batches = trainer.batch_generator(trainer.dataloader)
    for update in range(updates):
        trainer.step = update + 1
        trainer.train_step(batches)
    whole = {name: (x.full_tensor() if isinstance(x, DTensor) else x).detach() for name, x in weights.items()}
    torch.save((whole, losses), folder / f"rank-{os.environ['RANK']}.pt")


def start_rank(folder: Path, updates: int, mesh: dict[str, int], *, rank: int, port: int) -> int:
    """Start a rank as a copy of this process; return its id."""
    pid = os.fork()
    if pid:
        return pid
    count = str(ranks(mesh))
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    log = os.open(folder / f"rank-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    try:
        train(folder, updates, mesh)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)


def run(folder: Path, updates: int, mesh: dict[str, int], *, port: int) -> Result | str:
    """Train on all ranks of a mesh: weights and losses, or the error of the first rank that has one."""
    folder.mkdir(parents=True, exist_ok=True)
    left = [start_rank(folder, updates, mesh, rank=rank, port=port) for rank in range(ranks(mesh))]
    end, failed = time.monotonic() + MOST_S, False
    while left and not failed and time.monotonic() < end:
        ended = [found for pid in left if (found := os.waitpid(pid, os.WNOHANG))[0]]
        left = [pid for pid in left if pid not in {each for each, _ in ended}]
        failed = any(status for _, status in ended)
        time.sleep(0.2)
    for pid in left:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    if failed or left:
        lines = [
            line for log in sorted(folder.glob("*.log")) for line in log.read_text().splitlines() if "Error:" in line
        ]
        return lines[0][:110] if lines else "no end"
    parts = [torch.load(folder / f"rank-{rank}.pt") for rank in range(ranks(mesh))]
    return {name: x for weights, _ in parts for name, x in weights.items()}, parts[-1][1]


def main(folder: Path, updates: int) -> None:
    """Print a row for each mesh."""
    fit_to_cpu()
    from torchtitan.models.llama3 import config_registry  # noqa: F401  once, for all copies

    one = run(folder / "one", updates, {}, port=PORT)
    if isinstance(one, str):
        sys.exit(one)
    print("| mesh | ranks | weights | losses |\n|---|--:|--:|--:|")
    for number, (name, mesh) in enumerate(MESHES.items(), 1):
        found = run(folder / str(number), updates, mesh, port=PORT + number)
        if isinstance(found, str):
            print(f"| {name} | {ranks(mesh)} | {found} | |", flush=True)
            continue
        apart = max(float((found[0][key] - one[0][key]).abs().max()) for key in one[0])
        of_losses = max(abs(a - b) for a, b in zip(found[1], one[1], strict=True))
        print(f"| {name} | {ranks(mesh)} | {apart:.1e} | {of_losses:.1e} |", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute(), int((*sys.argv[2:], 100)[0]))
