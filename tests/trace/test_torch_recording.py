"""A script is recorded without a change of it, and trains as if it were not."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mtrain_trace import comparing, reading

SCRIPT = """
import os, sys, torch
from torch.utils.data import DataLoader, TensorDataset
if "RANK" in os.environ:
    torch.distributed.init_process_group("gloo")
torch.set_num_threads(1)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
data = TensorDataset(torch.randn(24, 4), torch.randint(0, 3, (24,)))
optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
for epoch in range(2):
    for images, labels in DataLoader(data, batch_size=4, num_workers=int(os.environ.get("WORKERS", 0))):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        if epoch == 1 and os.environ.get("DIE"):
            os.kill(os.getpid(), 9)
    with torch.no_grad():
        model(data.tensors[0])
print(repr([p.sum().item() for p in model.parameters()]), loss.item())
"""


def run(folder: Path, *words: str, out: str | None = "t", **environment: str) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(SCRIPT)
    front = [sys.executable, "-m", "mtrain_trace", "run", "--out", str(folder / out), "--"] if out else []
    env = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    command = [*front, *(words or (sys.executable, "train.py"))]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.smoke
@pytest.mark.job
def test_a_script_trains_to_the_same_bits_and_leaves_one_trace(tmp_path: Path) -> None:
    plain, traced = run(tmp_path, out=None), run(tmp_path, WORKERS="2")
    assert traced.returncode == plain.returncode == 0, traced.stderr
    assert traced.stdout == plain.stdout
    folders = list((tmp_path / "t").iterdir())
    assert len(folders) == 1  # none of the two workers of the data loader
    trace = reading.read(tmp_path / "t")
    assert len(trace.updates) == 12
    assert [sum(update.samples.values()) for update in trace.updates] == [4] * 12  # the evaluation shows none
    assert trace.updates[0].samples == trace.updates[6].samples
    assert trace.updates[-1].loss == pytest.approx(float(plain.stdout.split()[-1]), rel=1e-6)
    assert set(trace.start) == {"0.weight", "0.bias", "2.weight", "2.bias"}
    assert "12 updates of 1 process in" in traced.stderr


@pytest.mark.job
def test_a_launcher_leaves_no_trace_and_each_rank_one(tmp_path: Path) -> None:
    port = "--rdzv-endpoint=127.0.0.1:0"
    words = (
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--rdzv-backend=c10d",
        port,
        "--nproc-per-node=2",
        "train.py",
    )
    done = run(tmp_path, *words)
    assert done.returncode == 0, done.stderr
    names = sorted(path.name.split("-")[1] for path in (tmp_path / "t").iterdir())
    assert names == ["00000", "00001"]
    second = next((tmp_path / "t").glob("rank-00001-*"))
    (second / "process.json").unlink()
    assert "ranks [1] of 2 left no trace" in reading.read(tmp_path / "t").remarks[0]


@pytest.mark.job
def test_a_killed_training_leaves_its_trace_and_its_exit_code(tmp_path: Path) -> None:
    done = run(tmp_path, DIE="1")
    assert done.returncode == 128 + 9
    # The update before the kill is still held back, so that no device is waited for.
    assert len(reading.read(tmp_path / "t").updates) == 6


@pytest.mark.job
def test_a_repetition_from_weights_one_unit_apart_shows_how_rounding_grows(tmp_path: Path) -> None:
    run(tmp_path, out="a")
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "mtrain_trace"]
    nudged = [*command, "run", "--out", "c", "--calibrate", "--", sys.executable, "train.py"]
    assert subprocess.run(nudged, cwd=tmp_path, capture_output=True, check=False).returncode == 0
    compare = [*command, "compare", "a", "c", "--json"]
    done = subprocess.run(compare, cwd=tmp_path, capture_output=True, text=True, check=False)
    found = json.loads(done.stdout)
    assert done.returncode == 0
    assert found["verdict"] == "same up to rounding"
    assert found["same_bits_until"] == 0
    assert 0 < found["differences"]["weights"][-1] < 1e-4
    strict = subprocess.run([*compare, "--bits"], cwd=tmp_path, capture_output=True, check=False)
    assert strict.returncode == 1


@pytest.mark.job
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run", "--out", "t"], "no command; write it after --"),
        (["run", "--out", ".", "--", "true"], "is not empty"),
        (["run", "--out", "t", "--", "no-such-program"], "no-such-program: cannot be started"),
        (["compare", "a", "b"], "a: no such folder"),
        (["compare", ".", "."], "holds no trace"),
    ],
)
def test_wrong_use_is_one_error_of_exit_code_2(tmp_path: Path, words: list[str], message: str) -> None:
    (tmp_path / "something").touch()
    command = [sys.executable, "-m", "mtrain_trace", *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.job
def test_the_command_sees_no_packages_of_the_recorder_and_its_own_sitecustomize_runs(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "sitecustomize.py").write_text("print('own')")
    program = "import sys; print([p for p in sys.path if 'mtrain_trace' in p]); import mtrain_trace, torch; print(torch.numel)"
    done = run(tmp_path, sys.executable, "-c", program, PYTHONPATH=str(tmp_path / "own"))
    lines = done.stdout.splitlines()  # of two processes, whose order depends on PYTHONUNBUFFERED
    assert lines.count("own") == 2, "of the recorder's own process, and of the command"
    path, _ = (line for line in lines if line != "own")
    assert [Path(entry).name for entry in ast.literal_eval(path)] == ["boot"]


@pytest.mark.job
def test_a_training_goes_on_where_its_trace_cannot_be_made(tmp_path: Path) -> None:
    script = """
