"""Results as objects: rows, curves, checkpoint and notebook tables, from the records of a run folder."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import mtrain
from mtrain.errors import UsageError

START = {"kind": "start", "update": 0, "total_updates": 4, "ranks": 2, "backend": "ddp"}


def update(number: int, loss: float) -> dict:
    return {
        "kind": "update",
        "update": number,
        "epoch": 0,
        "losses": {"total": loss, "box": loss / 2},
        "learning_rate": 0.1,
        "learning_rates": [0.1, 0.2],
    }


def evaluation(number: int, score: float) -> dict:
    metrics = {"score": score, "accuracy": score, "accuracy/0": 0.5}
    return {"kind": "evaluation", "update": number, "epoch": 0, "metrics": metrics, "headline": ["accuracy"]}


def run_folder(folder: Path, *records: dict) -> Path:
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return folder


@pytest.fixture
def killed(tmp_path) -> Path:
    """The folder of a run that was killed after three updates."""
    records = (START, update(0, 4.0), update(1, 3.0), evaluation(2, 0.5), update(2, 2.5), evaluation(3, 0.25))
    return run_folder(tmp_path / "killed", *records)


def test_rows_are_the_records_with_dotted_keys_in_order(killed):
    metrics = mtrain.open_run(killed).records
    assert [(row["kind"], row["update"]) for row in metrics] == [
        ("update", 0),
        ("update", 1),
        ("evaluation", 2),
        ("update", 2),
        ("evaluation", 3),
    ]
    assert metrics[0] == {
        "kind": "update",
        "update": 0,
        "epoch": 0,
        "losses.total": 4.0,
        "losses.box": 2.0,
        "learning_rate": 0.1,
        "learning_rates.0": 0.1,
        "learning_rates.1": 0.2,
    }
    assert [row["metrics.accuracy"] for row in metrics.evaluations] == [0.5, 0.25]
    assert len(metrics.updates[1:]) == 2


def test_updates_that_a_resumed_run_repeats_are_there_once(tmp_path):
    again = {**START, "update": 1}
    folder = run_folder(tmp_path / "run", START, update(0, 4.0), update(1, 3.0), again, update(1, 2.0))
    assert [row["losses.total"] for row in mtrain.open_run(folder).records] == [4.0, 2.0]


def test_rows_become_a_table_of_pandas(killed):
    frame = mtrain.open_run(killed).records.updates.pandas()
    assert frame["losses.total"].tolist() == [4.0, 3.0, 2.5]
    assert len(mtrain.open_run(killed).records.pandas()) == 5


@pytest.mark.job
def test_without_pandas_rows_work_and_the_table_names_the_remedy(killed):
    code = (
        "import sys; sys.modules['pandas'] = None\n"
        "import mtrain\n"
        f"metrics = mtrain.open_run({str(killed)!r}).records\n"
        "print(len(metrics))\n"
        "metrics.pandas()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=False)
    assert done.stdout == "5\n"
    assert "pandas" in done.stderr
    assert "[data]" in done.stderr


def test_a_killed_run_is_opened_with_its_best_and_last_evaluation(killed):
    result = mtrain.open_run(killed)
    assert (result.exit_reason, result.best.update, result.last.update) == ("unfinished", 2, 3)
    assert result.checkpoint is None
    assert repr(result) == (
        f"TrainResult(unfinished, 3 of 4 updates, ddp on 2 ranks, best accuracy 0.5 after 2 updates, run_dir={str(killed)!r})"
    )


@pytest.mark.parametrize(
    ("end", "reason"),
    [
        ({"reason": "done", "stopped_by": None}, "finished"),
        ({"reason": "done", "stopped_by": "patience"}, "stopped_early"),
        ({"reason": "interrupted"}, "interrupted"),
        ({"reason": "failed"}, "unfinished"),
    ],
)
def test_the_last_record_says_how_a_run_ended(tmp_path, end, reason):
    folder = run_folder(tmp_path / "run", START, update(0, 4.0), {"kind": "end", **end})
    assert mtrain.open_run(folder).exit_reason == reason


def test_curves_are_an_image_in_a_notebook_and_a_metric_elsewhere(killed, tmp_path):
    metric = mtrain.open_run(killed).plot()
    assert metric._repr_png_().startswith(b"\x89PNG")
    assert [axes.get_title(loc="left") for axes in metric.axes[:3]] == ["loss", "evaluation", "learning rate"]
    assert metric.axes[0].lines[1].get_ydata().tolist() == [4.0, 3.0, 2.5]
    assert metric.axes[3].get_title(loc="left") == "images per second"
    metric.savefig(tmp_path / "curves.png")
    assert (tmp_path / "curves.png").stat().st_size > 1000


def test_speed_is_drawn_in_the_unit_of_the_records(tmp_path):
    folder = run_folder(tmp_path / "run", START, {**update(0, 4.0), "unit": "samples", "samples_per_second": 9.0})
    assert mtrain.open_run(folder).plot().axes[3].get_title(loc="left") == "samples per second"


def test_tables_of_notebooks_escape_what_users_have_named(tmp_path):
    folder = run_folder(
        tmp_path / "<script>alert(1)<",
        START,
        {
            **evaluation(2, 0.5),
            "metrics": {"score": 1.0, "<img src=x>": 0.5},
            "headline": ["<img src=x>"],
        },
        update(2, 1.0),
    )
    for shown in (
        mtrain.open_run(folder)._repr_html_(),
        mtrain.EvaluateResult(metrics={"<img src=x>": 0.5}, run_dir=folder)._repr_html_(),
    ):
        assert "<script>" not in shown
        assert "<img" not in shown
        assert "&lt;img src=x&gt;" in shown


def test_what_is_no_training_run_is_refused(tmp_path):
    with pytest.raises(UsageError, match="nowhere: no such folder"):
        mtrain.open_run(tmp_path / "nowhere")
    with pytest.raises(UsageError, match=r"has no metrics\.jsonl"):
        mtrain.open_run(tmp_path)
    with pytest.raises(UsageError, match="is the folder of an evaluation"):
        mtrain.open_run(run_folder(tmp_path / "evaluation", evaluation(2, 0.5)))
    with pytest.raises(UsageError, match="has no records of updates to draw"):
        mtrain.open_run(run_folder(tmp_path / "early", START)).plot()


def test_a_result_of_another_host_says_where_its_records_are():
    result = mtrain.TrainResult(best=None, last=None, run_dir=None, exit_reason="finished")
    assert result.checkpoint is None
    for wanted in (lambda: result.records, result.plot):
        with pytest.raises(UsageError, match="is on the first host of the job"):
            wanted()
