"""What recording costs, in calls and in elements, which a busy machine does not change as it changes seconds."""

import json
import subprocess
import sys

import pytest
import torch

from mtrain_trace import mixing, torch_mixing
from tests.starts import starts_processes

PROGRAM = """
import json, sys, torch, mtrain_trace
from mtrain_trace import torch_hooks
from torch.utils._python_dispatch import TorchDispatchMode

VIEWS = ("detach", "view", "reshape", "slice", "alias", "unbind", "select")

class Counted(TorchDispatchMode):
    calls = elements = reads = largest = 0
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        name = str(function).split(".")[1]
        Counted.reads += name == "_local_scalar_dense"
        if name not in VIEWS and name != "_local_scalar_dense":
            Counted.calls += 1
            sizes = [part.numel() for part in (result if isinstance(result, (tuple, list)) else [result])]
            Counted.elements += sum(sizes)
            Counted.largest = max(Counted.largest, *sizes)
        return result

torch.set_num_threads(1)
recorder = mtrain_trace.attach(sys.argv[1])
torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)  # imports torch._dynamo, with which the hooks change
original = torch_hooks._attempt[0]
def counted(*arguments):
    with Counted():
        original(*arguments)
torch_hooks._attempt[0] = counted
found = []
for layers in (10, 60):
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.BatchNorm1d(32)) for _ in range(layers)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    for update in range(1, 12):
        Counted.calls = Counted.elements = Counted.reads = Counted.largest = 0
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(torch.randn(8, 32)), torch.zeros(8, 32)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    arrays = len(list(model.parameters()))
    found.append({"arrays": arrays, **{key: getattr(Counted, key) for key in ("calls", "elements", "reads", "largest")}})
recorder.close()
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
@starts_processes
def counts(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, int]]:
    """Calls of the recorder in an update of a small model and of one with six times as many arrays."""
    command = [sys.executable, "-c", PROGRAM, tmp_path_factory.mktemp("counts") / "t"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "cannot record" not in done.stderr
    return list(json.loads(done.stdout))


def test_the_calls_of_an_update_do_not_grow_with_the_arrays(counts: list[dict[str, int]]) -> None:
    small, large = counts
    assert (small["arrays"], large["arrays"]) == (40, 240)
    assert small["calls"] <= 130
    # 50 and 300 rows of 512 are one and two passes for each of gradients, weights and moments.
    assert large["calls"] - small["calls"] <= 3 * 12


def test_each_number_is_written_a_few_times(counts: list[dict[str, int]]) -> None:
    # Gradients, weights and moments: a layer has a matrix of 1024 and three vectors, which are filled up to 512; two
    # buffers of each layer besides.
    rows = 60 * (3 * (1024 + 3 * 512) + 2 * 512) + 10 * 2 * 512
    assert rows < counts[1]["elements"] < 7 * rows


def test_the_memory_of_a_pass_is_that_of_a_block_and_not_of_the_model(counts: list[dict[str, int]]) -> None:
    block = torch_mixing.BLOCK_ROWS * mixing.ROW
    assert counts[1]["largest"] == block < 300 * mixing.ROW


def test_a_layout_keeps_a_hundredth_of_what_it_lays_out() -> None:
    layout = torch_mixing.WeightLayout([(1, 0, 10_000_000)], torch.float32, torch.device("cpu"))
    tables = [table for stretch in layout._stretches for table in (stretch.factors, stretch.signs, stretch.owners)]
    assert sum(table.numel() * table.element_size() for table in tables) < 0.016 * 4 * 10_000_000


def test_no_value_is_read_while_an_update_is_recorded(counts: list[dict[str, int]]) -> None:
    assert all(count["calls"] for count in counts)
    assert [count["reads"] for count in counts] == [0, 0]
