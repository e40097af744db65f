"""Trainings by DeepSpeed's engine, and the plain loops beside them; a program: python deepspeed_cases.py OUT NAME ...

As in ``zoo.py``, torch and deepspeed are imported once and each rank is a copy (fork) of this process.
"""

import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
from torch import nn

import mtrain_trace

# On the CPU, DeepSpeed would compile this operator at its start, which takes minutes; no training needs it.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

SAMPLES, BATCH, UPDATES = 64, 8, 5


@dataclass(frozen=True)
class Case:
    """One training."""

    stage: int | None = None
    """Stage of ZeRO; None: no engine, plain torch and DDP."""
    ranks: int = 2
    micro_batches: int = 1
    clip: float = 0.5
    bfloat16: bool = False
    fault: str = ""


CASES = {
    "plain": Case(ranks=1),
    "ddp": Case(),
    "unclipped": Case(ranks=1, clip=0.0),
    "stage0": Case(0),
    "stage1": Case(1),
    "stage2": Case(2),
    "stage2-halves": Case(2, micro_batches=2),
    "stage3": Case(3),
    "stage1-bfloat16": Case(1, bfloat16=True),
    "stage0-bfloat16": Case(0, bfloat16=True),
    "stage3-bfloat16": Case(3, bfloat16=True),
    "divided-twice": Case(2, micro_batches=2, fault="divided-twice"),
    "decay-on-biases": Case(3, fault="decay-on-biases"),
    "clip-inherited": Case(1, clip=0.1),
}


def groups_of(case: Case, model: nn.Module) -> list[dict[str, object]]:
    biases = [p for name, p in model.named_parameters() if name.endswith("bias")]
    others = [p for name, p in model.named_parameters() if not name.endswith("bias")]
    decay = 0.1 if case.fault == "decay-on-biases" else 0.0
    return [{"params": others, "weight_decay": 0.1}, {"params": biases, "weight_decay": decay}]


def train_plainly(case: Case, model: nn.Module, parts: list[list[tuple[torch.Tensor, torch.Tensor]]]) -> None:
    net = nn.parallel.DistributedDataParallel(model) if case.ranks > 1 else model
    optimizer = torch.optim.AdamW(groups_of(case, model), lr=0.01)
    for update in parts:
        optimizer.zero_grad()
        for images, labels in update:
            (nn.functional.cross_entropy(net(images), labels) / case.micro_batches).backward()
        if case.clip:
            nn.utils.clip_grad_norm_(net.parameters(), case.clip)
        optimizer.step()


def train_by_the_engine(case: Case, model: nn.Module, parts: list[list[tuple[torch.Tensor, torch.Tensor]]]) -> None:
    config = {
        "train_micro_batch_size_per_gpu": BATCH // case.ranks // case.micro_batches,
        "gradient_accumulation_steps": case.micro_batches,
        "gradient_clipping": case.clip,
        "zero_optimization": {"stage": case.stage},
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": case.bfloat16},
        "steps_per_print": 1000,
    }
    optimizer = torch.optim.AdamW(groups_of(case, model), lr=0.01)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    form = torch.bfloat16 if case.bfloat16 else torch.float32
    for update in parts:
        for images, labels in update:
            loss = nn.functional.cross_entropy(engine(images.to(form)).float(), labels)
            engine.backward(loss / case.micro_batches if case.fault == "divided-twice" else loss)
            engine.step()


def train(case: Case, *, rank: int) -> None:
    generator = torch.Generator().manual_seed(3)
    images, labels = torch.randn(SAMPLES, 8, generator=generator), torch.randint(0, 4, (SAMPLES,), generator=generator)
    torch.manual_seed(0)
    # 16 and 5 outputs: no partition of two or three ranks ends where an array ends.
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 5), nn.ReLU(), nn.Linear(5, 4))
    parts = []
    for update in range(UPDATES):
        chosen = (torch.arange(BATCH) + update * BATCH)[rank :: case.ranks]
        parts.append([(images[part], labels[part]) for part in chosen.chunk(case.micro_batches)])
    (train_plainly if case.stage is None else train_by_the_engine)(case, model, parts)


def main() -> None:
    torch.set_num_threads(1)
    torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    out = Path(sys.argv[1])
    for name in sys.argv[2:]:
        case, store, children = CASES[name], tempfile.mktemp(), []
        for rank in range(case.ranks):
            child = os.fork()
            if child == 0:
                if case.stage is not None or case.ranks > 1:
                    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(case.ranks))
                    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=case.ranks)
                recorder = mtrain_trace.attach(str(out / name))
                train(case, rank=rank)
                recorder.close()
                os._exit(0)
            children.append(child)
        for child in children:
            _, status = os.waitpid(child, 0)
            if status:
                sys.exit(f"{name}: a rank failed")


if __name__ == "__main__":
    main()
