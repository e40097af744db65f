"""Specs that are written in Python: the same keys as YAML, errors that name them, and types for editors."""

import runpy
import subprocess
import sys
from collections.abc import Sequence
from inspect import signature
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import yaml

import mtrain
from mtrain.errors import SpecError, UsageError
from mtrain.spec import typed
from mtrain.spec.building import Tasks
from mtrain.spec.schema import model_of
from mtrain.spec.sources import shipped_folder

ROOT = Path(__file__).parents[2]


class MyNet:
    """Stands for a class that a cell of a notebook defines."""


@pytest.mark.parametrize("name", ["digits", "vit_digits", "ppyoloe_s_bccd"])
def test_a_dict_means_what_its_yaml_means(name):
    values = yaml.safe_load((shipped_folder() / f"{name}.yml").read_text())
    assert mtrain.load_spec(values).values == mtrain.load_spec(name).values


def test_a_spec_in_code_has_bases_backends_ranks_and_overrides():
    spec = mtrain.Spec(_BASE_="digits", train={"epochs": 3, "batch_size": 8}, data={"root": Path("/data")})  # type: ignore[typeddict-item]
    loaded = mtrain.load_spec(spec, backend="solo", ranks=1, overrides={"train.batch_size": 4})
    assert (loaded.spec.train.epochs, loaded.spec.train.batch_size, loaded.spec.data.root) == (3, 4, "/data")
    assert (loaded.spec.model.name, loaded.spec.backend.name) == ("yolov5n", "solo")
    assert (loaded.name, loaded.path, str(loaded.origin("train.epochs"))) == ("spec", None, "spec")


def test_numbers_of_numpy_and_tuples_are_plain_values():
    values = {"train": {"epochs": np.int64(3), "freeze": ("a", "b")}, "optimizer": {"learning_rate": np.float32(0.5)}}
    loaded = mtrain.load_spec(values)
    assert (loaded.values["train"]["epochs"], loaded.values["train"]["freeze"]) == (3, ["a", "b"])
    assert loaded.values["optimizer"]["learning_rate"] == 0.5


def test_paths_of_code_are_taken_from_the_current_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("nets.py").write_text("class MyNet: pass\n")
    loaded = mtrain.load_spec({"model": {"name": "./nets.py:MyNet", "framework": "torch"}})
    assert loaded.spec.model.name == f"{tmp_path}/nets.py:MyNet"


def containing_itself() -> dict:
    values: dict = {}
    values["train"] = values
    return values


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"train": {"epohs": 3}}, "spec train.epohs: unknown key; did you mean 'epochs'?"),
        ({"trian": {}}, "spec trian: unknown key; did you mean 'train'?"),
        ({"train": {"epochs": "3"}}, "spec train.epochs: given '3', expected an integer > 0"),
        ({"_BASE_": "nowhere"}, "spec _BASE_: no file 'nowhere'"),
        ({"model": {"name": MyNet}}, "spec model.name: given MyNet, which other processes cannot import"),
        ({"model": {"options": {"x": {1}}}}, "spec model.options.x: given an object of type set"),
        ({"train": {3: 1}}, "spec train: given the key 3"),
        (containing_itself(), "does a value contain itself?"),
    ],
)
def test_mistakes_name_the_key(values, message):
    with pytest.raises(SpecError) as caught:
        mtrain.load_spec(values)
    assert message in str(caught.value)


def test_overrides_are_plain_values_too():
    with pytest.raises(SpecError, match=r"overrides model\.name: given MyNet, which other processes cannot import"):
        mtrain.load_spec("digits", overrides={"model.name": MyNet})


