"""A refused `--resume` loses nothing, an accepted one keeps the spec of before, and a job that stops early says so."""

import pytest
import yaml

from mtrain.commands import main
from mtrain.core.checkpoint.format import size_of
from mtrain.core.checkpoint.store import newest
from mtrain.errors import SpecError
from mtrain.jobs.preflight import job_checks
from mtrain.jobs.resume.check import checkpoint_bytes
from mtrain.spec import config
from mtrain.spec.resolved import Resolved
from mtrain.weights import outline
from mtrain.weights.outline import SpecOutline
from tests.faults.conftest import Runner

EARLY = ["-o", "train.patience=1", "-o", "evaluate.every_updates=1", "-o", "checkpoint.keep_last=9"]


@pytest.fixture(scope="module")
def stopped(tmp_path_factory, digits) -> tuple[Runner, str]:
    """A run that `train.patience` has ended before its last update, and what was told."""
    runner = Runner(tmp_path_factory.mktemp("stopped"), digits)
    code, output = runner.run([*runner.arguments(name="first", backend="solo", ranks=1), *EARLY])
    assert code == 0, output
    return runner, output


def specs(runner: Runner) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in runner.run_folder("first").glob("spec*")}


def test_the_room_that_a_checkpoint_needs_is_known_before_the_model_is_built(stopped):
    runner, _ = stopped
    spec = config.read(runner.run_folder("first") / "spec.json")
    real = size_of(newest(runner.run_folder("first") / "checkpoints"))
    assert checkpoint_bytes(spec, SpecOutline(spec, classes=10)) == pytest.approx(real, rel=0.05)


def test_all_that_is_checked_of_a_model_before_it_is_built_needs_one_outline(stopped, monkeypatch):
    """Start weights, the room on a small disk and ``train.freeze`` each ask for the shapes; each outline is a process."""
    runner, _ = stopped
    spec = config.read(runner.run_folder("first") / "spec.json")
    weights = newest(runner.run_folder("first") / "checkpoints")
    model = spec.model.model_copy(update={"weights": str(weights)})
    spec = spec.model_copy(update={"model": model, "train": spec.train.model_copy(update={"freeze": ["model.0"]})})
    monkeypatch.setattr(job_checks.disk, "AMPLE_BYTES", 1 << 62)
    outlined, real = [], outline.outlines
    monkeypatch.setattr(outline, "outlines", lambda questions: outlined.append(questions) or real(questions))
    job_checks.check(Resolved.of(spec), size=1)
    assert [question.model for questions in outlined for question in questions] == ["yolov5n"]


def test_weights_are_not_evaluated_on_their_classes_in_another_order(stopped):
    runner, _ = stopped
    spec = config.read(runner.run_folder("first") / "spec.json")
    model = spec.model.model_copy(update={"weights": str(newest(runner.run_folder("first") / "checkpoints"))})
    data = spec.data.model_copy(update={"classes": list("1023456789")})
    with pytest.raises(SpecError, match=r"in another order, 0, 1, .*data\.classes=\[0, 1, 2"):
        job_checks.check(Resolved.of(spec.model_copy(update={"model": model, "data": data})), size=1, training=False)


def test_a_job_that_patience_has_ended_says_so_and_what_resume_would_do(stopped):
    runner, output = stopped
    updates = runner.summary("first")["updates"]
    assert updates < 10
    assert "end: done, stopped early by train.patience: no better score in 1 evaluation" in output
    assert f"; {updates} of 10 updates in " in output
    assert "--resume would end at once" in output
    assert runner.summary("first")["stopped_by"] == "patience"


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            "model.name=yolov5s",
            ["model.name: yolov5s given, the checkpoint was trained with yolov5n", "of another shape"],
        ),
        ("optimizer.rule=sgd", ["optimizer.rule: sgd given", "moments of another rule (mean, square)"]),
        (
            "data.classes=[1,0,2,3,4,5,6,7,8,9]",
            ["trained on other classes", "label 0 is '1' here, '0' there", "data.classes chooses, renames and orders"],
        ),
        ("data.classes=[3,8]", ["2 classes in the data, the checkpoint was trained with 10"]),
        ("train.freeze=[model.0]", ["train.freeze: ['model.0'] given", "holds no moments for other parameters"]),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused_before_anything_starts_and_the_run_is_as_before(
    stopped, capsys, more, message
):
    runner, _ = stopped
    before = specs(runner)
    assert main(["train", "--resume", str(runner.run_folder("first")), "-o", more]) == 2
    output = capsys.readouterr().err
    for part in [*message, "start a new job from its weights with model.weights: "]:
        assert part in output
    assert specs(runner) == before


def test_a_resumed_job_with_another_spec_keeps_the_former_one(stopped):
    runner, _ = stopped
    former = specs(runner)["spec.yml"]
    resume = ["--resume", str(runner.run_folder("first"))]
    code, output = runner.run([*resume, "-o", "train.patience=null", "-o", "train.updates=4"])
    assert code == 0, output
    now = specs(runner)
    assert sorted(now) == ["spec.1.yml", "spec.json", "spec.yml"]
    assert now["spec.1.yml"] == former
    assert yaml.safe_load(now["spec.yml"])["train"]["updates"] == 4
    assert '"updates": 4' in now["spec.json"].decode()
    assert runner.summary("first")["stopped_by"] is None
