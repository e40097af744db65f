"""What the recorder notes of torch and DeepSpeed, at the places where it listens, in this process."""

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from mtrain_trace import mixing, startup, torch_arrays, torch_deepspeed, torch_hooks, torch_mixing
from mtrain_trace.recorder import UPDATES, Recorder
from mtrain_trace.torch_listener import TorchListener, _Inputs


def test_an_update_is_written_when_the_next_one_begins(tmp_path: Path) -> None:
    recorder = Recorder(str(tmp_path))
    listener, model = TorchListener(recorder), torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    lines = []
    for _ in range(3):
        listener.enter_module(model, (torch.ones(1, 2),), {})
        model(torch.ones(1, 2)).sum().backward()
        listener.before_step(optimizer)
        optimizer.step()
        listener.after_step(optimizer)
        lines.append(sum(len(file.read_text().splitlines()) for file in tmp_path.glob(f"*/{UPDATES}")))
    listener.flush()
    recorder.close()
    lines.append(len(next(tmp_path.glob(f"*/{UPDATES}")).read_text().splitlines()))
    assert lines == [0, 1, 2, 3]


def test_an_evaluation_shows_no_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[Any] = []
    listener: Any = SimpleNamespace(depth=0, wants_autocast=False, enter_module=lambda *given: entered.append(given))
    monkeypatch.setattr(torch.nn.Module, "__call__", torch.nn.Module.__call__)
    torch_hooks._wrap_calls(listener)
    model = torch.nn.Sequential(torch.nn.Linear(2, 1))
    with torch.no_grad():
        model(torch.ones(1, 2))
    assert entered == []
    model(torch.ones(1, 2))
    assert [module for module, *_ in entered] == [model], "the layers inside of a model see no samples"


@pytest.mark.parametrize(("rank", "count", "begin"), [(0, 6, 0), (1, 6, 6), (2, 3, 12)])
def test_the_rows_of_a_split_array_lie_behind_those_of_lower_ranks(rank: int, count: int, begin: int) -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=3)
    try:
        mesh = dist.init_device_mesh("cpu", (3,))
        split = distribute_tensor(torch.zeros(5, 3), mesh, [Shard(0)], src_data_rank=None)
        local, first = torch_arrays.local_part(split)
    finally:
        dist.destroy_process_group()
    assert (local.numel(), first) == (count, begin)


def test_parts_of_a_flat_partition_lie_where_the_tables_of_the_engine_say() -> None:
    def piece(start: int, numel: int) -> SimpleNamespace:
        return SimpleNamespace(start=start, numel=numel)

    whole = SimpleNamespace(param_group_index=0, hp_fragment_address=piece(7, 3), lp_fragment_address=piece(5, 3))
    named = [("held", SimpleNamespace(_hp_mapping=whole)), ("on another rank", SimpleNamespace(_hp_mapping=None))]
    assert list(torch_deepspeed._place_by_mapping(named)) == [(0, torch_arrays.Segment("held", 7, 3, 5))]


def test_steps_of_an_engine_that_is_being_made_are_none_of_the_training() -> None:
    class Engine:
        def __init__(self, fails: bool) -> None:
            made.append(listener.is_paused)
            if fails:
                raise ValueError("no engine")

        def backward(self, loss: object) -> None: ...
        def _take_model_step(self) -> None: ...

    made: list[bool] = []
    listener: Any = SimpleNamespace(is_paused=False)
    module: Any = ModuleType("engine")
    module.DeepSpeedEngine, module.clip_grad_norm_ = Engine, print
    torch_deepspeed.install(listener, module)
    Engine(False)
    assert (made, listener.is_paused) == ([True], False)
    with pytest.raises(ValueError, match="no engine"):
        Engine(True)
    assert (made, listener.is_paused) == ([True, True], False)


def test_a_pass_on_a_processor_is_a_block_and_not_the_model() -> None:
    rows = 3 * torch_mixing.BLOCK_ROWS
    layout = torch_mixing.WeightLayout([(1, 0, rows * mixing.ROW)], torch.float32, torch.device("cpu"))
    blocks = [block for stretch in layout._stretches for block in stretch.blocks]
    assert [block.end - block.begin for block in blocks] == [torch_mixing.BLOCK_ROWS] * 3


def test_a_module_is_joined_although_the_program_has_asked_before_whether_there_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "asked_for.py").write_text("loaded = True\n")
    monkeypatch.syspath_prepend(tmp_path)
    joined: list[str] = []
    finder = startup.AfterImport({"asked_for": lambda module: joined.append(module.__name__)})
    monkeypatch.setattr(sys, "meta_path", [finder, *sys.meta_path])
    for _ in range(2):
        assert importlib.util.find_spec("asked_for") is not None
    assert joined == []
    assert importlib.import_module("asked_for").loaded
    assert joined == ["asked_for"]
    monkeypatch.delitem(sys.modules, "asked_for")


def test_a_target_that_the_model_is_given_is_no_sample() -> None:
    images, labels, more = torch.ones(8, 4), torch.arange(8), torch.ones(8, 2)
    inputs = _Inputs.of((images, labels, more))
    assert inputs is not None
    assert sorted(inputs.rows) == [0, 1, 2]
    inputs.leave_out(labels)
    assert sorted(inputs.rows) == [0, 2]
    inputs.leave_out(images)
    assert sorted(inputs.rows) == [0, 2], "the first one may be both, as of an autoencoder"


@pytest.mark.parametrize(("shape", "count", "rows"), [((5, 8, 3), 8, 8), ((8, 5, 3), 8, 8), ((8, 8, 3), 8, None)])
def test_samples_lie_along_the_axis_that_a_layer_names(shape: tuple[int, ...], count: int, rows: int | None) -> None:
    inputs = _Inputs.of((torch.rand(shape),))
    assert inputs is not None
    inputs.settle(count, is_time_first=True)
    assert [len(digests) for digests in inputs.rows.values()] == ([] if rows is None else [rows])
