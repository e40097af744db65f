"""What the core does by a package of mtrain: without it one line names the package and what installs it, and nothing is lost."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from mtrain.commands import main
from mtrain.jobs.exported import is_exported
from mtrain.jobs.plan.commands import rank_words
from mtrain.jobs.preflight.libraries import extras, own_packages
from mtrain.records.choosing import write_page
from mtrain.spec import config, plugins
from mtrain.spec.registry import Registry
from mtrain.spec.schema import leaves
from mtrain.system import plugin_packages
from mtrain.weights import reading
from mtrain.weights.reading import Weights
from tests.absent import absent


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def run(here: Path) -> Path:
    """A run folder whose job has begun."""
    (here / "run").mkdir()
    (here / "run/metrics.jsonl").write_text(
        json.dumps({"kind": "start", "time": 1.0, "backend": "ddp", "ranks": 1}) + "\n"
    )
    return here / "run"


def only_line(text: str) -> str:
    (line,) = text.splitlines()
    return line


@pytest.mark.parametrize(
    "words",
    [
        ["predict", "a.jpg", "--weights", "Model.ONNX"],
        ["predict", "a.jpg", "--weights", "Model.ONNX", "-c", "digits"],
        ["evaluate", "--weights", "Model.ONNX"],
        ["evaluate", "--weights", "Model.ONNX", "-c", "digits"],
    ],
    ids=" ".join,
)
def test_an_exported_file_is_named_with_the_package_that_computes_with_it(here, words, capsys):
    for name in ("a.jpg", "Model.ONNX"):
        (here / name).write_bytes(b"?")
    with absent("mtrain-deploy"):
        assert main(words) == 2
    line = only_line(capsys.readouterr().err)
    assert line.startswith("error: Model.ONNX: ")
    assert " is of mtrain-deploy, which is not installed: pip install " in line
    assert "packages/mtrain-deploy" in line
    assert sorted(file.name for file in here.iterdir()) == ["Model.ONNX", "a.jpg"]
    assert main(words) == 2  # it is there again, and finds that this is no ONNX file
    assert "not installed" not in capsys.readouterr().err


def test_what_is_exported_is_known_without_a_package():
    with absent("mtrain-deploy"):
        assert [is_exported(name) for name in ("a.onnx", Path("b.ONNX"), "a.safetensors", "onnx", None)] == [
            *(True, True, False, False, False)
        ]


def test_a_reader_of_exported_models_without_its_functions_is_refused(here, capsys, monkeypatch):
    (here / "mine_exported.py").write_text(
        "from mtrain.core.interfaces.exported import ExportedFiles\nclass Half(ExportedFiles):\n    pass\n"
    )
    (here / "plugins.toml").write_text(
        '[exported]\n[exported.onnx]\nmodule = "mine_exported:Half"\ndistribution = "plugins.toml"\n'
    )
    (here / "a.onnx").write_bytes(b"?")
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert main(["evaluate", "--weights", "a.onnx"]) == 2
    line = only_line(capsys.readouterr().err)
    assert line.startswith("error: a.onnx: the reader of exported models 'onnx' (mine_exported:Half) cannot be made")


def test_a_report_is_written_after_a_job_while_its_package_is_there(run):
    assert write_page(Registry.read(), run, code=0, warn=pytest.fail) == run / "report.html"
    assert (run / "report.html").is_file()


def test_without_its_package_there_is_no_report_and_the_preflight_says_so(run):
    with absent("mtrain-ui"):
        registry = Registry.read()
        assert write_page(registry, run, code=0, warn=pytest.fail) is None
        lacking = [row for row in plugin_packages.plots_lacking(registry) if row[0] == "report.html"]
        assert lacking == [("report.html", "mtrain-ui", "mtrain-ui")]
        loaded = config.load("digits", overrides=["report.tensorboard=false"], environ={})
        note = plugin_packages.left_out(loaded.job)[-1]
        assert note.startswith("report.plots: no ")
        assert "report.html: mtrain-ui is not installed; install with pip install " in note
        assert "packages/mtrain-ui" in note
        found = [finding for finding in [*own_packages(), *extras(registry)] if "mtrain-ui" in finding.check]
        assert [(each.check, each.state) for each in found] == [("mtrain-ui", "absent")], "one line for a package"
        assert "html" in found[0].text
        assert "packages/mtrain-ui" in found[0].remedy
    assert list(run.iterdir()) == [run / "metrics.jsonl"]


def test_a_report_without_its_templates_is_left_out_with_the_same_words(run, monkeypatch):
    registry = Registry.read()
    monkeypatch.setattr(plugins, "find_spec", lambda name: None if name == "jinja2" else object())
    assert write_page(registry, run, code=0, warn=pytest.fail) is None
    assert ("report.html", "jinja2", "mtrain-ui") in plugin_packages.plots_lacking(registry)


def test_a_disabled_report_is_neither_written_nor_missed(here, run):
    (here / "plugins.toml").write_text('[reporters]\ndisabled = ["html"]\n')
    registry = Registry.read()
    assert write_page(registry, run, code=0, warn=pytest.fail) is None
    assert "report.html" not in [row[0] for row in plugin_packages.plots_lacking(registry)]
    with absent("mtrain-ui"):
        assert "report.html" not in [row[0] for row in plugin_packages.plots_lacking(Registry.read())]


@pytest.mark.parametrize("code", [0, 1])
def test_a_reporter_of_pages_that_fails_is_one_warning_of_the_job(here, run, code, monkeypatch):
    (here / "failing_pages.py").write_text(
        "from mtrain.core.interfaces.reporter import Reporter\n"
        "class Pages(Reporter):\n"
        "    @classmethod\n"
        "    def write_page(cls, folder):\n"
        "        raise KeyError('no such colour')\n"
    )
    monkeypatch.setattr(sys, "path", [*sys.path])
    (here / "plugins.toml").write_text('[reporters.html]\nmodule = "failing_pages:Pages"\ndistribution = "nobody"\n')
    warnings: list[str] = []
    assert write_page(Registry.read(), run, code=code, warn=warnings.append) is None
    assert only_line("\n".join(warnings)) == f"warning: {run / 'report.html'} could not be written: 'no such colour'"


def test_two_reporters_of_pages_end_no_job(here, run, monkeypatch):
    (here / "plugins.toml").write_text('[reporters.html]\nmodule = "failing_pages:Pages"\n')
    warnings: list[str] = []
    assert write_page(Registry.read(), run, code=0, warn=warnings.append) is None
    assert "is provided by" in only_line("\n".join(warnings))


@pytest.fixture
def of_library(monkeypatch: pytest.MonkeyPatch, here: Path) -> Iterator[list[str]]:
    """Weights of a model of another library are read in place of a file; yields its name, which a test may change."""
    model = ["hf"]

    def read(path: Path) -> Weights:
        arrays = {"w": np.zeros(2, np.float32)}
        return Weights(path=path, arrays=arrays, layout="neutral", description="test", model=model[0], own="plugin")

    monkeypatch.setattr(reading, "read", read)
    return model


def test_the_folder_of_a_language_model_names_the_package_that_writes_it(here, of_library, capsys):
    with absent("mtrain-language"):
        assert main(["weights", "export", "run", "--to", "out"]) == 2
    line = only_line(capsys.readouterr().err)
    assert line.startswith("error: the model 'hf' is of mtrain-language, which is not installed: pip install ")
    assert "packages/mtrain-language" in line
    assert list(here.iterdir()) == []


def test_a_model_that_writes_no_folder_is_asked_for_a_file(here, of_library, capsys):
    of_library[:] = ["vit"]
    assert main(["weights", "export", "run", "--to", "out"]) == 2
    assert "--to out: unknown ending ''; expected " in only_line(capsys.readouterr().err)
    assert list(here.iterdir()) == []


def test_the_ranks_of_a_package_run_its_program():
    loaded = config.load("digits", environ={})

    def words(mode: str) -> list[str]:
        return rank_words(loaded, run_dir=Path("run"), resume=Path("w"), mode=mode)

    assert words("other_pack.ranks") == ["-m", "other_pack.ranks", "--run-dir", "run", "--resume", "w"]
    assert words("predict")[:6] == ["-m", "mtrain.rank.worker", "--run-dir", "run", "--mode", "predict"]
    assert "--mode" not in words("train")


def test_values_are_found_by_their_paths_as_deep_as_a_spec_is():
    assert dict(leaves({"a": {"b": 1, "c": {}}, "d": [{"e": 2}]})) == {"a.b": 1, "a.c": {}, "d": [{"e": 2}]}
    deep: dict[str, object] = {"x": 1}
    for _ in range(5000):
        deep = {"x": deep}
    ((path, value),) = leaves(deep)
    assert path.count(".") < 30
    assert isinstance(value, dict)
