"""Two real ranks that hold parts of arrays step as one that holds them whole, bit for bit."""

import subprocess
import sys
from pathlib import Path
from typing import Literal

import pytest
import torch
from torch import nn

from mtrain.backends.deepspeed import DeepSpeed
from mtrain.backends.torch_engine import LocalCollective, NoExchange, ShardedOptimizer
from mtrain.core.interfaces import Recipe
from mtrain.errors import SpecError
from tests.backends.processes import ROOT

RANK = """
import sys
import torch
from torch import distributed as dist, nn
from mtrain.backends.torch_engine import DistributedCollective, LocalCollective, NoExchange, ShardedOptimizer, TorchOptimizer
from mtrain.backends._torch.sharded import shards
from mtrain.core.interfaces import Rates, Recipe

rank = int(sys.argv[2])
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=rank, world_size=2)
collective = DistributedCollective(host_group=None)

measured, norm = [], shards._norm
shards._norm = lambda whole, **layout: measured.append(whole.shape) or norm(whole, **layout)

def mine(x):
    rows = -(-len(x) // 2)
    return x.detach().contiguous()[rank * rows : (rank + 1) * rows]

def compare(rule, channels_last):
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Conv2d(5, 7, 3), nn.Linear(37, 3), nn.Linear(3, 1))  # one row, odd numbers of rows, elements
    cut = nn.Sequential(nn.Conv2d(5, 7, 3), nn.Linear(37, 3), nn.Linear(3, 1))
    cut.load_state_dict(whole.state_dict())
    if channels_last:
        whole.to(memory_format=torch.channels_last)
    recipe = Recipe(
        rule=rule, groups=(("bias", {}), ("", {"weight_decay": 0.01, "momentum": 0.9, "nesterov": 1.0})),
        micro_batch=1, clip_norm=3.0, ema_decay=0.9, channels_last=channels_last,
    )
    parts = {name: mine(p).clone() for name, p in cut.named_parameters()}
    shared = dict(exchange=NoExchange(), device=torch.device("cpu"))
    one = TorchOptimizer(whole, recipe, collective=LocalCollective(), **shared)
    two = ShardedOptimizer(cut, recipe, parts=parts, collective=collective, **shared)
    draws = torch.Generator().manual_seed(1)
    for update in range(4):
        for name, p in whole.named_parameters():
            p.grad = torch.empty_like(p).copy_(torch.randn(p.shape, generator=draws) * (1.0 if update % 2 else 0.01))
            parts[name].grad = mine(p.grad).clone()
        rates = Rates(learning_rates=(0.1, 0.05))
        norms = one.step(rates), two.step(rates)
        assert norms[0] == norms[1], (rule, update, norms)
    pairs = (parts, dict(whole.named_parameters())), (two.moments(), one.moments()), (two.ema(), one.ema())
    for found, expected in pairs:
        assert found.keys() == expected.keys(), rule
        wrong = [name for name, x in expected.items() if not torch.equal(found[name], mine(x))]
        assert not wrong, (rule, wrong)
    print(rule)
    counts = collective.all_gather(len(measured))
    assert sum(counts) == 4 * len(parts) and min(counts) > 0, counts  # each array by one rank, in each update
    measured.clear()

for case in sys.argv[3:]:
    rule, layout = case.split(":")
    compare(rule, layout == "channels_last")
collective.close()
dist.destroy_process_group()
"""


CASES = {
    "sgd": "channels_last",
    "adamw": "plain",
    "lion": "channels_last",
    "rmsprop": "plain",
}
"""Rule -> the memory layout of the whole arrays."""


@pytest.mark.job
def test_parts_step_as_whole_arrays_do(tmp_path: Path) -> None:
    cases = [f"{rule}:{layout}" for rule, layout in CASES.items()]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(tmp_path / "meeting"), str(rank), *cases],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    results = [rank.communicate(timeout=120) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(errors for _, errors in results)
    assert [shown.split() for shown, _ in results] == [list(CASES)] * 2  # each rule was compared on each rank


@pytest.mark.parametrize("rule", ["lamb", "muon"])
def test_a_rule_that_needs_whole_arrays_is_refused(rule: Literal["lamb", "muon"]) -> None:
    module = nn.Linear(3, 2)
    parts = {name: p.detach() for name, p in module.named_parameters()}
    recipe = Recipe(rule=rule, groups=(("", {}),), micro_batch=1)
    with pytest.raises(SpecError, match=f"{rule} given with this backend, which splits arrays"):
        ShardedOptimizer(
            module,
            recipe,
            parts=parts,
            exchange=NoExchange(),
            collective=LocalCollective(),
            device=torch.device("cpu"),
        )
    with pytest.raises(SpecError, match=rf"{rule} given with backend\.options\.stage 2"):
        DeepSpeed(DeepSpeed.Options(stage=2)).check(recipe, size=2, on_cpu=True)
    DeepSpeed(DeepSpeed.Options(stage=0)).check(recipe, size=2, on_cpu=True)
