"""Every internal name of Horovod that mtrain uses exists, and does what mtrain takes for granted."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from mtrain.backends._horovod import internals, library
from mtrain.backends.engine import LocalCollective
from mtrain.errors import PluginError
from tests.backends.internals import Library
from tests.backends.processes import python

pytestmark = pytest.mark.horovod


@pytest.fixture(scope="module")
def horovod() -> Library:
    return Library("horovod", internals)


def test_the_rendezvous_is_a_server_of_the_standard_library(horovod: Library) -> None:
    module = "horovod.runner.http.http_server"
    horovod.takes(f"{module}:RendezvousHTTPServer.__init__", ["self", "addr", "handler", "verbose"])
    horovod.takes(f"{module}:RendezvousHTTPServer.init", ["self", "host_alloc_plan"])
    horovod.get(f"{module}:RendezvousHandler")
    server = internals.rendezvous_server(("127.0.0.1", 0))
    try:
        horovod.same("the address of RendezvousHTTPServer", server.socket.getsockname()[0], "127.0.0.1")
    finally:
        server.server_close()


@pytest.mark.job
def test_horovodrun_makes_a_server_of_the_class_that_is_changed(horovod: Library) -> None:
    horovod.reads("horovod.runner.http.http_server:RendezvousServer", ["RendezvousHTTPServer("])
    process = python("""
        from mtrain.backends._horovod import internals
        internals.listen_on_loopback_only()
        from horovod.runner.http.http_server import RendezvousServer
        server = RendezvousServer(0)
        server.start()
        print(server._httpd.socket.getsockname()[0])
        server.stop()
    """)
    assert process.stdout == "127.0.0.1\n", process.stderr


@pytest.mark.job
def test_horovodrun_asks_in_its_own_module_whether_there_is_gloo(horovod: Library) -> None:
    horovod.reads("horovod.runner.launch:run_controller", ["if not gloo_built(verbose=verbose)"])
    process = python("""
        from mtrain.backends._horovod import internals
        internals.leave_checks_to_ranks()
        from horovod.runner import launch
        launch.run_controller(True, lambda: print("started"), False, None, False, None, 0)
    """)
    assert process.stdout == "started\n", process.stderr


def test_ranks_over_gloo_refuse_a_library_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    without = SimpleNamespace(init=None, gloo_built=lambda: False, mpi_built=lambda: True)
    monkeypatch.setitem(sys.modules, "horovod", SimpleNamespace(torch=without))
    monkeypatch.setitem(sys.modules, "horovod.torch", without)
    assert library.load() is without
    monkeypatch.setenv("HOROVOD_CONTROLLER", "gloo")
    with pytest.raises(PluginError, match="without it"):
        library.load()


def test_ranks_of_several_hosts_have_places(horovod: Library) -> None:
    horovod.takes("horovod.runner.common.util.hosts:get_host_assignments", ["hosts", "min_num_proc"])
    horovod.takes("horovod.runner.common.util.hosts:HostInfo.__init__", ["self", "hostname", "slots"])
    slot = horovod.get("horovod.runner.common.util.hosts:SlotInfo")("h", *range(3), *range(3))
    horovod.has(slot, ["hostname", "rank", "size", "local_rank", "local_size", "cross_rank", "cross_size"])


def test_an_optimizer_counts_backward_passes_and_reads_its_operation_when_it_sends(horovod: Library) -> None:
    optimizer = "horovod.torch.optimizer:_DistributedOptimizer"
    horovod.reads(f"{optimizer}.__init__", ["self._allreduce_delay = {", "self.op = op"])
    horovod.reads(f"{optimizer}._make_hook", ["self._allreduce_delay[p] -= 1"])
    horovod.reads(f"{optimizer}._allreduce_grad_async", ["self.op"])
    horovod.reads(f"{optimizer}._grouped_allreduce_grad_async", ["self.op"])


@pytest.mark.parametrize(("compression", "halves"), [("none", set()), ("fp16", {torch.float16})])
def test_gradients_that_are_compressed_are_among_the_halves_that_are_checked(
    compression: str, halves: set[torch.dtype]
) -> None:
    from mtrain.backends._horovod.engine import HorovodEngine

    options: Any = SimpleNamespace(compression=compression)
    engine = HorovodEngine(LocalCollective(), torch.device("cpu"), options=options, check=lambda *_, **__: None)  # type: ignore[arg-type]
    assert engine.exchanged_halves(nn.Linear(2, 1)) == halves
