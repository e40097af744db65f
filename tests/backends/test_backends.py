"""Backends as plugins, their batches and their BatchNorm."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from torch import nn

from mtrain.backends._torch.collective import LocalCollective
from mtrain.backends._torch.syncbn import SyncBatchNorm2d, synchronize
from mtrain.backends.ddp import DDP
from mtrain.backends.solo import Solo
from mtrain.core.errors import LaunchError

ROOT = Path(__file__).parents[2]


def python(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    kept = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    argv = [sys.executable, "-W", "error", "-c", textwrap.dedent(code)]
    return subprocess.run(
        argv, cwd=ROOT, env={**kept, "OMP_NUM_THREADS": "1", **env}, capture_output=True, text=True, timeout=120
    )


def test_backends_say_what_they_are_without_loading_a_framework() -> None:
    done = python("""
        import sys
        from mtrain.backends.ddp import DDP
        from mtrain.backends.solo import Solo
        assert (DDP.framework, DDP.rendezvous) == ("torch", "torch")
        assert (Solo.framework, Solo.rendezvous) == ("torch", "none")
        DDP(DDP.Options()), Solo(Solo.Options(framework="torch"))
        assert "torch" not in sys.modules
    """)
    assert done.returncode == 0, done.stderr


def test_a_job_of_one_rank_starts_without_the_compiler() -> None:
    done = python("""
        import sys
        import numpy as np
        from mtrain.backends.solo import Solo
        from mtrain.core.interfaces import Rates, Recipe
        from tests.contract.convnet import ConvNet
        with Solo(Solo.Options(device="cpu")) as backend:
            recipe = Recipe(rule="sgd", groups=(("", {"momentum": 0.9}),), micro_batch=2, ema_decay=0.9)
            model, optimizer = backend.prepare(ConvNet, recipe)
            batch = {"images": np.ones((2, 3, 8, 8)), "labels": np.array([0, 1])}
            for device_batch in backend.batches([batch]):
                with optimizer.micro_batch(last=True):
                    optimizer.backward(model(device_batch)["total"])
                optimizer.step(Rates(rates=(0.1,)))
        assert "torch._dynamo" not in sys.modules
    """)
    assert done.returncode == 0, done.stderr


def test_unknown_options_are_refused() -> None:
    with pytest.raises(ValidationError, match="bucket_md"):
        DDP.Options(bucket_md=3)  # type: ignore[call-arg]
    with pytest.raises(ValidationError, match="framework"):
        Solo.Options(framework="paddle")  # type: ignore[arg-type]


def test_ddp_without_a_starter_says_how_to_start_it() -> None:
    done = python("""
        from mtrain.backends.ddp import DDP
        from mtrain.core.errors import LaunchError
        try:
            with DDP(DDP.Options(device="cpu")):
                pass
        except LaunchError as error:
            print(error)
    """)
    assert "not started by torchrun" in done.stdout, done.stderr
    assert "RANK" in done.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_where_there_is_none_is_refused() -> None:
    with (
        pytest.raises(LaunchError, match="torch sees no CUDA device; use 'cpu' or 'auto'"),
        Solo(Solo.Options(device="cuda")),
    ):
        pass


@pytest.mark.parametrize("kind", ["raises", "dies"])
def test_a_rank_that_fails_takes_the_job_down_at_once(tmp_path: Path, kind: str) -> None:
    failing = "raise RuntimeError('on purpose')" if kind == "raises" else "os._exit(9)"
    script = tmp_path / "rank.py"
    script.write_text(
        textwrap.dedent(f"""
        import os
        from mtrain.backends.ddp import DDP
        from mtrain.core.collective import barrier
        with DDP(DDP.Options(device="cpu")) as backend:
            barrier(backend.collective)
            if backend.collective.rank == 1:
                {failing}
            barrier(backend.collective)
    """)
    )
    starter = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(starter, cwd=ROOT, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert ("on purpose" in done.stderr) is (kind == "raises")


@pytest.fixture
def backend() -> Any:
    with Solo(Solo.Options(device="cpu")) as entered:
        yield entered


def test_batches_on_the_host_share_memory_and_come_in_order(backend: Any) -> None:
    arrays = [{"x": np.full(3, i, np.float32), "index": np.array([i])} for i in range(4)]
    found = list(backend.batches(arrays))
    assert [int(batch["index"]) for batch in found] == [0, 1, 2, 3]
    assert found[1]["x"].data_ptr() == arrays[1]["x"].ctypes.data
    assert found[1]["x"].dtype == torch.float32


def test_read_only_and_reversed_arrays_become_tensors_too(backend: Any) -> None:
    frozen = np.arange(3)
    frozen.setflags(write=False)
    (batch,) = backend.batches([{"frozen": frozen, "reversed": np.arange(3)[::-1]}])
    assert batch["frozen"].tolist() == [0, 1, 2]
    assert batch["reversed"].tolist() == [2, 1, 0]


def test_no_batch_is_asked_for_before_it_is_needed_on_the_host(backend: Any) -> None:
    asked = []

    def loader() -> Any:
        for i in range(3):
            asked.append(i)
            yield {"x": np.array([i])}

    batches = backend.batches(loader())
    next(batches)
    assert asked == [0]


def test_inference_takes_no_gradient_and_returns_float32_arrays(backend: Any) -> None:
    from mtrain.core.interfaces import Recipe
    from tests.contract.convnet import ConvNet

    recipe = Recipe(rule="sgd", groups=(("", {}),), micro_batch=2, precision="bf16")
    model, _ = backend.prepare(ConvNet, recipe)
    model.eval()
    (batch,) = backend.batches([{"images": np.ones((2, 3, 8, 8), np.float32), "labels": np.array([0, 1])}])
    output = backend.infer(model, batch)
    assert output["logits"].shape == (2, 4)
    assert output["logits"].dtype == np.float32
    assert all(p.grad is None for p in model.parameters())


def test_memory_is_that_of_this_process(backend: Any) -> None:
    assert 50e6 < backend.measure()["memory_bytes"] < 50e9


@pytest.mark.parametrize("unbiased", [True, False])
def test_synchronised_batchnorm_of_one_rank_is_the_plain_one(unbiased: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(5, 3, 4, 4, dtype=torch.float64) * 3 + 100
    plain = nn.BatchNorm2d(3, momentum=0.3).double()
    nn.init.uniform_(plain.weight)
    ours = nn.Sequential(nn.BatchNorm2d(3, momentum=0.3)).double()
    ours[0].unbiased_variance = unbiased
    ours[0].load_state_dict(plain.state_dict())
    names = list(ours.state_dict())
    synchronize(ours, LocalCollective())
    assert isinstance(ours[0], SyncBatchNorm2d)
    assert list(ours.state_dict()) == names
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    target = torch.randn_like(x)
    (plain(a) * target).sum().backward()
    (ours(b) * target).sum().backward()
    assert b.grad is not None
    assert torch.allclose(a.grad, b.grad, rtol=1e-12, atol=1e-12)  # type: ignore[arg-type]
    assert torch.allclose(plain.weight.grad, ours[0].weight.grad, rtol=1e-12)  # type: ignore[arg-type]
    assert torch.allclose(plain.bias.grad, ours[0].bias.grad, rtol=1e-12)  # type: ignore[arg-type]
    n = x.numel() // 3
    variance = plain.running_var if unbiased else (plain.running_var - 0.7) * (n - 1) / n + 0.7
    assert torch.allclose(ours[0].running_var, variance, rtol=1e-12)  # type: ignore[arg-type]
    assert torch.allclose(ours[0].running_mean, plain.running_mean, rtol=1e-12)  # type: ignore[arg-type]
    assert int(ours[0].num_batches_tracked) == 1
    plain.eval()
    ours.eval()
    assert ours(x).shape == x.shape


def test_synchronised_batchnorm_has_the_gradient_of_what_it_computes() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm2d(2)).double()
    synchronize(model, LocalCollective())
    x = torch.randn(3, 2, 2, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(model, (x,))
