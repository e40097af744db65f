"""``mtrain plugins test`` of models, data sets, tasks and launchers: right ones pass, and each planted fault is named."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.testing import test_torch_planted_in_skeletons
from tests.testing.conftest import PATH, mtrain

from mtrain_kit import plugin_checks, plugin_kit
from mtrain_kit.jobs import PluginTestRequest
from tests.models.detr_specs import CONFIGS

POLICY = Path(__file__).with_name("wrong_plugins.toml")
OTHERS = {
    "models": ("-o", "data.format=grey_squares", "train.precision=fp32"),
    "datasets": ("-o", "model.name=rightmodel", "train.precision=fp32"),
    "tasks": ("-o", "model.name=rightmodel", "data.format=grey_squares", "train.precision=fp32"),
    "launchers": (),
}
SLOW = pytest.mark.slow
FAULTS = {
    "heavy": ("models", "plugin.light"),
    "writing": ("models", "plugin.light"),
    "lax": ("models", "options.checked"),
    "drawn": ("models", "model.initial"),
    "nofigures": ("models", "job.trains"),
    "jittery": ("models", "job.repeats"),
    "counting": ("models", "job.resumes"),
    "torchonly": ("models", "job.frameworks"),
    "empty": ("datasets", "data.reads"),
    "unseeded": ("datasets", "data.repeats"),
    "byprocess": ("datasets", "job.workers"),
    "undescribed": ("tasks", "task.sections"),
    "halfplan": ("launchers", "launcher.plan"),
    "blaming": ("launchers", "launcher.deaths"),
    "onerank": ("launchers", "launcher.starts"),
    "succeeding": ("launchers", "launcher.ends"),
}
"""Plugin -> its kind, and the check that must find its fault."""
PROBED = ("lax", "heavy", "halfplan", "unseeded")
"""Faults that need no job, of which a few are quick enough for every run of the tests."""


def found(folder: Path, kind: str, name: str, *words: str, code: int = 0) -> dict[str, dict[str, Any]]:
    """Checks by id, of one plugin."""
    line = ["plugins", "test", name, "--kind", kind, "--json", "found.json", "--out", "logs", "-o", f"plugins={POLICY}"]
    process = mtrain(*line, *OTHERS[kind], *words, cwd=folder, PYTHONPATH=PATH)
    assert process.returncode == code, process.stdout + process.stderr
    return {check["id"]: check for check in json.loads((folder / "found.json").read_text())["checks"]}


@pytest.mark.job
@pytest.mark.parametrize("name", [name if name in PROBED else pytest.param(name, marks=SLOW) for name in FAULTS])
def test_a_planted_fault_is_found_by_the_check_for_it(name: str, tmp_path: Path) -> None:
    kind, check = FAULTS[name]
    actual = found(tmp_path, kind, name, "--only", check, code=1)
    assert actual[check]["verdict"] == "failed"
    assert actual[check]["error"] or [measure for measure in actual[check]["measures"] if not measure["ok"]]


def test_every_check_has_a_planted_fault() -> None:
    ids = {check.id for checks in plugin_checks.CHECKS.values() for check in checks}
    planted = {fault.check for fault in test_torch_planted_in_skeletons.FAULTS.values() if fault.word != "backend"}
    assert ids == {check for _, check in FAULTS.values()} | planted


@SLOW
@pytest.mark.parametrize(
    ("kind", "name"),
    [("models", "rightmodel"), ("datasets", "grey_squares"), ("tasks", "brightness"), ("launchers", "torchrun")],
)
def test_right_plugins_pass(kind: str, name: str, tmp_path: Path) -> None:
    actual = found(tmp_path, kind, name)
    assert list(actual) == [check.id for check in plugin_checks.CHECKS[kind]]
    assert {check["verdict"] for check in actual.values()} == {"passed"}


@SLOW
@pytest.mark.parametrize(("kind", "name"), [("models", "resnet18"), ("models", "vit"), ("datasets", "digits_classes")])
def test_plugins_of_mtrain_pass_with_the_partners_that_the_kit_chooses(kind: str, name: str, tmp_path: Path) -> None:
    line = [
        "plugins",
        "test",
        name,
        "--kind",
        kind,
        "--out",
        "logs",
        *(["-o", "model.options.patch=2"] if name == "vit" else []),
    ]
    process = mtrain(*line, cwd=tmp_path)
    assert process.returncode == 0, process.stdout + process.stderr


@pytest.mark.parametrize(("name", "precision"), [("rt_detr", "fp64"), ("d_fine", "fp32")])
def test_a_model_of_one_framework_with_start_values_of_its_own_is_tested_for_what_it_promises(
    name: str, precision: str, tmp_path: Path
) -> None:
    tested = plugin_kit._Tested("models", PluginTestRequest(name=name), tmp_path)
    assert tested._loaded.spec.train.precision == precision
    assert tested._loaded.spec.backend.options["framework"] == "torch"
    for check in (plugin_checks.INITIAL, plugin_checks.FRAMEWORKS):
        assert tested.finding(check).verdict == "not run"


@SLOW
@pytest.mark.parametrize("name", ["rt_detr", "d_fine"])
def test_the_detectors_of_transformers_pass_at_the_size_that_the_kit_chooses(name: str, tmp_path: Path) -> None:
    small = {key: value for key, value in CONFIGS[name].items() if key != "num_queries"}
    line = ["plugins", "test", name, "--json", "found.json", "--out", "logs"]
    process = mtrain(*line, "-o", f"model.options.config={json.dumps(small)}", cwd=tmp_path)
    assert process.returncode == 0, process.stdout + process.stderr
    verdicts = {check["id"]: check["verdict"] for check in json.loads((tmp_path / "found.json").read_text())["checks"]}
    assert {name for name, verdict in verdicts.items() if verdict == "not run"} == {
        "model.initial",
        "job.ranks",
        "job.frameworks",
    }


@pytest.mark.job
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("nosuch",), "no backend 'nosuch'"),
        (("vit", "--only", "job.resume_"), "--only job.resume_: no such check; did you mean 'job.resumes'?"),
        (("grey_squares", "-o", f"plugins={POLICY}"), "say with which model to test it: -o model.name=NAME"),
        (("yolov5", "--kind", "importers"), "--kind"),
    ],
)
def test_wrong_use_is_told_in_a_line(words: tuple[str, ...], message: str, tmp_path: Path) -> None:
    process = mtrain("plugins", "test", *words, cwd=tmp_path)
    assert process.returncode == 2, process.stdout + process.stderr
    assert message in process.stderr
    assert "Traceback" not in process.stderr
