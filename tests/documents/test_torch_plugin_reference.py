"""What `docs/plugin-reference.md` says of batches, splits, predictions and public modules, held against real jobs."""

import ast
import importlib
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mtrain.core.evaluate import outputs
from mtrain.rank.spec.assembly import assemble, open_task
from mtrain.spec import config
from mtrain.spec.resolved import Resolved
from mtrain.tasks.datasets import open_data
from mtrain_kit.skeleton import _content
from tests.framework import Framework

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "plugin-reference.md").read_text(encoding="utf-8")
JOBS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "detection": ("digits", {"data.image_size": 64}),
    "classification": ("vit_digits", {}),
    "segmentation": ("unet_digits", {}),
}
"""Task -> a shipped spec of it."""
FRAMEWORKS = "print([name for name in ('torch', 'paddle') if name in __import__('sys').modules])"


def table(title: str) -> list[list[str]]:
    """The rows of the table under a heading."""
    section = PAGE.split(f"## {title}\n")[1].split("\n## ")[0]
    rows = [line[1:-1].split("|") for line in section.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in row] for row in rows[1:]]


def shape_of(text: str) -> tuple[str, tuple[str, ...]]:
    """Type and letters of `float32 (B, 4)`."""
    found = re.fullmatch(r"(\w+) \((.*?),?\)", text)
    assert found, text
    return found[1], tuple(found[2].split(", "))


def check(array: Any, text: str, sizes: dict[str, int]) -> None:
    """Hold an array against `float32 (B, 4)`; each letter has one size, which is noted in `sizes`."""
    dtype, letters = shape_of(text)
    assert (str(array.dtype), len(array.shape)) == (dtype, len(letters)), text
    for letter, size in zip(letters, array.shape, strict=True):
        assert size == (int(letter) if letter.isdigit() else sizes.setdefault(letter, size)), f"{text}: {array.shape}"


@contextmanager
def job(task: str, framework: Framework) -> Iterator[Any]:
    """A job of a task on one rank in this process, without workers."""
    name, more = JOBS[task]
    values = {"_BASE_": name, "backend": {"name": "solo", "options": {"framework": framework.name, "device": "cpu"}}}
    flags = {"data.workers": 0, "cluster.nproc_per_node": 1, "train.batch_size": 6, "evaluate.batch_size": 5, **more}
    overrides = [f"{path}={value}" for path, value in flags.items()]
    spec = config.load(values, overrides=overrides, environ={}).spec
    with assemble(Resolved.of(spec), open_task(Resolved.of(spec)), leave=lambda error: None, training=True) as running:
        yield running


@pytest.mark.parametrize("task", JOBS)
def test_batches_splits_and_predictions_are_as_the_page_says(task: str, framework: Framework) -> None:
    rows = [row for row in table("Batches") if row[0] in ("all", task)]
    with job(task, framework) as running:
        found = {
            "train": next(iter(running.training_loader().micro_batches(0))),
            "val": next(iter(running.evaluation_loader().micro_batches(0))),
        }
        for split, batch in found.items():
            stated = {row[2].strip("`"): row[3] for row in rows if split in row[1].split(", ")}
            assert set(batch) == set(stated), split
            sizes = {"B": len(batch["index"])}
            for name, text in stated.items():
                check(batch[name], text, sizes)
            assert sizes["S"] == running.task.image_size
        running.model.eval()
        output, host = next(iter(outputs(running.session, running.model, [found["val"]])))
        predictions = running.plugin.predictions(output, host)
        assert len(predictions) == len(host["index"])
        classes = len(running.task.class_names)
        (stated_value,) = [row[1] for row in table("Predictions") if row[0] == task]
        check_prediction(predictions[0], stated_value, {"S": running.task.image_size, "C": classes})
        check_split(open_data(running.spec.data).train, task)


def check_prediction(value: Any, text: str, sizes: dict[str, int]) -> None:
    parts = re.findall(r"`(\w+)` (\w+ \(.*?\))", text)
    if not parts:
        return check(value, text, sizes)
    assert set(value) == {name for name, _ in parts}
    for name, stated in parts:
        check(value[name], stated, sizes)
    return None