def test_what_is_no_spec_is_refused_by_every_function(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    loaded = mtrain.load_spec("digits")
    for call in (
        mtrain.load_spec,
        mtrain.plan,
        mtrain.train,
        mtrain.evaluate,
        lambda spec: mtrain.predict(__file__, spec=spec, weights=__file__),
        lambda spec: mtrain.compare_backends(spec, backends="solo,ddp"),
        lambda spec: mtrain.doctor(spec, quick=True),
        lambda spec: mtrain.run(__file__, spec=spec),
    ):
        with pytest.raises(UsageError, match="given a spec of type Loaded"):
            call(loaded)
        with pytest.raises(SpecError, match=r"spec train\.epohs: unknown key"):
            call({"train": {"epohs": 3}})
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def write_types(tmp_path, monkeypatch):
    """A function that runs scripts/spec-types and returns the file that it has written."""

    def write(*flags: str) -> Path:
        file = tmp_path / "typed.py"
        monkeypatch.setattr(sys, "argv", ["spec-types", *flags, str(file)])
        monkeypatch.setattr(sys, "path", sys.path.copy())
        runpy.run_path(str(ROOT / "scripts/spec-types"), run_name="__main__")
        return file

    return write


def test_the_types_have_the_keys_of_the_sections(write_types):
    file = write_types()
    types = runpy.run_path(str(file))
    keys = {"_BASE_", *(key for schema in Tasks().schemas.values() for key in schema.model_fields)}
    assert set(types["Spec"].__annotations__) == keys
    for section in ("train", "data", "optimizer", "parallel"):
        has = {
            key
            for task in Tasks().schemas.values()
            for key in model_of(task.model_fields[section].annotation).model_fields
        }
        assert set(types[section.title()].__annotations__) == has, section
    train = types["Train"].__annotations__
    assert (train["seed"], train["clip_norm"], train["accumulate"]) == (int, float | None, int | Literal["auto"])
    assert train["freeze"] == Sequence[str]
    assert types["Optimizer"].__annotations__["learning_rate"] is float
    assert types["Backend"].__annotations__["name"] is str
    installed = ROOT / "mtrain/spec/typed.py"
    assert file.read_text() == installed.read_text(), "install again, or: scripts/spec-types mtrain/spec/typed.py"


def test_the_types_of_a_wheel_are_those_of_the_core(write_types):
    spec = runpy.run_path(str(write_types("--core")))["Spec"].__annotations__
    assert {"model", "data", "train"} <= set(spec)
    assert "generate" not in spec, "of mtrain-language"


def test_without_the_written_types_a_spec_is_any_dict(monkeypatch):
    monkeypatch.setitem(sys.modules, "mtrain.spec.typed", None)
    spec = mtrain.Spec(_BASE_="digits", train={"epochs": 3})
    assert (type(spec), mtrain.load_spec(spec).spec.train.epochs) == (dict, 3)


SAMPLE = """
import mtrain
from mtrain.spec.typed import Spec, Train

spec = Spec(_BASE_="digits", train=Train(epochs=3), optimizer={"rule": "adamw", "learning_rate": 1})
spec["schedule"] = {"name": "cosine", "warmup": None}
reveal_type(mtrain.train(spec, ranks=2).records[0])
mtrain.plan({"train": {"epochs": 3}, "data": {"augment": {"mosaic": 0.5}}})
"""
WRONG = """
mtrain.train({"train": {"epohs": 3}})
mtrain.plan(Spec(train={"epochs": "3"}))
Spec(optimizer={"rule": "adamax"})
Train(batch=3)
"""


@pytest.mark.job
def test_a_type_checker_knows_the_keys(tmp_path):
    (tmp_path / "sample.py").write_text(SAMPLE + WRONG)
    package = ROOT / "mtrain"
    files = [
        package / name
        for name in (
            "__init__.py",
            "commands/functions.py",
            "commands/results.py",
            "spec/typed.py",
            "commands/python_calls.py",
            "commands/training_request.py",
            "spec/calls.py",
        )
    ]
    line = [sys.executable, "-m", "mypy", "--strict", "--follow-imports=skip", "--cache-dir", str(tmp_path / "cache")]
    line += ["--config-file", "/dev/null", *map(str, files), "sample.py"]
    done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False)
    said = [text for text in done.stdout.splitlines() if text.startswith("sample.py")]
    assert "Mapping[" in said[0]
    first = SAMPLE.count("\n") + 2
    assert [int(text.split(":")[1]) for text in said[1:] if ": error:" in text] == list(range(first, first + 4))


def test_a_running_notebook_completes_the_keys():
    assert "train" in signature(mtrain.Spec).parameters
    assert {"epochs", "batch_size"} <= set(signature(typed.Train).parameters)
