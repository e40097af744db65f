"""Properties of torch's backends alone: start by torchrun, common failure, a rank without the compiler."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import nn

from mtrain.backends._torch.collective import TorchCollective
from mtrain.backends._torch.engine import TorchEngine
from mtrain.backends._torch.syncbn import synchronize
from mtrain.backends.ddp import DDP
from mtrain.backends.engine import LocalCollective
from mtrain.errors import PluginError
from tests.backends.processes import ROOT, python


@pytest.mark.job
def test_a_job_of_one_rank_starts_without_the_compiler() -> None:
    process = python("""
        import sys
        from mtrain.backends.solo import Solo
        from mtrain.core.binding import bind
        from mtrain.core.interfaces import Rates
        from tests.backends.recipes import recipe, update
        from tests.contract.convnet import build
        backend = Solo(Solo.Options(device="cpu"))
        with backend as session:
            bind(backend.nn, backend.ops)
            model, optimizer = session.prepare(build, recipe(ema_decay=0.9))
            update(session, model, optimizer, Rates(learning_rates=(0.1, 0.1)))
        assert "torch._dynamo" not in sys.modules
    """)
    assert process.returncode == 0, process.stderr


def test_unknown_options_are_refused() -> None:
    with pytest.raises(ValidationError, match="bucket_md"):
        DDP.Options(bucket_md=3)  # type: ignore[call-arg]


@pytest.mark.job
def test_ddp_without_a_starter_says_how_to_start_it() -> None:
    process = python("""
        from mtrain.backends.ddp import DDP
        from mtrain.errors import LaunchError
        try:
            with DDP(DDP.Options(device="cpu")):
                pass
        except LaunchError as error:
            print(error)
    """)
    assert "not started by torchrun" in process.stdout, process.stderr
    assert "RANK" in process.stdout


@pytest.mark.job
@pytest.mark.parametrize("kind", ["raises", "dies"])
def test_a_rank_that_fails_takes_the_job_down_at_once(tmp_path: Path, kind: str) -> None:
    failing = "raise RuntimeError('on purpose')" if kind == "raises" else "os._exit(9)"
    script = tmp_path / "rank.py"
    script.write_text(
        textwrap.dedent(f"""
        import os
        from mtrain.backends.ddp import DDP
        from mtrain.core.collective import barrier
        with DDP(DDP.Options(device="cpu")) as session:
            barrier(session.collective)
            if session.collective.rank == 1:
                {failing}
            barrier(session.collective)
    """)
    )
    starter = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    process = subprocess.run(starter, cwd=ROOT, env=env, capture_output=True, text=True, timeout=60)
    assert process.returncode == 1
    assert ("on purpose" in process.stderr) is (kind == "raises")


def test_synchronised_batchnorm_has_the_gradient_of_what_it_computes() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm2d(2)).double()
    synchronize(model, LocalCollective())
    x = torch.randn(3, 2, 2, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(model, (x,))


@pytest.mark.parametrize("tells", [True, False])
def test_ranks_without_measured_waiting_are_not_reported_as_waiting(tells: bool) -> None:
    class Silent(LocalCollective):
        """A collective with the default of the interface."""

        time_waits = TorchCollective.time_waits

    engine = TorchEngine(LocalCollective() if tells else Silent(), torch.device("cpu"))
    engine.time_waits()
    assert ("communication_s" in engine.measure()) == tells


def test_a_collective_without_a_member_is_refused_with_the_remedy() -> None:
    class Former(LocalCollective):
        """A collective as plugins could write it when ``time_waits`` was looked up by name."""

        time_waits: Any = None

    with pytest.raises(
        PluginError, match=r"Former has no time_waits; derive Former from TorchCollective in mtrain\.back"
    ):
        TorchEngine(Former(), torch.device("cpu"))