import torch
weights = torch.nn.Parameter(torch.ones(2))
weights.sum().backward()
torch.optim.SGD([weights], 0.1).step()
print(weights.sum().item())
"""
    boot = Path(reading.__file__).parent / "boot"
    variables = {"MTRAIN_TRACE": str(tmp_path / "t"), "MTRAIN_TRACE_EVERY": "often", "PYTHONPATH": str(boot)}
    done = run(tmp_path, sys.executable, "-c", script, out=None, **variables)
    assert done.stdout.startswith("1.79"), done.stderr
    assert "this process is not recorded: ValueError" in done.stderr


@pytest.mark.job
def test_groups_that_are_added_later_are_recorded(tmp_path: Path) -> None:
    script = """
import torch
torch.manual_seed(0)
model = torch.nn.Linear(3, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for update in range(4):
    if update == 2:
        further = torch.nn.Parameter(torch.ones(2))
        optimizer.add_param_group({"params": [further], "lr": 0.5})
    optimizer.zero_grad()
    (model(torch.ones(4, 3)).sum() + (further.sum() if update >= 2 else 0)).backward()
    optimizer.step()
"""
    done = run(tmp_path, sys.executable, "-c", script)
    assert "cannot record" not in done.stderr
    updates = reading.read(tmp_path / "t").updates
    assert [len(update.arrays["weights"]) for update in updates] == [2, 2, 3, 3]


@pytest.mark.job
def test_labels_of_tokens_are_one_digest_a_pass_and_are_compared_over_passes(tmp_path: Path) -> None:
    script = """
import sys, torch
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Embedding(10, 8), torch.nn.Linear(8, 10))
tokens, labels = torch.randint(0, 10, (8, 64)), torch.randint(0, 10, (8, 64))
passes = 2 if "halves" in sys.argv else 1
if "other" in sys.argv:
    labels[5, 7] = (labels[5, 7] + 1) % 10
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for update in range(3):
    optimizer.zero_grad()
    for part in torch.arange(8).chunk(passes):
        logits = model(tokens[part]).flatten(0, 1)
        (torch.nn.functional.cross_entropy(logits, labels[part].flatten()) / passes).backward()
    optimizer.step()
"""
    traces = {}
    for word in ("whole", "halves", "other"):
        done = run(tmp_path, sys.executable, "-c", script, word, out=word)
        assert "cannot record" not in done.stderr
        traces[word] = reading.read(tmp_path / word)
    lines = next((tmp_path / "whole").glob("rank-*")).joinpath("updates.jsonl").read_text().splitlines()
    assert max(map(len, lines)) < 1900  # 512 labels are no 512 digests
    assert comparing.compare(traces["whole"], traces["halves"]).parting is None
    parting = comparing.compare(traces["whole"], traces["other"]).parting
    assert parting is not None
    assert (parting.what, parting.update) == (comparing.TARGETS, 1)


@pytest.mark.job
def test_a_training_whose_loop_is_compiled_is_recorded_as_it_runs(tmp_path: Path) -> None:
    script = """
import sys, torch
def train():
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters())
    for update in range(3):
        optimizer.zero_grad()
        model(torch.ones(4, 3)).sum().backward()
        optimizer.step()
(torch.compile(train, backend="eager") if sys.argv[1:] else train)()
"""
    plain = run(tmp_path, sys.executable, "-c", script, out="plain")
    compiled = run(tmp_path, sys.executable, "-c", script, "--compile", out="compiled")
    assert "cannot record" not in plain.stderr + compiled.stderr
    result = comparing.compare(reading.read(tmp_path / "plain"), reading.read(tmp_path / "compiled"))
    assert (result.updates, result.parting) == (3, None)
    assert max(result.curves[comparing.WEIGHTS]) < 1e-4


@pytest.mark.job
def test_a_command_that_trains_nothing_is_told(tmp_path: Path) -> None:
    done = run(tmp_path, sys.executable, "-c", "print('hello')")
    assert done.returncode == 2
    assert "nothing was recorded" in done.stderr
    assert done.stdout == "hello\n"


FRAMEWORKS = {"torch": {"torch"}, "tensorflow": {"tensorflow", "keras"}, "paddle": {"paddle"}}
"""First word of a file's name -> what the file may import besides numpy."""


def test_the_package_keeps_to_the_syntax_of_python_3_9_and_to_numpy() -> None:
    package = Path(reading.__file__).parent
    for file in package.rglob("*.py"):
        tree = ast.parse(file.read_text(), feature_version=(3, 9))
        imported = {
            name.name.split(".")[0] for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names
        }
        imported |= {
            node.module.split(".")[0] for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module
        }
        foreign = imported - set(sys.stdlib_module_names) - {"mtrain_trace", "numpy"}
        framework = file.name.partition("_")[0]
        assert foreign <= FRAMEWORKS.get(framework, set()), file


@pytest.mark.job
def test_sparse_gradients_are_recorded_as_what_they_are_the_short_form_of(tmp_path: Path) -> None:
    script = """
import sys, torch
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Embedding(10, 4, sparse="sparse" in sys.argv), torch.nn.Flatten(), torch.nn.Linear(12, 2))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(3):
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(model(torch.randint(0, 10, (6, 3))), torch.randint(0, 2, (6,))).backward()
    optimizer.step()
"""
    for word in ("dense", "sparse"):
        done = run(tmp_path, sys.executable, "-c", script, word, out=word)
        assert "cannot record" not in done.stderr
    result = comparing.compare(reading.read(tmp_path / "dense"), reading.read(tmp_path / "sparse"))
    assert result.verdict != "different"
    assert "gradients" in result.b.updates[0].parts
