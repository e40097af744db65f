"""Scripts that freeze weights, share BatchNorm over ranks, join samples themselves, save on request or use bfloat16."""

import importlib
import shutil
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

from mtrain.backends._torch import internals  # noqa: F401  (before a test has a module in torch's place)
from mtrain.backends._torch.scripts import kept_groups
from mtrain.core.checkpoint import store
from tests.script.runs import SCRIPTS, done, largest_difference, run, summary, weights

FEATURES = str(SCRIPTS / "train_features.py")
KEEP = ("-o", "checkpoint.keep_last=9")
RANKS = {
    "ddp-3": ("--backend", "ddp", "--nproc-per-node", "3"),
    "horovod-2": ("--backend", "horovod", "--nproc-per-node", "2"),
    "zero3-2": ("--backend", "deepspeed", "--nproc-per-node", "2", "-o", "backend.options.stage=3"),
}


@pytest.mark.job
@pytest.mark.parametrize(
    "ranks", ["ddp-3", *(pytest.param(name, marks=pytest.mark.slow) for name in ("horovod-2", "zero3-2"))]
)
def test_frozen_weights_and_batchnorm_over_ranks_train_as_on_one_rank(ranks, tmp_path):
    exact = ("--precision", "fp64", "--dropout", "0")
    done(tmp_path, "--name", "one", "--backend", "solo", *KEEP, FEATURES, *exact)
    done(tmp_path, "--name", "many", *RANKS[ranks], *KEEP, FEATURES, *exact)
    difference = largest_difference(weights(tmp_path, "many"), weights(tmp_path, "one"))
    print(f"{ranks}: largest difference to one rank {difference:.1e}")
    assert difference <= 1e-12
    requested = store.load(tmp_path / "runs/many/checkpoints/step-00000005").state.weights
    last = weights(tmp_path, "many")
    assert np.array_equal(requested["stem.weight"], last["stem.weight"]), "a frozen weight was trained"
    assert not np.array_equal(requested["head.2.weight"], last["head.2.weight"])
    assert summary(tmp_path, "many")["best"] == summary(tmp_path, "one")["best"]


@pytest.mark.job
def test_a_bfloat16_script_continues_from_a_requested_checkpoint_to_the_same_bits(tmp_path):
    ranks = ("--nproc-per-node", "2", *KEEP)
    done(tmp_path, "--name", "whole", *ranks, FEATURES, "--precision", "bf16")
    shutil.copytree(tmp_path / "runs/whole", tmp_path / "runs/cut")
    for later in ("step-00000010", "step-00000020"):
        shutil.rmtree(tmp_path / "runs/cut/checkpoints" / later)
    result = done(tmp_path, "--resume", "runs/cut", *ranks, FEATURES, "--precision", "bf16")
    assert "step-00000005" in result.stdout
    whole, cut = summary(tmp_path, "whole"), summary(tmp_path, "cut")
    assert (cut["weights_sha256"], cut["ema_sha256"]) == (whole["weights_sha256"], whole["ema_sha256"])
    assert weights(tmp_path, "whole")["stem.weight"].dtype == np.float32


IN_A_THREAD = """
import contextvars
import sys
from concurrent.futures import ThreadPoolExecutor

import torch
import mtrain


def train():
    with mtrain.session() as session:
        session.prepare(lambda: torch.nn.Linear(2, 1), optimizer=mtrain.SGD(learning_rate=0.1))
        print(f"{session.size} ranks train", flush=True)


with ThreadPoolExecutor(1) as pool:
    pool.submit(*([contextvars.copy_context().run] if "copied" in sys.argv else []), train).result()
"""


@pytest.mark.job
def test_a_session_in_a_thread_of_its_own_does_not_train_alone_in_silence(tmp_path: Path) -> None:
    (tmp_path / "threaded.py").write_text(IN_A_THREAD)
    job = ("--backend", "ddp", "--nproc-per-node", "2", "threaded.py")
    refused = run(tmp_path, "--name", "refused", *job)
    assert (refused.returncode, "in a thread of its own" in refused.stderr) == (2, True), (
        refused.stdout + refused.stderr
    )
    done(tmp_path, "--name", "copied", *job, "copied")
    trained = {name: logs_of(tmp_path, name).count("ranks train") for name in ("refused", "copied")}
    assert trained == {"refused": 0, "copied": 2}
    assert "2 ranks train" in logs_of(tmp_path, "copied")


def logs_of(here: Path, name: str) -> str:
    return "".join(file.read_text() for file in sorted((here / "runs" / name / "logs").glob("rank-*.log")))


OWN_GROUPS = """
import gc
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def gloo_threads():
    names = [Path(task, "comm").read_text() for task in Path("/proc/self/task").iterdir()]
    return sum(name.startswith("pt_gloo") for name in names)


def train():
    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    model(torch.ones(2, 4)).sum().backward()
    dist.destroy_process_group()


train()
gc.collect()
print("threads of gloo:", gloo_threads(), flush=True)
"""


@pytest.mark.job
def test_groups_of_a_scripts_own_are_not_freed_where_its_model_ends(tmp_path):
    (tmp_path / "own.py").write_text(OWN_GROUPS)
    done(tmp_path, "--name", "own", "--nproc-per-node", "2", "own.py")
    log = (tmp_path / "runs/own/logs/rank-0.log").read_text()
    assert int(log.rpartition("threads of gloo: ")[2]) > 0, log


def test_a_kept_group_is_released_before_the_next_one_begins(monkeypatch):
    groups = [object(), object()]
    calls = []
    module = ModuleType(kept_groups.MODULE)
    module.group, module._world = SimpleNamespace(WORLD=groups[0]), SimpleNamespace(group_count=0)

    def init_process_group(*words, **options):
        calls.append((words, options, sys.getrefcount(groups[0])))

    def destroy_process_group(group=None):
        calls.append(group)

    def own():
        pass

    module.init_process_group, module.destroy_process_group = init_process_group, destroy_process_group
    others = SimpleNamespace(init_process_group=own, destroy_process_group=destroy_process_group)
    monkeypatch.setitem(sys.modules, kept_groups.MODULE, module)
    monkeypatch.setitem(sys.modules, "torch.distributed", others)
    before = sys.getrefcount(groups[0])
    kept_groups.keep_groups()
    module.destroy_process_group()
    module.destroy_process_group(groups[1])
    kept = sys.getrefcount(groups[0])
    assert kept == before + 1
    module.init_process_group("gloo", rank=0)
    assert calls == [None, groups[1], (("gloo",), {"rank": 0}, before)]
    assert module._world.group_count == 1, "the addresses of the ended group are not those of the next one"
    assert others.init_process_group is own, "what a script has put there itself stays"
    assert others.destroy_process_group is module.destroy_process_group


def test_groups_are_kept_too_where_the_script_imports_torch_itself(monkeypatch, tmp_path):
    package, name = tmp_path / "slow_torch", "slow_torch.groups"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "groups.py").write_text(
        "class group:\n    WORLD = object()\ndef init_process_group(): pass\ndef destroy_process_group(group=None): pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(kept_groups, "MODULE", name)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    kept_groups.keep_groups()
    assert name not in sys.modules
    groups = importlib.import_module(name)
    before = sys.getrefcount(groups.group.WORLD)
    groups.destroy_process_group()
    kept = sys.getrefcount(groups.group.WORLD)
    assert kept == before + 1
