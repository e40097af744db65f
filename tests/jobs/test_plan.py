"""The values that a plan takes from this machine and from the hosts of a job."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mtrain.errors import SpecError
from mtrain.jobs.plan import rows as plan_rows
from mtrain.jobs.plan.machine import Machine
from mtrain.jobs.plan.plan import Plan, make_plan
from mtrain.spec import config

THREE_ADDRESSES = (("lo", "127.0.0.1"), ("eth7", "10.0.0.1"), ("eth8", "192.0.2.1"))


def planned(*overrides: str, **machine: Any) -> Plan:
    loaded = config.load("digits", overrides=["backend.name=ddp", *overrides], environ={})
    here = Machine(cores=8, devices=0, addresses=THREE_ADDRESSES, **machine)
    return make_plan(loaded, run_dir=Path("runs/a"), resume=None, machine=here)


def test_the_cores_are_shared_out_among_the_ranks_of_a_host() -> None:
    threads = [planned(f"cluster.nproc_per_node={ranks}").commands[0].env["OMP_NUM_THREADS"] for ranks in (1, 2, 4)]
    assert threads == ["8", "4", "2"]
    assert planned("cluster.nproc_per_node=2", "cluster.threads=3").commands[0].env["OMP_NUM_THREADS"] == "3"


def test_the_interface_that_was_found_here_is_told_to_the_command_of_this_host_alone() -> None:
    first, second = planned("cluster.ips=[10.0.0.1, 10.0.0.2]").commands
    assert first.env["GLOO_SOCKET_IFNAME"] == "eth7"
    assert "GLOO_SOCKET_IFNAME" not in second.env
    named = planned("cluster.ips=[10.0.0.1, 10.0.0.2]", "cluster.interface=ib0").commands
    assert [command.env["GLOO_SOCKET_IFNAME"] for command in named] == ["ib0", "ib0"]


def test_ranks_are_counted_over_hosts_with_other_numbers_of_them() -> None:
    plan = planned("cluster.ips=[10.0.0.1, 10.0.0.2, 10.0.0.3]", "cluster.slots=[1, 4, 3]", "train.batch_size=16")
    assert [plan.first_rank(node) for node in range(3)] == [0, 1, 5]
    assert plan.size == 8


def test_the_plan_says_how_long_the_warmup_is_and_what_becomes_of_momentum() -> None:
    by_epochs = planned("schedule.warmup.epochs=2", "optimizer.rule=sgd").numbers["warmup"]
    assert "2 x updates_per_epoch" in by_epochs
    assert "momentum from 0.8 to 0.9" in by_epochs
    by_updates = planned("schedule.warmup.updates=4").numbers["warmup"]
    assert by_updates.startswith("4 updates")
    assert "beta1 0.9" in by_updates


def test_a_model_whose_losses_have_no_float64_is_refused_in_that_precision_before_anything_starts() -> None:
    own = ("model.name=d_fine", "model.options={}")
    with pytest.raises(SpecError, match=r"train\.precision: fp64 given, but the loss of d_fine is computed in float32"):
        planned(*own, "train.precision=fp64")
    assert planned(*own, "train.precision=fp32").numbers["precision"] == "fp32"
    assert planned("train.precision=fp64").numbers["precision"] == "fp64"


@pytest.mark.parametrize(("backend", "named"), [("ddp", True), ("fleet", False)])
def test_only_a_backend_on_torch_is_told_of_torchs_process_group(backend, named):
    team = SimpleNamespace(
        size=2, devices=SimpleNamespace(on_cpu=False), backend=SimpleNamespace(framework="torch" if named else "paddle")
    )
    row = plan_rows._batchnorm_row(SimpleNamespace(sync_batchnorm=True), team)["sync BatchNorm"]
    assert row.startswith("mtrain's own layers, over 2 ranks")
    assert ("torch" in row) == named, backend
