"""Every internal name of torch that mtrain uses exists, and does what mtrain takes for granted."""

import inspect
import math
import socket
import sys
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from mtrain.backends._torch import internals
from tests.backends.internals import Library
from tests.backends.processes import python

TORCH = Library("torch", internals)


@pytest.mark.parametrize(
    "path",
    [
        *(
            f"torch:_foreach_{name}"
            for name in ("mul_", "add_", "lerp_", "copy_", "norm", "mul", "div", "sqrt", "sign")
        ),
        *(f"torch:_fused_{name}_" for name in ("sgd", "adam", "adamw")),
        "torch:batch_norm_update_stats",
        "torch:ops.aten.native_batch_norm_backward",
        "torch._C._distributed_c10d:TCPStore",
        "torch.distributed.distributed_c10d:PrefixStore",
        "torch.distributed.distributed_c10d:_abort_process_group",
        "torch.distributed.nn.functional",
        "torch.nn:Conv2d._conv_forward",
        "torch.nn.parallel:DistributedDataParallel._inside_ddp_forward",
        "torch.nn.parallel:DistributedDataParallel._set_ddp_runtime_logging_sample_rate",
        "torch.nn.parallel:DistributedDataParallel._get_ddp_logging_data",
    ],
)
def test_a_name_exists(path: str) -> None:
    TORCH.get(path)


def test_functions_on_lists_do_what_their_names_say() -> None:
    x, y = [torch.tensor([1.0, 2.0]), torch.tensor(3.0)], [torch.tensor([5.0, 6.0]), torch.tensor(7.0)]
    internals.scale_(x, 2.0)
    TORCH.same("torch._foreach_mul_", [each.tolist() for each in x], [[2.0, 4.0], 6.0])
    internals.add_scaled_(x, y, 0.5)
    TORCH.same("torch._foreach_add_", [each.tolist() for each in x], [[4.5, 7.0], 9.5])
    internals.mix_(x, y, 0.5)
    TORCH.same("torch._foreach_lerp_", [each.tolist() for each in x], [[4.75, 6.5], 8.25])
    internals.copy_(x, y)
    TORCH.same("torch._foreach_copy_", [each.tolist() for each in x], [[5.0, 6.0], 7.0])
    internals.shift_(x, -1.0)
    TORCH.same("torch._foreach_add_", [each.tolist() for each in x], [[4.0, 5.0], 6.0])
    for name, found, expected in (
        ("mul", internals.products(x, 2.0), [[8.0, 10.0], 12.0]),
        ("mul", internals.products(x, [torch.tensor(2.0), torch.tensor(3.0)]), [[8.0, 10.0], 18.0]),
        ("div", internals.quotients(x, x), [[1.0, 1.0], 1.0]),
        ("sqrt", internals.roots([torch.tensor([4.0, 9.0])]), [[2.0, 3.0]]),
        ("sign", internals.signs([torch.tensor([-4.0, 0.0, 9.0])]), [[-1.0, 0.0, 1.0]]),
    ):
        TORCH.same(f"torch._foreach_{name}", [each.tolist() for each in found], expected)
    lengths = internals.norms([torch.tensor([3.0, -4.0]), torch.tensor(-7.0)])
    TORCH.same("torch._foreach_norm", [float(each) for each in lengths], [5.0, 7.0])


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_step_of_sgd_is_that_of_the_formula(momentum: float) -> None:
    weights, grads, velocities = (
        [torch.tensor([value], dtype=torch.float64)] for value in (2.0, 3.0, 0.25 if momentum else 9.0)
    )
    internals.sgd_(weights, grads, velocities, learning_rate=0.5, momentum=momentum, decay=0.125, nesterov=False)
    velocity = momentum * (0.25 if momentum else 9.0) + 3.25
    TORCH.same("torch._fused_sgd_", (float(weights[0]), float(velocities[0])), (2.0 - 0.5 * velocity, velocity))


def test_kernels_change_nothing_where_they_are_told_to_skip() -> None:
    def tensors() -> tuple[list[torch.Tensor], ...]:
        return tuple([torch.tensor([value, math.nan])] for value in (2.0, 3.0, 0.25, 0.5))

    skip, rates = torch.tensor(1.0), {"betas": (0.9, 0.99), "eps": 0.0}
    for momentum in (0.0, 0.9):
        weights, grads, velocities, _ = tensors()
        internals.sgd_(
            weights, grads, velocities, learning_rate=0.5, momentum=momentum, decay=0.1, nesterov=False, skip=skip
        )
        TORCH.same("torch._fused_sgd_", (weights[0][0].item(), velocities[0][0].item()), (2.0, 0.25))
    for decoupled in (False, True):
        weights, grads, means, squares = tensors()
        updates = torch.tensor(1.0)
        internals.adam_(
            weights,
            grads,
            means,
            squares,
            updates,
            learning_rate=0.1,
            decay=0.1,
            decoupled=decoupled,
            skip=skip,
            **rates,
        )
        TORCH.same("torch._fused_adam_", [x[0][0].item() for x in (weights, means, squares)], [2.0, 0.25, 0.5])


