"""The records of a run, and the reports that a person sees."""

import errno
import gc
import io
import itertools
import json
import math
import re
import time
from pathlib import Path

import cv2
import numpy as np
import pytest
from matplotlib.text import Text

from mtrain.core.interfaces.reporter import ReportedRun
from mtrain.core.record_files import finite
from mtrain.errors import TrainingError
from mtrain.records import notebook as report_notebook
from mtrain.records import plots as report_plots
from mtrain.records import tensorboard as report_tensorboard
from mtrain.records import wording
from mtrain.records.console import Notes, Plain, Quiet, make_display
from mtrain.records.history import Tail, read_history
from mtrain.records.plots import draw_results, smooth_curve
from mtrain.records.reporter import Report
from mtrain.records.reporters.tensorboard import TensorBoard
from mtrain.records.rich import Rich
from mtrain.records.run_files import RunFiles
from mtrain.records.wording import duration, update_line
from mtrain.spec import outputs


def update_record(update: int, *, total: int = 40, per_epoch: int = 10) -> dict:
    return {
        "update": update,
        "epoch": update // per_epoch,
        "position": update % per_epoch,
        "updates_per_epoch": per_epoch,
        "total_updates": total,
        "losses": {"box": 0.1, "total": 3.0 * math.exp(-update / 20), "class": 0.2},
        "learning_rate": 0.01,
        "momentum": 0.9,
        "gradient_norm": 1.5,
        "samples_per_second": 112.4,
        "data_wait_share": 0.03,
        "memory_bytes": 2**30,
        "update_seconds": 0.5,
        "skipped_updates": False,
    }


METRICS = {"AP": 0.31, "AP50": 0.62, "score": 0.31, "AP/red cell": 0.2}


def report_of(
    folder: Path, *, tensorboard: bool = False, plots: bool = False, start_update: int = 0, clock=time.time
) -> Report:
    """Return the report of rank 0."""
    run = ReportedRun(folder=folder, rank=0, size=1, start_update=start_update, spec={})
    reporters = [("tensorboard", TensorBoard(TensorBoard.Options(), run))] if tensorboard else []
    return Report(RunFiles(folder, plots=plots), reporters, clock=clock)


