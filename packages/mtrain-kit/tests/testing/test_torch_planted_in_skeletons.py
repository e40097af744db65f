"""A fault planted in the skeleton of each kind of plugin is named by the kit, in a sentence that says what is wrong."""

import json
from pathlib import Path
from typing import NamedTuple

import pytest
from tests.testing.conftest import PATH, mtrain

from mtrain_kit.skeleton import KINDS, _content

SLOW = pytest.mark.slow


class Fault(NamedTuple):
    """A change of a skeleton, and what the kit must say of it."""

    word: str
    old: str
    new: str
    check: str
    says: str
    """Part of the sentence: what was measured, or the error."""


FORBID = 'extra="forbid", frozen=True'
SUM = 'return {"total": ops.sum(ops.cross_entropy(logits, batch["labels"]))}'
MEAN = 'return {"total": ops.mean(ops.cross_entropy(logits, batch["labels"]))}'
EXCHANGE = "distributed.all_reduce(flat)\n        flat /= size"
FAULTS = {
    "model imports a framework": Fault(
        "model", "import zlib\n", "import zlib\n\nimport torch\n", "plugin.light", "frameworks imported: 1"
    ),
    "model takes any option": Fault(
        "model", FORBID, 'extra="allow", frozen=True', "options.checked", "unknown options that are accepted: 1"
    ),
    "model draws its start values from the clock": Fault(
        "model", "PCG64((seed, zlib.crc32(name.encode())))", "PCG64()", "model.initial", "arrays that differ a second time"
    ),
    "model forgets a gradient": Fault(
        "model", MEAN, MEAN.replace("logits,", "ops.detach(logits) + self.head.bias,"), "job.trains", "got no gradient"
    ),
    "model sums its loss": Fault("model", MEAN, SUM, "job.ranks", "largest relative difference between one rank and two"),
    "model calls torch": Fault(
        "model", "count, patch =", "import torch\n\n        images = torch.abs(images)\n        count, patch =",
        "job.frameworks", "torch",
    ),
    "model names no total": Fault("model", '"total": ops.mean', '"loss": ops.mean', "job.trains", "total"),
    "model predicts for too few": Fault(
        "model", 'output["probabilities"]]', 'output["probabilities"]][1:]', "job.trains", "shorter"
    ),
    "data set draws without a seed": Fault(
        "dataset", 'np.random.default_rng(1 if request.split == "train" else 2)', "np.random.default_rng()", "data.repeats",
        "arrays that differ when they are read in another order",
    ),
    "data set has other classes to score": Fault(
        "dataset", 'tuple(request.names or ("red", "green", "blue"))',
        'tuple(request.names or (("red", "green", "blue") if request.split == "train" else ("red", "green")))', "data.reads", "classes",
    ),
    "data set orders by a set": Fault(
        "dataset", "labels = images", "images = images[np.argsort([hash(str(i)) for i in range(len(images))])]\n"
        "        labels = images", "job.repeats", "arrays that differ",
    ),
    "data set depends on the rank": Fault(
        "dataset", "labels = images.mean((1, 2))",
        'import os\n\n        labels = images[::-1 if os.environ.get("RANK") == "1" else 1].mean((1, 2))', "job.ranks",
        "largest relative difference between one rank and two",
    ),
    "data set has a label beyond its classes": Fault(
        "dataset", ".argmax(1).astype(np.int64)", ".argmax(1).astype(np.int64) + 1", "data.reads", "label",
    ),
    "data set is empty": Fault("dataset", "(options.images, options", "(0, options", "data.reads", "holds no image"),
    "task draws without a seed": Fault(
        "task", "* self.keep\n        return index", "* np.random.random()\n        return index", "data.repeats",
        "arrays that differ when they are read in another order",
    ),
    "task sends what cannot be pickled": Fault(
        "task", "return index, float(self.split.brightness[index] * self.keep)",
        "return Rest((index, float(self.split.brightness[index] * self.keep)))\n\n\n"
        "class Rest(tuple):\n    def __reduce__(self):\n        raise TypeError('cannot be pickled')\n", "data.repeats",
        "cannot be pickled",
    ),
    "task counts a sample twice": Fault(
        "task", "for index, value in zip(batch[\"index\"], predictions, strict=True):",
        "for index, value in enumerate(predictions, len(self.predictions)):", "job.ranks", "one rank and two",
    ),
    "task describes a key with nothing": Fault(
        "task", 'Field(default="", description="unit, for display")', '""', "task.sections", "keys without a description: 1"
    ),
    "task stores labels that are no plain values": Fault(
        "task", '{"class_names": ["brightness"]}', '{"class_names": np.array(["brightness"])}', "task.shows", "ndarray"
    ),
    "launcher writes while it plans": Fault(
        "launcher", "        commands = []", '        open("hosts", "w").close()\n        commands = []',
        "launcher.plan", "files written: 1",
    ),
    "launcher plans anew each time": Fault(
        "launcher", "--master-port={options.master_port}", "--master-port={id(object()) % 9999}{__import__('time').time_ns()}",
        "launcher.plan", "commands that differ a second time",
    ),
    "launcher blames for a success": Fault(
        "launcher", "if status else []", "or [(0, status)]", "launcher.deaths", "ranks blamed for a success: 1"
    ),
    "launcher starts too few ranks": Fault(
        "launcher", "--nproc-per-node={host.slots}", "--nproc-per-node=1", "launcher.starts", "ddp"
    ),
    "backend sums gradients": Fault(
        "backend", EXCHANGE, "distributed.all_reduce(flat)", "learns.sgd", "summed, not averaged"
    ),
    "backend forgets the exchange": Fault("backend", EXCHANGE, "pass", "learns.sgd", "largest relative difference"),
    "backend loses bits": Fault(
        "backend", EXCHANGE, "flat = flat.bfloat16().to(flat.dtype)\n        " + EXCHANGE, "learns.sgd", "largest relative"
    ),
    "backend imports a framework": Fault(
        "backend", "from datetime import timedelta\n", "from datetime import timedelta\n\nimport torch\n", "plugin.light",
        "frameworks in this process: 1",
    ),
}  # fmt: skip
PROBED = ("options.checked", "plugin.light", "data.reads", "task.sections", "launcher.plan")
"""Checks that need no job; the first fault of each kind that one of them finds is planted in every run of the tests."""