def test_a_list_is_multiplied_by_a_number_on_the_device() -> None:
    x = [torch.tensor([1.0, 2.0]), torch.tensor(3.0)]
    internals.scale_by_(x, torch.tensor(2.0))
    TORCH.same("torch._foreach_mul_", [each.tolist() for each in x], [[2.0, 4.0], 6.0])


@pytest.mark.parametrize("decoupled", [False, True])
def test_a_step_of_adam_is_that_of_the_formula(decoupled: bool) -> None:
    weights, grads, means, squares = ([torch.tensor([value], dtype=torch.float64)] for value in (2.0, 3.0, 0.0, 0.0))
    internals.adam_(
        *(weights, grads, means, squares, torch.tensor(1.0)),
        learning_rate=0.1,
        betas=(0.9, 0.99),
        decay=0.125,
        eps=0.0,
        decoupled=decoupled,
    )
    # After one update mean / sqrt(square) is the sign of the gradient.
    expected = 2.0 * (1 - 0.1 * 0.125) - 0.1 if decoupled else 2.0 - 0.1
    name = "torch._fused_adamw_" if decoupled else "torch._fused_adam_"
    assert float(weights[0]) == pytest.approx(expected, abs=1e-12), TORCH.wrong(f"{name} gives {float(weights[0])}")


def test_sums_of_batchnorm_are_those_of_the_formula() -> None:
    torch.manual_seed(0)
    x, dy = torch.randn(4, 3, 5, 5), torch.randn(4, 3, 5, 5)
    mean, variance = internals.channel_statistics(x)
    expected_variance, expected_mean = torch.var_mean(x, (0, 2, 3), correction=0)
    assert torch.allclose(mean, expected_mean, atol=1e-6), TORCH.wrong("batch_norm_update_stats: the mean differs")
    assert torch.allclose(variance, expected_variance), TORCH.wrong("batch_norm_update_stats: the variance differs")
    half_mean, _ = internals.channel_statistics(x.bfloat16())
    TORCH.same("batch_norm_update_stats of bfloat16", half_mean.dtype, torch.float32)
    inverse = torch.rsqrt(variance + 1e-3)
    sums, weighted_sums = internals.channel_gradient_sums(dy, x, mean, inverse)
    normalised = F.batch_norm(x, mean, variance, eps=1e-3)
    message = TORCH.wrong("native_batch_norm_backward: a sum differs")
    assert torch.allclose(sums, dy.sum((0, 2, 3)), atol=1e-5), message
    assert torch.allclose(weighted_sums, (dy * normalised).sum((0, 2, 3)), atol=1e-4), message


def test_a_convolution_computes_with_another_weight() -> None:
    TORCH.takes("torch.nn:Conv2d._conv_forward", ["self", "input", "weight", "bias"])
    layer, x = torch.nn.Conv2d(2, 3, 3, padding=1, padding_mode="reflect"), torch.randn(1, 2, 5, 5)
    assert torch.equal(internals.convolve(layer, x, layer.weight), layer(x)), TORCH.wrong("_conv_forward differs")


def test_a_store_takes_over_a_socket_that_is_bound() -> None:
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    store: Any = internals.store_at(listener, "127.0.0.1", port, size=1, timeout=timedelta(seconds=10))
    store.set("key", "value")
    client = internals.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=10))
    TORCH.same("TCPStore(master_listen_fd=...)", client.get("key"), b"value")
    internals.store_of_default_group(store).set("name", "prefixed")
    TORCH.same("PrefixStore", client.get("default_pg/name"), b"prefixed")


def test_torch_uses_the_prefix_of_the_default_group() -> None:
    TORCH.reads("torch.distributed.distributed_c10d:init_process_group", ['PrefixStore("default_pg"'])


def test_the_static_rendezvous_keeps_its_store_and_is_looked_up_by_name() -> None:
    module = "torch.distributed.elastic.rendezvous.static_tcp_rendezvous"
    TORCH.reads(f"{module}:create_rdzv_handler", ["StaticTCPRendezvous("])
    words = ["self._store", "self.rank", "self.master_addr", "self.master_port", "self.world_size", "self.timeout"]
    TORCH.reads(f"{module}:StaticTCPRendezvous", words)


