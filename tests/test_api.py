"""The Python functions of mtrain, called as a script or a notebook calls them: real jobs, real ranks."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import mtrain
from mtrain.errors import MtrainError, SpecError, UsageError
from tests.starts import starts_processes

ROOT = Path(__file__).parents[1]
TINY = {
    "train": {"epochs": None, "updates": 4, "batch_size": 8},
    "data.workers": 1,
    "evaluate.every_updates": 2,
    "evaluate.every_epochs": None,
    "checkpoint.every_updates": 2,
    "checkpoint.every_epochs": None,
    "report.plots": False,
}
SPEC = "vit_digits"


@pytest.fixture(scope="module")
@starts_processes
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, mtrain.TrainResult]:
    """A folder, and the result of a short job on one rank in it."""
    folder = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        return folder, mtrain.train(SPEC, backend="solo", overrides=TINY, quiet=True)


@pytest.fixture
def here(trained, tmp_path, monkeypatch) -> Path:
    """The current folder: a copy of the one with the trained run."""
    folder = tmp_path / "work"
    shutil.copytree(trained[0], folder, symlinks=True)
    monkeypatch.chdir(folder)
    return folder


@pytest.mark.smoke
def test_train_returns_what_the_run_folder_says(trained):
    folder, result = trained
    assert result.exit_reason == "finished"
    assert result.run_dir == Path("runs") / SPEC
    summary = json.loads((folder / result.run_dir / "summary.json").read_text())
    assert (result.summary["updates"], summary["updates"]) == (4, 4)
    assert result.last.update == 4
    assert result.best.metrics["score"] == max(summary["best"]["score"], summary["last"]["score"])
    assert result.best.metrics["accuracy"] == summary["best"]["accuracy"]
    assert (folder / result.last.checkpoint).name == "step-00000004"
    assert (folder / result.last.checkpoint / "MANIFEST.json").is_file()


@pytest.mark.smoke
def test_a_result_has_records_curves_and_the_best_checkpoint(here, trained):
    result = trained[1]
    assert [row["update"] for row in result.records.updates] == [0, 1, 2, 3]
    assert [row["metrics.accuracy"] for row in result.records.evaluations][-1] == result.last.metrics["accuracy"]
    assert result.checkpoint == result.best.checkpoint
    assert "loss" in [axes.get_title(loc="left") for axes in result.plot().axes]
    opened = mtrain.open_run(result.run_dir)
    assert (opened.best, opened.last, opened.exit_reason) == (result.best, result.last, result.exit_reason)
    assert (opened.records, repr(opened)) == (result.records, repr(result))


def test_python_and_command_line_train_to_the_same_bits(trained, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    flat = {
        **{f"train.{key}": value for key, value in TINY["train"].items()},
        **{k: v for k, v in TINY.items() if k != "train"},
    }
    overrides = [f"{key}={json.dumps(value)}" for key, value in flat.items()]
    line = [sys.executable, "-m", "mtrain", "train", "-c", SPEC, "--backend", "solo", "-o", *overrides]
    subprocess.run(line, check=True, capture_output=True, timeout=300)
    summary = json.loads((tmp_path / "runs" / SPEC / "summary.json").read_text())
    assert summary["weights_sha256"] == trained[1].summary["weights_sha256"]


def test_a_run_is_resumed_from_python(here):
    longer = {**TINY, "train": {**TINY["train"], "updates": 6}}
    result = mtrain.train(SPEC, backend="solo", overrides=longer, resume=f"runs/{SPEC}", quiet=True)
    assert (result.summary["updates"], result.last.update) == (6, 6)


def test_evaluate_gives_the_metrics_of_the_best_checkpoint(here, trained):
    result = mtrain.evaluate(run=f"runs/{SPEC}", quiet=True)
    assert result.metrics["accuracy"] == trained[1].best.metrics["accuracy"]
    assert result.records[0]["metrics.accuracy"] == result.metrics["accuracy"]
    assert result.checkpoint == trained[1].best.checkpoint
    assert (result.run_dir / "summary.json").is_file()


def test_predict_returns_what_it_writes(here):
    from mtrain.data.images.drawing import save_image

    save_image(np.full((16, 16, 3), 200, np.uint8), Path("images/a.png"))
    Path("images/broken.png").write_bytes(b"no image")
    result = mtrain.predict("images", run=f"runs/{SPEC}", confidence=0.0)
    assert [entry["file_name"] for entry in result.skipped] == ["broken.png"]
    assert list(result.predictions) == json.loads((result.out / "predictions.json").read_text())
    assert {entry["file_name"] for entry in result.predictions} == {"a.png"}


SCRIPT = """
import sys
import torch
import mtrain

with mtrain.session() as session:
    model, optimizer = session.prepare(lambda: torch.nn.Linear(2, 1), optimizer=mtrain.SGD(learning_rate=0.1))
    for batch in session.batches(torch.arange(16.0).reshape(8, 2), global_batch=4, epochs=int(sys.argv[1])):
        optimizer.update(model(batch).square().mean())