def write_run(folder: Path, *, updates: int = 40, tensorboard: bool = False, plots: bool = False) -> None:
    reporter = report_of(folder, tensorboard=tensorboard, plots=plots, clock=lambda: 1.0)
    reporter.event("start", update=0, model="yolov5n")
    for update in range(updates):
        reporter.update(update_record(update))
        if update % 10 == 9:
            reporter.evaluation(METRICS, update=update + 1, epoch=update // 10 + 1, best=True)
    reporter.event("end", reason="done")
    reporter.close({"best": METRICS, "worst": float("nan")})


def test_every_line_is_strict_json_and_can_be_read_while_the_run_goes_on(tmp_path):
    reporter = report_of(tmp_path, tensorboard=False, plots=False, clock=lambda: 2.0)
    reporter.update(update_record(0) | {"gradient_norm": np.float32("inf"), "losses": {"total": float("nan")}})
    line = (tmp_path / "metrics.jsonl").read_text().splitlines()[-1]
    record = json.loads(line, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
    assert (record["kind"], record["time"], record["gradient_norm"], record["losses"]) == (
        "update",
        2.0,
        None,
        {"total": None},
    )
    reporter.close({})


def test_values_of_numpy_and_paths_become_plain():
    values = {"a": np.float64(1.5), "b": np.arange(2), "c": Path("x"), 3: (True, None, np.nan)}
    assert finite(values) == {"a": 1.5, "b": [0, 1], "c": "x", "3": [True, None, None]}


FULL = Path("/dev/full")
"""Whatever is written to it finds no space left on the device."""


def test_records_that_find_the_disk_full_end_the_job_with_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setattr(outputs, "open_to_write", lambda path, mode, **options: FULL.open(mode, **options))
    reporter = report_of(tmp_path, tensorboard=False, plots=False)
    with pytest.raises(
        TrainingError, match=r"metrics.jsonl cannot be written: No space left on device; make room, then"
    ):
        reporter.update(update_record(0))
    with pytest.raises(TrainingError, match=r"summary\.json cannot be written: No space left on device"):
        reporter.close({})


def test_curves_and_images_that_find_the_disk_full_harm_no_job(tmp_path, monkeypatch, caplog):
    def full(*arguments, **named):
        raise OSError(errno.ENOSPC, "No space left on device")

    reporter = report_of(tmp_path, tensorboard=True, plots=True)
    monkeypatch.setattr(report_tensorboard.Events, "update", full)
    monkeypatch.setattr(report_plots, "draw_results", full)
    for update in range(2):
        reporter.update(update_record(update))
    reporter.close({"best": METRICS})
    kinds = [json.loads(line)["kind"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert kinds == ["update", "warning", "update"]
    assert json.loads((tmp_path / "summary.json").read_text())["best"] == METRICS
    assert "results.png could not be drawn: No space left on device" in caplog.text


def test_a_job_that_patience_has_ended_says_so_in_every_display():
    record = {"kind": "end", "reason": "done", "stopped_by": "patience", "patience": 3}
    message = "end: done, stopped early by train.patience: no better score in 3 evaluations"
    assert wording.event_line(record) == message
    assert wording.event_line(record | {"stopped_by": None}) == "end: done"
    for reason in ("failed", "interrupted"):
        assert wording.event_line({"kind": "end", "reason": reason}) == f"the ranks have ended: {reason}"


def test_the_start_is_worded_for_people_and_its_facts_for_who_asks(capsys):
    record = {
        "kind": "start",
        "time": 1.0,
        "update": 0,
        "ranks": 2,
        "device": "cpu",
        "backend": "ddp",
        "precision": "fp32",
    }
    record |= {
        "total_updates": 450,
        "updates_per_epoch": 25,
        "model": "yolov5n",
        "train_samples": 400,
        "val_samples": 100,
    }
    told = "start: yolov5n on 400 training samples, 100 to evaluate on, 2 classes; ddp, 2 ranks, cpu, fp32; 18 epochs, 450 updates"
    assert wording.event_line(record | {"classes": ["a", "b"]}) == told
    assert wording.event_line(record | {"classes": ["a", "b"], "update": 9}) == f"{told}; goes on after update 9"
    assert wording.event_line({"kind": "start", "ranks": 1}) == "start: 1 rank"
    assert wording.event_line({"kind": "start"}) == ""
    stream = io.StringIO()
    display = make_display("verbose", title="t", stream=stream)
    display.record(record)
    for update in range(3):
        display.record({"kind": "update", **update_record(update)})
    lines = stream.getvalue().splitlines()
    assert lines[2].startswith("facts: update 0  ranks 2  device cpu")
    assert len(lines) == 6, "no update is left out"


def test_the_end_on_a_terminal_is_a_table_by_class_with_the_best_in_bold(capsys, monkeypatch):
    from mtrain.commands.train import show_result

    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "60")
    best = {"AP": 0.5, "AP/red [b]cell": 0.25, "AP50/red [b]cell": 0.75, "AP/dot": 0.5, "AP50/dot": math.nan}
    lines = ["done: 3 updates", "best evaluation: AP 0.5", *wording.class_lines(best), "logs:  x"]
    show_result(lines, best)
    shown = capsys.readouterr().out
    assert "\x1b[1;32mbest evaluation: AP 0.5\x1b[0m" in shown
    assert "\x1b[1m0.5000\x1b[0m" in shown
    assert "\x1b[1m0.2500" not in shown
    plain = [line.split() for line in re.sub("\x1b[^m]*m", "", shown).splitlines()]
    assert plain[2:] == [
        ["class", "AP", "AP50"],
        ["red", "[b]cell", "0.2500", "0.7500"],
        ["dot", "0.5000", "nan"],
        ["logs:", "x"],
    ]


def test_the_panel_is_drawn_at_most_four_times_a_second():
    now = [0.0]
    display = Rich(io.StringIO(), title="digits", force=True, clock=lambda: now[0])
    drawn = []
    display._live.refresh = lambda: drawn.append(now[0])
    for hundredth in range(100):
        now[0] = hundredth / 100
        display.tick()
    del display._live.refresh
    display.close()
    assert drawn == [0.0, 0.25, 0.5, 0.75]


def test_closing_writes_summary_and_curves_and_a_second_time_nothing(tmp_path):
    write_run(tmp_path, plots=True)
    assert json.loads((tmp_path / "summary.json").read_text()) == {"best": METRICS, "worst": None}
    image = cv2.imread(str(tmp_path / "results.png"))
    assert image.shape[0] > 500
    assert len(np.unique(image.reshape(-1, 3), axis=0)) > 100
    assert not list(tmp_path.glob(".*"))


def test_no_title_label_or_value_of_the_curves_lies_on_another(tmp_path, monkeypatch):
    metrics_made = []

    class Kept(report_plots.Curves):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            metrics_made.append(self)

    monkeypatch.setattr(report_plots, "Curves", Kept)
    reporter = report_of(tmp_path, tensorboard=False, plots=False, clock=lambda: 1.0)
    for update in range(40):
        reporter.update(
            update_record(update)
            | {"learning_rate": 0.0018 * (1 - update / 40), "learning_rates": [0.0018 * (1 - update / 40)]}
        )
        if update % 10 == 9:
            rise = 1 - 0.5 ** (update / 8)
            metrics = {"AP": 0.8 * rise, "AP50": 0.97 * rise, "AP75": 0.94 * rise, "score": 0.8 * rise}
            reporter.evaluation(metrics, update=update + 1, epoch=update // 10 + 1, best=True)
    reporter.close({})
    assert draw_results(tmp_path) is not None
    (metric,) = metrics_made
    ticks = {id(text) for axes in metric.axes for text in (*axes.get_xticklabels(), *axes.get_yticklabels())}
    texts = [text for text in metric.findobj(Text) if text.get_text() and text.get_visible() and id(text) not in ticks]
    boxes = [(text.get_text(), text.get_window_extent()) for text in texts]
    assert {"learning rate", "evaluation"} <= {text for text, _ in boxes}
    pairs = itertools.combinations(boxes, 2)
    assert [(a, b) for (a, one), (b, other) in pairs if one.overlaps(other)] == []


def test_the_widest_labels_of_the_curves_stay_inside_the_image_and_off_the_other_plots(tmp_path):
    small = {"total": 2.8e-12, "boxes": 2.0e-12}
    with (tmp_path / "metrics.jsonl").open("w") as file:
        for update in range(20):
            losses = {name: value * (1 + update / 50) for name, value in small.items()}
            record = {
                "kind": "update",
                **update_record(update),
                "losses": losses,
                "samples_per_second": 123456.0 + update,
            }
            record |= {"learning_rate": 1.23e-5, "learning_rates": [1.23e-5], "data_wait_share": 0.99}
            file.write(json.dumps(record) + "\n")
    figure = report_plots.curves(tmp_path)
    figure.canvas.draw()
    plots = [axes.get_window_extent() for axes in figure.axes]
    for axes, own in zip(figure.axes, plots, strict=True):
        box = axes.get_tightbbox()
        assert min(box.x0, box.y0) >= 0
        assert box.x1 <= figure.bbox.x1
        assert box.y1 <= figure.bbox.y1
        assert not [other for other in plots if other.bounds != own.bounds and box.overlaps(other)]


def test_drawing_leaves_the_garbage_collector_as_it_was(tmp_path, monkeypatch):
    write_run(tmp_path, updates=5)
    seen = []
    monkeypatch.setattr(report_plots.Curves, "savefig", lambda *_, **__: seen.append(gc.isenabled()))
    assert gc.isenabled()
    draw_results(tmp_path)
    assert seen == [False]
    assert gc.isenabled()


def test_tensorboard_holds_the_same_curve(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    write_run(tmp_path, tensorboard=True)
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    points = events.Scalars("loss/total")
    assert [point.step for point in points] == list(range(40))
    assert points[20].value == pytest.approx(3 * math.exp(-1))
    assert [point.step for point in events.Scalars("metric/AP50")] == [10, 20, 30, 40]


def test_a_resumed_run_replaces_what_it_does_again(tmp_path):
    write_run(tmp_path, updates=25)
    reporter = report_of(tmp_path, tensorboard=False, plots=False, start_update=20)
    reporter.event("start", update=20)
    reporter.update(update_record(20) | {"gradient_norm": 99.0})
    reporter.close({})
    history = read_history(tmp_path / "metrics.jsonl")
    assert sorted(history.updates) == list(range(21))
    assert history.updates[20]["gradient_norm"] == 99.0
    assert sorted(history.evaluations) == [10, 20]
    assert history.end is None


def test_a_line_that_a_killed_writer_left_half_written_harms_no_other(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"kind": "start", "update": 0}\n{"kind": "upd')
    reporter = report_of(tmp_path, tensorboard=False, plots=False)
    reporter.update(update_record(0))
    reporter.close({})
    history = read_history(tmp_path / "metrics.jsonl")
    assert list(history.updates) == [0]


def test_the_tail_gives_each_whole_line_once(tmp_path):
    file = tmp_path / "metrics.jsonl"
    tail = Tail(file)
    assert tail.read() == []
    file.write_text('{"a": 1}\n{"a"')
    assert tail.read() == [{"a": 1}]
    with file.open("a") as grown:
        grown.write(': 2}\nno json\n[3]\n{"a": 4}\n')
    assert tail.read() == [{"a": 2}, {"a": 4}]
    assert tail.read() == []
    assert Tail(file).read() == []


def test_a_rank_without_files_and_reporters_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    silent = Report(None)
    silent.update(update_record(0))
    silent.evaluation(METRICS, update=1, epoch=1, best=True)
    silent.event("checkpoint", update=1)
    silent.close({})
    assert not list(tmp_path.iterdir())


def test_nothing_is_drawn_of_an_empty_run(tmp_path):
    assert draw_results(tmp_path) is None


def test_curves_are_drawn_without_evaluations_too(tmp_path):
    write_run(tmp_path, updates=5)
    assert draw_results(tmp_path) == tmp_path / "results.png"


def test_smoothing_keeps_a_constant_and_the_length():
    np.testing.assert_allclose(smooth_curve(np.full(101, 2.5)), 2.5)
    assert len(smooth_curve(np.arange(3.0))) == 3


def test_an_update_in_words_says_all_that_matters():
    line = update_line(update_record(12))
    for part in (
        "epoch 2/4",
        "update 13/40",
        "total 1.646  ",
        "rate 1.00e-02",
        "112 images/s",
        "waiting for data 3%",
    ):
        assert part in line
    assert line.endswith("1.00 GiB  14 s left")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, "112 images/s"),
        ({"unit": "samples"}, "112 samples/s"),
        ({"unit": "tokens", "tokens_per_second": 28774.4}, "28774 tokens/s"),
        ({"unit": 7}, "112 images/s"),
    ],
)
def test_speed_is_told_in_the_unit_of_the_task(fields: dict[str, object], words: str) -> None:
    assert words in update_line({**update_record(12), **fields})


def test_an_update_that_was_not_finite_can_be_shown():
    record = update_record(0) | {"losses": {"total": None}, "gradient_norm": None, "skipped_updates": True}
    assert "total -" in update_line(record)


def test_plain_lines_come_every_so_many_seconds_and_for_the_last_update():
    now = [0.0]
    stream = io.StringIO()
    display = Plain(stream, title="job", every_s=10, clock=lambda: now[0])
    for update in range(40):
        display.record(update_record(update) | {"kind": "update"})
        now[0] += 1
    display.record({"kind": "evaluation", "epoch": 4, "update": 40, "metrics": METRICS, "best": True})
    display.record({"kind": "warning", "message": "no boxes"})
    lines = stream.getvalue().splitlines()
    shown = [int(line.split("update ")[1].split("/")[0]) for line in lines if "/40" in line]
    assert shown == [1, 11, 21, 31, 40]
    assert lines[-2] == "epoch 4  update 40  evaluation: AP 0.3100  AP50 0.6200  best so far"
    assert lines[-1] == "warning: no boxes"


def test_on_a_terminal_a_note_takes_the_place_of_the_one_before_and_a_warning_does_not():
    stream = io.StringIO()
    stream.isatty = lambda: True  # type: ignore[method-assign]
    display = Notes(stream)
    for kind, message in (("note", "1 of 2"), ("note", "2 of 2"), ("warning", "careful")):
        display.record({"kind": kind, "message": message})
    display.close()
    assert stream.getvalue() == "\r\x1b[K1 of 2\r\x1b[K2 of 2\nwarning: careful\n"
    plain = io.StringIO()
    Notes(plain).record({"kind": "note", "message": "1 of 2"})
    assert plain.getvalue() == "1 of 2\n"


def test_quiet_shows_warnings_only():
    stream = io.StringIO()
    display = Quiet(stream)
    display.record(update_record(0) | {"kind": "update"})
    display.record({"kind": "warning", "message": "x"})
    display.tick()
    display.close()
    assert stream.getvalue() == "warning: x\n"


def test_a_pipe_gets_plain_lines_and_rich_can_be_asked_for():
    assert isinstance(make_display("auto", title="t", stream=io.StringIO()), Plain)
    assert isinstance(make_display("quiet", title="t", stream=io.StringIO()), Quiet)
    display = make_display("rich", title="t", stream=io.StringIO())
    assert isinstance(display, Rich)
    display.close()


def test_the_output_of_a_notebook_is_redrawn_in_place_and_escapes_what_users_named(monkeypatch):
    shown: dict[str, list[dict]] = {}
    monkeypatch.setattr(
        report_notebook, "display", lambda content, raw, display_id: shown.update({display_id: [content]})
    )
    monkeypatch.setattr(
        report_notebook, "update_display", lambda content, raw, display_id: shown[display_id].append(content)
    )
    now = [0.0]
    display = report_notebook.Notebook(title="<b>job", every_s=1, clock=lambda: now[0])
    for update in range(40):
        now[0] += 0.1
        display.record(update_record(update) | {"kind": "update"})
        display.tick()
    for epoch in range(12):
        metrics = {"AP<50>": 0.5, "score": 0.5}
        display.record({"kind": "evaluation", "epoch": epoch, "update": epoch, "metrics": metrics, "best": epoch == 1})
    for number in range(9):
        display.record({"kind": "warning", "message": f"gradient {number}"})
    display.close()
    display.close()
    (contents,) = shown.values()
    assert len(contents) == 1 + 3 + 1, "at the start, once a second, at the end"
    html, text = contents[-1]["text/html"], contents[-1]["text/plain"]
    assert "&lt;b&gt;job" in html
    assert "AP&lt;50&gt;" in html
    assert "<b>job<" not in html
    assert '<progress value="40" max="40"' in html
    assert html.count("<tr>") == 1 + report_notebook.MAX_ROWS
    assert html.count("best so far") == 1, "the best one stays, however old"
    assert "gradient 2" not in html
    assert "3 earlier messages" in html
    assert "update 40/40" in text
    assert "gradient 8" in text


def test_the_rich_display_shows_place_losses_and_one_row_per_evaluation():
    stream = io.StringIO()
    display = Rich(stream, title="digits", force=True)
    display.tick()
    display.record({"kind": "start", "update": 0, "model": "yolov5n"})
    for update in range(20):
        display.record(update_record(update) | {"kind": "update"})
        display.tick()
    for epoch in (1, 2):
        display.record({"kind": "evaluation", "epoch": epoch, "update": 10 * epoch, "metrics": METRICS, "best": True})
    display.tick()
    display.close()
    display.close()
    text = stream.getvalue()
    for part in (
        "digits",
        "epoch 2/4",
        "20/10"[:2],
        "1.16",
        "images/s",
        "10 s left",
        "AP50",
        "0.6200",
        "best so far",
    ):
        assert part in text
    assert text.count("AP50") == 1
    assert "\x1b[?25h" in text, "the cursor must be visible again"


@pytest.mark.parametrize(("seconds", "words"), [(4.4, "4 s"), (200, "3 min 20 s"), (7500, "2 h 05 min"), (None, "-")])
def test_durations_are_readable(seconds, words):
    assert duration(seconds) == words


def test_metrics_of_classes_get_no_column():
    assert list(wording.headline_metrics({"metrics": METRICS})) == ["AP", "AP50"]


def test_the_task_says_which_metrics_come_first():
    metrics = {"loss_of_sleep": 0.4, "accuracy": 0.9, "recall": 0.8, "accuracy/cat": 0.7}
    assert list(wording.headline_metrics({"metrics": metrics, "headline": ["recall", "accuracy"]})) == [
        "recall",
        "accuracy",
    ]


def test_metrics_by_class_get_a_line_each():
    metrics = {"AP": 0.5, "APs": -1.0, "AP/red cell": 0.25, "AP50/red cell": 0.75}
    assert wording.class_lines(metrics) == ["AP by class: red cell 0.25", "AP50 by class: red cell 0.75"]
    assert wording.class_lines({"accuracy": 0.9}) == []
