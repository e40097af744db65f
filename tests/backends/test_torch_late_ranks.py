"""What updates read on two ranks, where metrics are read one update later: on ddp, on every stage of ZeRO, and on FSDP."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.backends.processes import ROOT

pytestmark = pytest.mark.job

METRICS = {
    "numpy in mtrain/core/update/order.py:settle": 1,
    # Numbers of the host go to the device from pinned memory, without waiting.
    "tensor in mtrain/backends/_torch/optimizer.py:_upload": 1,
}
HOSTS = {
    # Hosts tell each other which parameters took part, as an array of the host over gloo.
    "from_numpy in mtrain/backends/_torch/collective.py:all_reduce": 1,
    "numpy in mtrain/backends/_torch/collective.py:all_reduce": 1,
}
JOBS: list[tuple[str, dict[str, Any], dict[str, int]]] = [
    # DDP multiplies each of the eight gradients by a number of the host.
    ("ddp", {}, {**METRICS, "_local_scalar_dense in mtrain/backends/_torch/optimizer.py:_differentiate": 8}),
    ("fsdp", {}, METRICS),
    ("deepspeed", {"stage": 0}, {**METRICS, **HOSTS}),
    ("deepspeed", {"stage": 1}, {**METRICS, **HOSTS}),
    ("deepspeed", {"stage": 2, "reduction": "micro_batch"}, METRICS),
    # The truth value is that of a number on the host, the norm that stage 3 is given in place of its own.
    ("deepspeed", {"stage": 3}, {**METRICS, **HOSTS, "__bool__ in mtrain/backends/_deepspeed/zero.py:publish": 1}),
]
QUICK = (1, 5)


def reads(backend: str, options: dict[str, Any], out: Path) -> list[Any]:
    """Return what ``late_ranks.reads`` found on each of two ranks."""
    if backend == "deepspeed" and find_spec("deepspeed") is None:
        pytest.skip("DeepSpeed is not installed: pip install -e packages/mtrain-trace -e '.[deepspeed]'")
    argv = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    argv += ["-m", "tests.backends.late_ranks", "reads", backend, str(out), json.dumps(options)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(ROOT)}
    process = subprocess.run(argv, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
    assert process.returncode == 0, process.stdout[-3000:] + process.stderr[-6000:]
    return list(json.loads((out / "reads.json").read_text()))


@pytest.mark.parametrize(
    ("backend", "options", "expected"),
    [pytest.param(*job, marks=() if i in QUICK else pytest.mark.slow) for i, job in enumerate(JOBS)],
)
def test_no_update_waits_for_its_device(
    tmp_path: Path, backend: str, options: dict[str, Any], expected: dict[str, int]
) -> None:
    for rank in reads(backend, {**options, "late_figures": True}, tmp_path):
        for rule, found in rank.items():
            assert found == {"late": True, "reads": [expected, expected]}, rule


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "more"),
    [({"stage": 3, "late_figures": False}, 1), ({"stage": 2, "offload": True, "late_figures": True}, 1)],
)
def test_prompt_updates_read_more_and_offloaded_states_are_never_late(
    tmp_path: Path, options: dict[str, Any], more: int
) -> None:
    for rank in reads("deepspeed", options, tmp_path):
        for found in rank.values():
            assert not found["late"]
            assert sum(found["reads"][0].values()) >= more + sum(HOSTS.values())
            assert any(name.startswith(("__float__", "item", "_local_scalar_dense")) for name in found["reads"][0])