def marked() -> list[object]:
    quick: set[str] = set()
    found: list[object] = []
    for name, fault in FAULTS.items():
        slow = fault.check not in PROBED or fault.word in quick or fault.word == "backend"
        if not slow:
            quick.add(fault.word)
        found.append(pytest.param(name, marks=SLOW) if slow else name)
    return found


@pytest.mark.job
@pytest.mark.parametrize("name", marked())
def test_a_fault_in_a_skeleton_is_named(name: str, tmp_path: Path) -> None:
    fault = FAULTS[name]
    site = planted(fault, tmp_path)
    argv = ["plugins", "test", "my_thing", "--kind", KINDS[fault.word], "--only", fault.check, "--json", "found.json"]
    if fault.word == "task":  # of several plugins in a plugins.toml none is chosen without being named
        argv += ["-o", "model.name=my_thing_linear", "-o", "data.format=my_thing_squares"]
    process = mtrain(*argv, cwd=tmp_path, PYTHONPATH=f"{site}:{PATH}")
    assert process.returncode == 1, process.stdout + process.stderr
    (found,) = json.loads((tmp_path / "found.json").read_text())["checks"]
    wrong = [f"{m['what']}: {m['value']:g} {m['detail']}" for m in found["measures"] if not m["ok"]]
    assert any(fault.says in text for text in [*wrong, found["error"], process.stdout]), process.stdout
    assert "Traceback" not in process.stdout + process.stderr


def planted(fault: Fault, folder: Path) -> Path:
    """Write a skeleton with a fault, and a `plugins.toml` that declares it; return the folder to import it from."""
    kind, hits = KINDS[fault.word], 0
    for path, text in _content(kind, "my_thing", "mtrain-my-thing").items():
        hits += fault.old in text
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text.replace(fault.old, fault.new))
    assert hits == 1, "the skeleton has changed"
    lines = []
    for part in (folder / "pyproject.toml").read_text().split('[project.entry-points."mtrain.')[1:]:
        group, entry = part.split('"]', 1)
        for line in entry.split("\n[")[0].strip().splitlines():
            name, _, target = line.partition(" = ")
            lines.append(f"[{group}.{name}]\nmodule = {target}\n")
    (folder / "plugins.toml").write_text("\n".join(lines))
    return folder / "src"


def test_each_kind_has_at_least_three_faults() -> None:
    counts = {word: sum(fault.word == word for fault in FAULTS.values()) for word in KINDS}
    assert min(counts.values()) >= 3, counts
