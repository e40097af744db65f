"""Reporters: what they receive, what happens when one fails, and what the shipped ones write."""

import csv
import io
import json
from pathlib import Path

import numpy as np
import pytest

from mtrain.core.interfaces.reporter import ReportedRun, Reporter
from mtrain.errors import PluginError, ScriptError, SpecError, TrainingError
from mtrain.records import choosing
from mtrain.records.adapted import of_objects
from mtrain.records.console import make_display
from mtrain.records.reporter import Report
from mtrain.records.reporters.csv_table import CsvTable
from mtrain.records.run_files import RunFiles
from mtrain.spec import config
from mtrain.spec.model import Spec
from mtrain.spec.registry import Registry
from tests.report.test_report import update_record


def run_in(folder: Path, *, rank: int = 0, start_update: int = 0) -> ReportedRun:
    return ReportedRun(folder=folder, rank=rank, size=2, start_update=start_update, spec={"train": {"epochs": 3}})


def records(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


class Kept(Reporter):
    def __init__(self, run: ReportedRun) -> None:
        super().__init__(None, run)
        self.calls: list[tuple[str, dict]] = []

    def start(self, record):
        self.calls.append(("start", record))

    def update(self, record):
        self.calls.append(("update", record))
        record["losses"].clear()

    def evaluation(self, record):
        self.calls.append(("evaluation", record))

    def checkpoint(self, record):
        self.calls.append(("checkpoint", record))

    def message(self, record):
        self.calls.append(("message", record))

    def end(self, record):
        self.calls.append(("end", record))

    def failure(self, record):
        self.calls.append(("failure", record))


class Failing(Kept):
    def update(self, record):
        super().update(record)
        raise KeyError("lost")


OPENED: list[RunFiles] = []


@pytest.fixture(autouse=True)
def closing(tmp_path):
    """Close what a test has opened, before its folder is removed."""
    yield
    while OPENED:
        OPENED.pop().close({})


def report_of(folder: Path, *reporters: Reporter) -> Report:
    named = [(f"{type(reporter).__name__} {number}", reporter) for number, reporter in enumerate(reporters)]
    OPENED.append(RunFiles(folder, plots=False))
    return Report(OPENED[-1], named, clock=lambda: 1.0)


def test_each_kind_of_record_reaches_its_method_as_plain_values(tmp_path):
    kept = Kept(run_in(tmp_path))
    report = report_of(tmp_path, kept)
    report.event("start", update=0)
    report.update(update_record(0) | {"gradient_norm": np.float64("inf")})
    report.evaluation({"AP": np.float32(0.5)}, update=1, epoch=0, best=True)
    report.event("checkpoint", update=1, folder=tmp_path)
    report.event("note", message="a")
    report.event("warning", message="b")
    report.event("end", reason="interrupted")
    assert [name for name, _ in kept.calls] == [
        "start", "update", "evaluation", "checkpoint", "message", "message", "end",
    ]  # fmt: skip
    values = dict(kept.calls)
    assert type(values["update"]["gradient_norm"]) is float
    assert values["update"]["gradient_norm"] == float("inf")
    assert values["evaluation"]["metrics"] == {"AP": 0.5}
    assert values["checkpoint"]["folder"] == str(tmp_path)
    assert values["end"] == {"kind": "end", "time": 1.0, "reason": "interrupted"}


def test_a_failed_job_ends_with_its_error_also_in_the_lines_of_the_run(tmp_path):
    kept = Kept(run_in(tmp_path))
    report = report_of(tmp_path, kept)
    try:
        raise ValueError("no rows")
    except ValueError:
        report.event("end", reason="failed")
    line = {"kind": "end", "time": 1.0, "reason": "failed", "error": "ValueError: no rows"}
    assert kept.calls == [("failure", line)]
    assert records(tmp_path) == [line]


def test_a_reporter_cannot_change_what_others_receive(tmp_path):
    first, second = Kept(run_in(tmp_path)), Kept(run_in(tmp_path))
    record = update_record(0)
    report_of(tmp_path, first, second).update(record)
    assert first.calls[0][1]["losses"] == {}
    assert second.calls[0][1] is not record
    assert record == update_record(0)
    assert records(tmp_path)[0]["losses"] == record["losses"]


def test_a_reporter_that_fails_is_switched_off_with_one_warning(tmp_path):
    failing, kept = Failing(run_in(tmp_path)), Kept(run_in(tmp_path))
    report = report_of(tmp_path, failing, kept)
    for update in range(3):
        report.update(update_record(update))
    assert len(failing.calls) == 1
    assert [name for name, _ in kept.calls].count("update") == 3
    warnings = [record["message"] for record in records(tmp_path) if record["kind"] == "warning"]
    assert warnings == ["the reporter 'Failing 0' has failed and is switched off: KeyError: 'lost'"]


def test_a_reporter_may_have_one_sentence_in_the_records_and_stays_on(tmp_path):
    kept = Kept(run_in(tmp_path))
    report = report_of(tmp_path, kept)
    kept.trouble = "the service does not answer"
    for update in range(2):
        report.update(update_record(update))
    assert [name for name, _ in kept.calls] == ["update", "message", "update"]
    messages = [record.get("message") for record in records(tmp_path) if record["kind"] == "warning"]
    assert messages == ["the reporter 'Kept 0': the service does not answer"]


@pytest.mark.parametrize("mode", ["plain", "quiet", "rich"])
def test_a_display_is_a_reporter_that_receives_the_lines_of_the_run(mode, tmp_path, capsys):
    stream = io.StringIO()
    display = make_display(mode, title="job", stream=stream)
    assert isinstance(display, Reporter)
    report = report_of(tmp_path)
    report.event("start", update=0, model="m")
    report.update(update_record(0))
    report.event("warning", message="odd")
    report.event("end", reason="failed")
    for record in records(tmp_path):
        display.record(record)
    display.close()
    assert "odd" in stream.getvalue()
    stream.close()  # as a terminal that has gone
    for _ in range(2):
        display.record({"kind": "warning", "message": "more"})
    error = capsys.readouterr().err
    assert error.count("the progress display has failed: ValueError: I/O operation on closed file") == 1


def test_a_fatal_reporter_ends_the_job(tmp_path):
    failing = Failing(run_in(tmp_path))
    failing.fatal = True
    with pytest.raises(TrainingError, match="the reporter 'Failing 0' has failed: KeyError: 'lost'"):
        report_of(tmp_path, failing).update(update_record(0))


def test_a_script_gives_objects_and_functions_and_they_are_on_rank_0_unless_they_say_so(tmp_path):
    told = []

    class Partly:
        every_rank = True

        def update(self, record):
            told.append(("object", record["update"]))

    def function(record):
        told.append((record["kind"], record.get("update")))

    for rank in (0, 1):
        report = Report(None, of_objects([Partly(), function], run_in(tmp_path, rank=rank)))
        report.update(update_record(4))
        report.event("end", reason="done")
    assert told == [("object", 4), ("update", 4), ("end", None), ("object", 4)]
    with pytest.raises(
        ScriptError, match=r"reporters\[0\]: the class Partly was given; give an object of it, Partly\(\)"
    ):
        of_objects([Partly], run_in(tmp_path))
    with pytest.raises(
        ScriptError, match=r"reporters\[1\]: an object of type int was given; expected one with at least"
    ):
        of_objects([Partly(), 3], run_in(tmp_path))


class Unmade(Reporter):
    def __init__(self, options, run):
        super().__init__(options, run)
        raise OSError(28, "No space left on device")


POLICY = """
[reporters.unmade]
module = "tests.report.test_reporters:Unmade"
"""


def made(tmp_path: Path, policy: str, reporters: dict) -> tuple[list[str], list[str]]:
    (tmp_path / "plugins.toml").write_text(policy)
    report = Spec().report.model_copy(update={"reporters": reporters})
    named, failures = choosing.make_reporters(
        report, run_in(tmp_path), registry=Registry.read(tmp_path / "plugins.toml")
    )
    for _, reporter in named:
        reporter.end({})
    return [name for name, _ in named], [name for name, _ in failures]


def test_a_reporter_that_cannot_be_made_is_left_out_and_one_that_is_not_allowed_ends_the_job(tmp_path):
    assert made(tmp_path, POLICY, {"unmade": True}) == (["tensorboard"], ["unmade"])
    with pytest.raises(PluginError, match="the reporter 'unmade' is disabled"):
        made(tmp_path, '[reporters]\ndisabled = ["unmade"]\n' + POLICY, {"unmade": True})


def test_what_no_spec_has_named_may_be_disabled_or_broken(tmp_path):
    assert made(tmp_path, '[reporters]\nenabled = ["csv"]\n', {}) == ([], [])
    broken = '[reporters.tensorboard]\ndistribution = "elsewhere"\n'
    assert made(tmp_path, broken, {}) == ([], ["tensorboard"])


# ---------------------------------------------------------------------------------------------------------------- csv
def rows(folder: Path) -> list[dict]:
    with (folder / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def write_csv(folder: Path, updates: range, *, metrics: dict, evaluate_every: int = 10, start_update: int = 0) -> None:
    report = report_of(folder, CsvTable(CsvTable.Options(), run_in(folder, start_update=start_update)))
    for update in updates:
        report.update(update_record(update) | {"learning_rates": [0.1, 0.01]})
        if update % evaluate_every == evaluate_every - 1:
            report.evaluation(metrics, update=update + 1, epoch=(update + 1) // 10)
    report.event("end", reason="done")
    report.close({})


def test_the_table_has_a_row_per_epoch_with_means_metrics_and_rates(tmp_path):
    write_csv(tmp_path, range(25), metrics={"AP": 0.5})
    table = rows(tmp_path)
    assert list(table[0]) == [
        "epoch", "update", "loss/box", "loss/total", "loss/class", "metric/AP", "learning_rate/0", "learning_rate/1",
    ]  # fmt: skip
    assert [(row["epoch"], row["update"], row["metric/AP"]) for row in table] == [
        ("0", "10", "0.5"), ("1", "20", "0.5"), ("2", "25", ""),
    ]  # fmt: skip
    means = [
        np.mean([update_record(update)["losses"]["total"] for update in epoch]) for epoch in (range(10), range(20, 25))
    ]
    np.testing.assert_allclose([float(table[0]["loss/total"]), float(table[2]["loss/total"])], means)


def test_epochs_that_are_not_evaluated_have_a_row_too(tmp_path):
    write_csv(tmp_path, range(30), metrics={"AP": 0.5}, evaluate_every=20)
    assert [(row["update"], row["metric/AP"]) for row in rows(tmp_path)] == [("10", ""), ("20", "0.5"), ("30", "")]


def test_a_resumed_table_drops_the_rows_after_the_checkpoint_and_may_gain_columns(tmp_path):
    write_csv(tmp_path, range(30), metrics={"AP": 0.5})
    with (tmp_path / "metrics.csv").open("a") as file:
        file.write("3,half a r")  # as a killed writer leaves it
    write_csv(tmp_path, range(20, 40), metrics={"AP": 0.6, "AP/cat": 0.7}, start_update=20)
    table = rows(tmp_path)
    assert [(row["update"], row["metric/AP"], row["metric/AP/cat"]) for row in table] == [
        ("10", "0.5", ""), ("20", "0.5", ""), ("30", "0.6", "0.7"), ("40", "0.6", "0.7"),
    ]  # fmt: skip


# ------------------------------------------------------------------------------------------------------ in a spec
def refused(tmp_path: Path, reporters: str) -> str:
    spec = tmp_path / "spec.yml"
    spec.write_text(f"_BASE_: digits.yml\nreport:\n  reporters: {reporters}\n")
    with pytest.raises(SpecError) as caught:
        config.load(str(spec), environ={})
    return str(caught.value)


def test_unknown_reporters_and_options_are_refused_with_line_and_advice(tmp_path):
    known = "csv, html, mlflow, tensorboard, visualdl, wandb"
    message = f"spec.yml:3 report.reporters.cvs: no reporter 'cvs' (known: {known}); did you mean 'csv'?"
    assert message in refused(tmp_path, "{cvs: true}")
    message = refused(tmp_path, "{mlflow: {experimnt: x}}")
    assert "spec.yml:3 report.reporters.mlflow.experimnt: unknown key; did you mean 'experiment'?" in message
    assert "report.reporters.csv: given null, expected" in refused(tmp_path, "{csv: }")


def test_a_reference_is_taken_from_the_folder_of_its_file_and_a_run_folder_names_no_code(tmp_path):
    (tmp_path / "watch.py").write_text("def told(record): pass\n")
    spec = tmp_path / "spec.yml"
    spec.write_text("_BASE_: digits.yml\nreport:\n  reporters: {csv: true, ./watch.py:told: {a: 1}}\n")
    loaded = config.load(str(spec), environ={}, overrides=["report.reporters.csv=false"])
    name = f"{tmp_path / 'watch.py'}:told"
    assert loaded.spec.report.reporters == {"csv": False, name: {"a": 1}}
    run = tmp_path / "run"
    run.mkdir()
    (run / "spec.yml").write_text(f"_BASE_: digits.yml\nreport:\n  reporters: {{'{name}': true}}\n")
    (run / "spec.json").write_text("{}")
    with pytest.raises(SpecError, match="a run folder is not trusted to run code") as caught:
        config.load(str(run / "spec.yml"), environ={})
    advice = str(caught.value).rpartition("-o ")[2].strip("'")
    assert list(config.load(str(run / "spec.yml"), environ={}, overrides=[advice]).spec.report.reporters) == [name]