"""


@pytest.mark.job
def test_a_script_is_run_with_its_arguments_and_resumed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("loop.py").write_text(SCRIPT)
    result = mtrain.run("loop.py", arguments=[2], backend="solo", quiet=True)
    assert (result.exit_reason, result.summary["updates"], result.run_dir) == ("finished", 4, Path("runs/loop"))
    assert len(result.records.updates) == 4
    longer = mtrain.run(Path("loop.py"), arguments=["3"], backend="solo", resume=result.run_dir, quiet=True)
    assert (longer.summary["updates"], longer.run_dir) == (6, result.run_dir)


def test_plan_starts_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plan = mtrain.plan("yolov5n_bccd", backend="ddp", ranks=2)
    assert plan.size == 2
    assert "torch" in plan.text()
    assert list(tmp_path.iterdir()) == []


def test_overrides_may_be_nested_or_dotted_and_are_named_in_errors():
    loaded = mtrain.load_spec(
        "digits", backend="solo", overrides={"train": {"seed": 7}, "optimizer.learning_rate": 0.5}
    )
    assert (loaded.spec.train.seed, loaded.spec.optimizer.learning_rate, loaded.spec.backend.name) == (7, 0.5, "solo")
    with pytest.raises(SpecError, match=re.escape("overrides['train.seeed']")):
        mtrain.load_spec("digits", overrides={"train": {"seeed": 7}})
    with pytest.raises(SpecError, match="nobody"):
        mtrain.load_spec("digits", backend="nobody")


@pytest.mark.job
def test_doctor_returns_its_findings_and_prints_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    checkup = mtrain.doctor(backend="ddp", quick=True)
    assert (checkup.code, checkup.state) == (0, "ok") or checkup.state == "warning"
    assert {"machine", "torch"} <= {finding.check for finding in checkup.findings}
    unusable = mtrain.doctor(
        "digits", backend="ddp", overrides={"data.format": "coco", "data.root": "nowhere"}, quick=True
    )
    assert (unusable.code, unusable.state) == (1, "bad")
    assert "nowhere" in next(finding.text for finding in unusable.findings if finding.check == "spec")
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: mtrain.train("no_such_spec"), "no_such_spec: no such file"),
        (lambda: mtrain.run("no_such.py"), "no_such.py: No such file or directory"),
        (lambda: mtrain.evaluate(run="nowhere"), "nowhere"),
        (lambda: mtrain.predict([]), "no image was given"),
        (lambda: mtrain.predict("nothing.png"), "no such file or folder"),
        (lambda: mtrain.predict("x.png", confidence=2), "confidence=2"),
        (lambda: mtrain.compare_backends("digits", backends="ddp", profile="exact"), "profile='exact'"),
        (lambda: mtrain.compare_backends("digits", backends=["ddp", "ddp"]), "given twice"),
        (lambda: mtrain.compare_backends("digits", backends="ddp,solo", updates=0), "updates=0, ranks=2"),
        (lambda: mtrain.compare_backends("digits", backends="ddp,solo", arguments=["x"]), "without a script"),
    ],
)
def test_mistakes_raise_an_error_of_mtrain_and_leave_nothing(call, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=re.escape(message)):
        call()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.job
def test_a_job_that_fails_raises_and_names_its_logs(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    # No start value survives this learning rate, so every update is refused until the job gives up.
    fatal = {**TINY, "optimizer.learning_rate": 1e38, "train.clip_norm": None, "train.max_nonfinite": 1}
    with pytest.raises(mtrain.JobFailed, match="training ended with exit code 1") as caught:
        mtrain.train(SPEC, backend="solo", overrides={**fatal, "train": {**TINY["train"], "updates": 50}}, quiet=True)
    assert caught.value.run_dir.is_dir()
    assert isinstance(caught.value, MtrainError)


def test_another_thread_is_told_to_use_the_main_one():
    from threading import Thread

    caught = []

    def call() -> None:
        try:
            mtrain.train("digits")
        except UsageError as error:
            caught.append(str(error))

    thread = Thread(target=call)
    thread.start()
    thread.join()
    assert "main thread" in caught[0]


@pytest.mark.smoke
@pytest.mark.job
def test_importing_mtrain_loads_nothing_heavy():
    code = (
        "import mtrain, sys; dir(mtrain)\n"
        "bad = [name for name in ('pydantic', 'numpy', 'yaml', 'torch', 'paddle', 'mtrain.commands.functions') if name in sys.modules]\n"
        "assert not bad, bad\n"
        "mtrain.load_spec('digits')\n"
        "assert not {'torch', 'paddle'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_every_public_name_is_there_and_documented():
    for name in mtrain.__all__:
        public = getattr(mtrain, name)
        assert name == "__version__" or public.__doc__
    with pytest.raises(AttributeError, match="nothing_of_that_name"):
        _ = mtrain.nothing_of_that_name


def test_the_code_on_the_page_compiles_and_calls_public_functions():
    """Every Python block of docs/python.md compiles and calls no function that is not public."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "python.md").read_text(), flags=re.DOTALL)
    assert len(blocks) >= 4
    for block in blocks:
        compile(block, "docs/python.md", "exec")
        assert set(re.findall(r"mtrain\.(\w+)\(", block)) <= set(mtrain.__all__)


@pytest.mark.parametrize("code", [1, 2])
def test_an_exit_code_of_a_failure_raises_and_names_the_run(tmp_path, monkeypatch, code):
    ended = SimpleNamespace(code=code, run_dir=tmp_path)
    monkeypatch.setattr("mtrain.commands.train.run_training", lambda request: ended)
    with pytest.raises(mtrain.JobFailed, match=f"training ended with exit code {code}; .* {tmp_path}") as caught:
        mtrain.train(SPEC, backend="solo")
    assert (caught.value.exit_code, caught.value.run_dir) == (code, tmp_path)