def check_split(split: Any, task: str) -> None:
    """Hold one split of an open data set against the class and the fields that the page names."""
    stated: dict[str, str] = {}
    wanted = heading = ""
    for row in table("Splits"):
        heading = row[0] or heading
        if heading == task:
            wanted = row[1].strip("`") or wanted
            stated[row[2].strip("`")] = row[3]
    value = split.images[0] if task == "detection" else split
    assert f"{type(value).__module__}.{type(value).__name__}" == wanted
    required = {field.name for field in fields(value) if field.default is MISSING and field.default_factory is MISSING}
    assert required <= set(stated) <= {field.name for field in fields(value)}
    sizes: dict[str, int] = {}
    for name, text in stated.items():
        if re.match(r"\w+ \(", text):
            check(getattr(value, name), text, sizes)


def test_every_task_of_mtrain_is_on_the_page() -> None:
    from mtrain.spec import plugins

    names = {entry.name for entry in plugins.names("tasks") if entry.is_own}
    assert names - {"own", "language"} == set(JOBS)
    assert {row[0] for row in table("Predictions")} == set(JOBS)


def public() -> dict[str, set[str]]:
    """Module -> its public names; empty: all that have no underscore."""
    return {row[0].strip("`"): set(re.findall(r"`(\w+)`", row[1])) for row in table("Public modules")}


@pytest.mark.parametrize("module", public())
def test_a_public_module_has_its_names(module: str) -> None:
    namespace = importlib.import_module(module)
    missing = [name for name in public()[module] if not hasattr(namespace, name) and module != "mtrain.core"]
    assert missing == []


@pytest.mark.job
def test_public_modules_import_no_framework() -> None:
    lines = "\n".join(f"import {module}" for module in public())
    process = subprocess.run(
        [sys.executable, "-c", f"{lines}\n{FRAMEWORKS}"], capture_output=True, text=True, timeout=60
    )
    assert process.stdout.strip() == "[]", process.stderr


def sources() -> list[Any]:
    folders = [path for path in (ROOT / "examples").glob("mtrain-*") if path.name != "mtrain-sharded"]
    files = [pytest.param(file.read_text(), id=file.name) for folder in folders for file in folder.rglob("*.py")]
    templates = [
        pytest.param(text, id=f"{kind} {Path(path).name}")
        for kind in ("models", "datasets", "launchers", "tasks")
        for path, text in _content(kind, "thing", "mtrain-thing").items()
        if path.endswith(".py")
    ]
    assert len(files) > 12
    assert len(templates) >= 5
    return [*files, *templates]


def used(text: str) -> Sequence[tuple[str, str]]:
    """Each name of mtrain that a module imports."""
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom)]
    own = [node for node in nodes if str(node.module).split(".")[0] == "mtrain"]
    return [(str(node.module), alias.name) for node in own for alias in node.names]


@pytest.mark.parametrize("text", sources())
def test_examples_and_skeletons_use_nothing_of_mtrain_but_what_is_public(text: str) -> None:
    known = public()
    wrong = [
        f"{module}.{name}"
        for module, name in used(text)
        if module not in known or (known[module] and name not in known[module])
    ]
    assert wrong == []


def test_numbers_have_the_meaning_that_the_page_gives_them(framework: Framework) -> None:
    """Boxes are in sides of the input, classes of pixels in the fourth channel, keys differ by sample."""
    with job("detection", framework) as running:
        batch = next(iter(running.training_loader().micro_batches(0)))
        assert (batch["targets"][:, 0] < len(batch["index"])).all()
        assert (batch["targets"][:, 1] < len(running.task.class_names)).all()
        assert (batch["targets"][:, 2:] <= 1).all()
        assert np.array_equal(batch["scale_pad"], np.tile(np.float32([1, 1, 0, 0]), (len(batch["index"]), 1)))
        assert len(set(batch["random_key"].tolist())) == len(batch["index"])
    with job("segmentation", framework) as running:
        assert (next(iter(running.evaluation_loader().micro_batches(0)))["pixels"][..., 3] == 255).all()
        classes = next(iter(running.training_loader().micro_batches(0)))["pixels"][..., 3]
        assert set(np.unique(classes)) <= {0, 1, 255}
