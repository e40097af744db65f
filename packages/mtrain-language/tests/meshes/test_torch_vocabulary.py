"""The loss over a vocabulary that two real ranks share is the loss over the whole one, and so is its gradient."""

import json
import subprocess
import sys

import pytest

from tests.backends.processes import ROOT
from tests.starts import starts_processes

RANK = """
import json, sys
import torch
from torch import distributed as dist
from mtrain_language.meshes import vocabulary

rank, faults = int(sys.argv[2]), sys.argv[3:]
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=rank, world_size=2)

def compare(fault):
    own_sum, own_reduce = vocabulary.added_up, dist.all_reduce
    if fault == "sum":
        vocabulary.added_up = lambda sums, chosen, group: (sums, own_sum(sums, chosen, group)[1])
    if fault == "largest":
        dist.all_reduce = lambda x, op=dist.ReduceOp.SUM, group=None: None if op == dist.ReduceOp.MAX else own_reduce(x, op, group)
    draws = torch.Generator().manual_seed(3)
    whole = torch.randn(2, 5, 12, generator=draws, dtype=torch.float64)
    whole[0, 1, 7] = 900.0  # beyond what exp can take; one rank alone has it
    whole[1, 2, [4, 9]] = 50.0  # the largest, twice
    tokens = torch.randint(0, 12, (2, 5), generator=draws)
    weights = torch.randn(2, 5, generator=draws, dtype=torch.float64)
    asked = whole.clone().requires_grad_()
    expected = -asked.log_softmax(-1).gather(-1, tokens[..., None])[..., 0]
    (expected * weights).sum().backward()
    part = whole[..., 6 * rank : 6 * rank + 6].clone().requires_grad_()
    found = vocabulary.OfParts(dist.group.WORLD).nll(part, tokens)
    (found * weights).sum().backward()
    gradient = asked.grad[..., 6 * rank : 6 * rank + 6]
    best = vocabulary.OfParts(dist.group.WORLD).likeliest(part.detach())
    vocabulary.added_up, dist.all_reduce = own_sum, own_reduce
    worst = [float((a - b).abs().nan_to_num(1e9).max()) for a, b in ((found, expected), (part.grad, gradient))]
    return [*worst, torch.equal(best, whole.argmax(-1)), int(best[1, 2])]

print(json.dumps({fault: compare(fault) for fault in faults}))
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
@starts_processes
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, list[float]]]:
    """Differences on two ranks, as they are and with each of two faults."""
    meeting = tmp_path_factory.mktemp("vocabulary") / "meeting"
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(meeting), str(rank), "none", "sum", "largest"],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    told = [rank.communicate(timeout=120) for rank in ranks]
    assert all(rank.returncode == 0 for rank in ranks), told
    return [json.loads(out.splitlines()[-1]) for out, _ in told]


def test_losses_gradients_and_likeliest_tokens_are_those_of_whole_logits(found: list[dict[str, list[float]]]) -> None:
    for rank in found:
        loss, gradient, same, first_of_equal = rank["none"]
        print(f"loss {loss:.1e}, gradient {gradient:.1e}")
        assert max(loss, gradient) <= 1e-12
        assert same
        assert first_of_equal == 4


@pytest.mark.parametrize("fault", ["sum", "largest"])
def test_what_is_not_exchanged_is_seen(found: list[dict[str, list[float]]], fault: str) -> None:
    assert max(rank[fault][0] for rank in found) > 0.1