def test_ddp_reads_what_mtrain_replaces() -> None:
    TORCH.reads("torch.nn.parallel:DistributedDataParallel.__init__", ["get_optimize_ddp_mode()"])
    TORCH.reads("torch.nn.parallel:DistributedDataParallel._run_ddp_forward", ["self._inside_ddp_forward()"])
    TORCH.reads("torch.nn.parallel:DistributedDataParallel._pre_forward", ["self.reducer.prepare_for_forward()"])
    TORCH.reads("torch.nn.parallel:DistributedDataParallel._post_forward", ["self.reducer.prepare_for_backward("])
    names = set(inspect.signature(DistributedDataParallel).parameters)
    assert names & {"forward_sync_buffers", "broadcast_buffers"}, TORCH.wrong("DDP has no argument for buffers")


@pytest.mark.job
def test_a_light_ddp_loads_no_compiler_times_its_exchange_and_lets_go_of_its_group() -> None:
    process = python("""
        import sys, gc
        import torch
        from torch import distributed as dist
        from mtrain.backends._torch import internals
        from tests.backends.internals import Library
        library = Library("torch", internals)
        internals.import_before_joining()
        dist.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
        ddp = internals.LightDDP(torch.nn.Linear(2, 1))
        ddp.time_every_update()
        for _ in range(3):
            ddp(torch.ones(1, 2)).sum().backward()
        library.has(ddp, ["reducer", "logger", "process_group", "require_backward_grad_sync", "static_graph"])
        times = ddp._get_ddp_logging_data()
        for name in ("backward_comm_time_end", "backward_compute_time_end"):
            assert name in times, library.wrong(f"_get_ddp_logging_data has no {name}")
        assert 0 <= ddp.exposed_exchange_s() < 60, library.wrong("the times of _get_ddp_logging_data are not in ns")
        assert "torch._dynamo" not in sys.modules, library.wrong("DistributedDataParallel loads torch._dynamo")
        ddp.release()
        dist.destroy_process_group()
        print("done")
    """)
    assert process.stdout.endswith("done\n"), process.stderr


def test_the_default_group_can_be_aborted() -> None:
    TORCH.takes("torch.distributed.distributed_c10d:_abort_process_group", ["group"])


def test_the_stand_in_of_the_compiler_goes_away() -> None:
    before = "torch._dynamo" in sys.modules
    with internals.without_compiler():
        assert before or torch._dynamo.utils.get_optimize_ddp_mode() == "ddp_optimizer"
    assert internals.compiler_is_loaded() == before
    assert before or "_dynamo" not in vars(torch)


def test_what_ranks_have_sent_is_dropped_as_it_is_read(monkeypatch):
    """The predictions of an evaluation are in memory once: of the parts that came, those that were read are gone."""
    import weakref

    from torch import distributed as dist

    from mtrain.backends._torch import collective

    arrived: list[weakref.ref[Any]] = []
    alive: list[int] = []

    def all_gather(parts, own, group):
        for part in parts:
            part.copy_(own)
        if own.dtype == torch.uint8:
            arrived.extend(map(weakref.ref, parts))

    def unpack(content):
        alive.append(sum(part() is not None for part in arrived))
        return real(content)

    real = collective.unpack
    monkeypatch.setattr(dist, "all_gather", all_gather)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: 5)
    monkeypatch.setattr(collective, "unpack", unpack)
    value = {3: np.arange(1000.0)}
    gathered = collective.DistributedCollective(host_group=None).all_gather(value)
    assert [part[3].tolist() for part in gathered] == [value[3].tolist()] * 5
    assert alive == [4, 3, 2, 1, 0]


@pytest.mark.parametrize(("version", "kept"), [((2, 7), ["default", "hosts"]), ((2, 8), [])])
def test_groups_of_an_older_torch_are_kept_until_the_next_are_joined(version, kept, monkeypatch):
    """Up to 2.7, giving up the last reference to a group could hold up the process for ever."""
    groups, left = {"default": 0, "hosts": 0}, []
    monkeypatch.setattr(internals, "torch_version", lambda: version)
    monkeypatch.setattr(internals, "_kept", [])
    monkeypatch.setattr(internals.distributed_c10d, "_world", SimpleNamespace(pg_map=groups))
    monkeypatch.setattr(internals.distributed_c10d, "destroy_process_group", lambda: left.append(list(internals._kept)))
    internals.destroy_groups()
    assert left == [kept]
    assert internals._kept == kept
    internals.release_groups()
    assert internals._kept == []
