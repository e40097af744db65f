"""The bytes that a rank sends in an update, as a plan computes them; by hand for a few small arrays."""

import pytest

from mtrain.backends import fsdp
from mtrain.backends.ddp import DDP
from mtrain.backends.deepspeed import DeepSpeed
from mtrain.backends.fleet import Fleet
from mtrain.backends.horovod import Horovod
from mtrain.commands import main
from mtrain.core.interfaces import PlannedArray, Recipe
from mtrain.core.ranks import rings

pytestmark = pytest.mark.job

FEW = [PlannedArray(shape=(4, 6)), PlannedArray(shape=(10,)), PlannedArray(shape=(100,), trained=False)]


def recipe(**values):
    return Recipe(rule="sgd", groups=(("", {}),), micro_batch=1, **values)


def sent(backend, arrays=FEW, *, size=2, on_cpu=True, **values):
    return backend.sent_per_update(arrays, recipe(**values), size=size, on_cpu=on_cpu)


def zero(stage, **options):
    return DeepSpeed(DeepSpeed.Options(stage=stage, **options))


@pytest.mark.parametrize("backend", [DDP, Fleet, Horovod])
def test_whole_gradients_go_round_the_ring_twice_but_for_one_part(backend):
    plugin = backend(backend.Options())
    assert sent(plugin) == 34 * 4
    assert sent(plugin, size=4, accumulate=3) == 34 * 4 * 1.5
    assert sent(plugin, precision="fp64") == 34 * 8
    assert sent(plugin, precision="bf16") == 34 * 4


def test_horovod_may_send_halves():
    assert sent(Horovod(Horovod.Options(compression="fp16"))) == 34 * 2
    assert sent(Horovod(Horovod.Options(compression="fp16")), precision="fp64") == 34 * 2


@pytest.mark.parametrize("stage", [1, 2])
def test_zero_gathers_weights_and_the_gradients_of_arrays_that_lie_on_several_ranks(stage):
    # Shares of 18 elements: the first array of 24 lies on both ranks, with 18 and 6, the second on the second rank.
    assert sent(zero(stage)) == (34 + 18 + 18) * 4
    assert sent(zero(stage, reduction="micro_batch"), accumulate=3) == (3 * 34 + 18 + 18) * 4
    # Shares of 10: the first array has 10, 10 and 4, the second 6 and 4.
    assert sent(zero(stage), size=4) == 4 * (34 * 1.5 + 3 * 10 + 3 * 10)
    # A gather takes about one element, so each array is gathered by itself, with as much of each rank as the longest part.
    assert sent(zero(stage, bucket_mb=1e-6), size=4) == 4 * (34 * 1.5 + 3 * 10 + 3 * (10 + 6))


def test_stage_3_gathers_small_weights_after_the_update_and_large_ones_in_each_pass():
    large, frozen = PlannedArray(shape=(400, 400)), PlannedArray(shape=(400, 500), trained=False)
    per_rank = 80_000 * 3 + 80_000 + 2 * 80_000 + 100_000 * 3  # passes, norm, sum; frozen: passes alone
    assert sent(zero(3), [large, frozen], accumulate=3) == per_rank * 4
    # With NCCL, a rank sends its share of the sums once.
    assert sent(zero(3), [large, frozen], accumulate=3, on_cpu=False) == (per_rank - 80_000) * 4
    assert sent(zero(3), accumulate=3) == (17 + 17 + 34 + 50) * 4
    few = {"zero_optimization": {"stage3_max_live_parameters": 1000}}
    assert sent(zero(3, config=few), [large]) is None


def test_fsdp_gathers_weights_twice_a_pass_and_pads_the_first_axis():
    # On four ranks the array of 10 has parts of 3; a single row lies on one rank, and its norm is taken there.
    arrays = [PlannedArray(shape=(10,)), PlannedArray(shape=(1, 5))]
    expected = 3 * (4 * (3 + 5) + 3) + 1.5 * 4 * (3 + 5)
    backend = fsdp.Fsdp(fsdp.Fsdp.Options())
    assert backend.sent_per_update(arrays, recipe(accumulate=2), size=4, on_cpu=True) == expected * 4
    assert rings.reduce_scatter(80, size=4, on_cpu=False) == 60


def test_a_plan_names_what_each_rank_sends(capsys):
    def row(*words):
        assert main(["plan", "-c", "vit_digits", "--devices", "cpu", *words]) == 0
        printed = capsys.readouterr().out
        return [line.split(maxsplit=3)[3] for line in printed.splitlines() if line.startswith("sent per update")]

    # 6,368 numbers and 17 for each class, once and a half on four ranks.
    tiny = ("-o", "model.options={patch: 8, width: 16, depth: 1, heads: 1}")
    assert row("--nproc-per-node", "4", *tiny) == ["37.3 KiB + 0.1 KiB for each class, by each rank"]
    assert row("--nproc-per-node", "1", "--backend", "solo") == []
    assert row("--nproc-per-node", "2", "--backend", "fsdp", "-o", "parallel.shard=2") == []
