"""The job of a backend that trains in one process beside those of several ranks."""

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from mtrain.compare.benches import bench_of
from mtrain.compare.request import CompareRequest
from mtrain.core.collective import OneRank
from mtrain.core.interfaces import Capabilities, Progress, Rates
from mtrain.core.update.cadence import Cadences
from mtrain.core.update.loop import Hooks, Job, Loop
from mtrain.core.update.recipe import make_recipe, rounds, shares_of
from mtrain.core.update.stepping import Stepper
from mtrain.errors import ScriptError
from mtrain.rank.script.in_turn import InTurn, check_in_turn
from mtrain.spec.trial import Trial


def solo_bench(config: str | None, tmp_path: Path, *overrides: str, **settings):
    request = CompareRequest(
        backends="ddp,solo", config=config, overrides=overrides, updates=2, rounds=0, out=tmp_path, **settings
    )
    return bench_of(request, request.variants[1])


@pytest.mark.parametrize("accumulate", [1, 2])
def test_one_rank_computes_the_shards_of_the_others_in_turn(accumulate, tmp_path):
    bench = solo_bench("digits", tmp_path, f"train.accumulate={accumulate}")
    recipe = make_recipe(bench.spec, size=1)
    assert (bench.ranks, recipe.shards, recipe.accumulate) == (1, 2, 2 * accumulate)
    assert rounds(recipe, size=1) == accumulate


@pytest.mark.parametrize(
    ("config", "overrides", "reason"),
    [
        ("unet_digits", (), "loss of unet"),
        ("vit_digits", ("train.sync_batchnorm=true",), "train.sync_batchnorm"),
    ],
)
def test_what_needs_all_ranks_at_once_is_refused_for_one_process(config, overrides, reason, tmp_path):
    row = solo_bench(config, tmp_path, *overrides).row
    assert row.outcome == "refused"
    assert reason in row.reason
    assert "compare without solo, or with --ranks 1" in row.reason


def test_one_process_computes_ranges_of_inputs_shard_after_shard(tmp_path):
    bench = solo_bench("digits", tmp_path, "train.quantise.start=1")
    recipe = make_recipe(bench.spec, size=1)
    assert (bench.row, recipe.shards, recipe.accumulate) == (None, 2, 2)


class Noting:
    """An optimizer that notes which micro batches move the buffers."""

    def __init__(self):
        self.moved = []

    def micro_batch(self, *, last, moves_buffers=True):
        self.moved.append(moves_buffers)
        return nullcontext()


@pytest.mark.parametrize(("shares", "moved"), [(1, [True] * 4), (2, [True, False] * 2), (4, [True] + [False] * 3)])
def test_of_each_micro_batch_the_first_shard_moves_the_buffers(shares, moved, tmp_path):
    optimizer = Noting()
    spec = solo_bench("digits", tmp_path, f"cluster.shards={shares}", f"train.accumulate={4 // shares}").spec
    job = Job(
        session=SimpleNamespace(collective=OneRank(), capabilities=Capabilities()),
        steppers=[Stepper(optimizer, lambda update: Rates(learning_rates=(0.1,)))],
        feed=SimpleNamespace(
            open=lambda progress: iter(range(4)),
            fill=lambda progress, number: 1.0,
            spans_epochs=True,
            close=lambda: None,
        ),
        total_updates=1,
        shares=shares_of(make_recipe(spec, size=1), OneRank()),
        seed=0,
    )
    loop = Loop(job, Cadences(), Hooks(), Progress())
    for _ in range(4):
        next(loop)
    loop.close()
    assert optimizer.moved == moved


def spec_with(*, sync_batchnorm: bool, shards: int | None):
    train, cluster = SimpleNamespace(sync_batchnorm=sync_batchnorm), SimpleNamespace(shards=shards)
    return SimpleNamespace(train=train, cluster=cluster)


@pytest.mark.parametrize(
    ("trial", "advice"), [(Trial(updates=2), "compare without this backend"), (None, "as many ranks as shards")]
)
def test_statistics_over_shards_are_refused_where_a_rank_trains_them_in_turn(trial, advice):
    check_in_turn(spec_with(sync_batchnorm=True, shards=None), size=2, trial=trial)
    check_in_turn(spec_with(sync_batchnorm=True, shards=2), size=2, trial=trial)
    check_in_turn(spec_with(sync_batchnorm=False, shards=3), size=2, trial=trial)
    with pytest.raises(ScriptError, match=rf"sync_batchnorm.*{advice}"):
        check_in_turn(spec_with(sync_batchnorm=True, shards=3), size=2, trial=trial)


def test_a_script_is_compared_on_one_rank_with_the_shards_of_several(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import mtrain\n")
    bench = solo_bench(None, tmp_path, script=script)
    assert (bench.ranks, bench.spec.cluster.shards, bench.row) == (1, 2, None)
    refused = solo_bench(None, tmp_path, "train.sync_batchnorm=true", script=script).row
    assert "compare without solo, or with --ranks 1" in refused.reason


@pytest.mark.parametrize("call", [lambda each: each.all_reduce(np.ones(2), "sum"), lambda each: each.all_gather(1)])
def test_a_loss_of_shards_in_turn_exchanges_nothing(call):
    in_loss = False
    collective = InTurn(OneRank(), 2, lambda: in_loss, trial=Trial(updates=1))
    assert np.all(call(collective) == np.ones(1)), "between micro batches a script may exchange what it likes"
    in_loss = True
    with pytest.raises(ScriptError, match=r"session\.collective.*compare without this backend"):
        call(collective)
