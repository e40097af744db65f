"""``report.html``: what it shows, that names of strangers cannot become markup, and that damaged folders do no harm."""

import json
import os
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from tests.pages.folders import end, evaluation, image, start, update, write_run

import mtrain
from mtrain.commands import main
from mtrain.core.interfaces.details import Chart, Matrix, Series
from mtrain.errors import UsageError
from mtrain.records.choosing import write_page
from mtrain.spec.registry import Registry
from mtrain.tasks.confusion import MAX_CLASSES, confusion
from mtrain.tasks.detection.details import confusion_counts, details_of
from mtrain.tasks.detection.scoring import Scored, score
from mtrain_ui.pages.content import collect, read_details
from mtrain_ui.pages.disclosed import disclose
from mtrain_ui.pages.folder import RunFiles
from mtrain_ui.pages.report import page, write
from mtrain_ui.pages.timeline import Follower
from tests.data_readers.results_files import Listed

ATTACK = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>"


class Tags(HTMLParser):
    """Counts the tags of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.seen: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.seen.append(tag)
        self.attributes += attrs


def details(*parts) -> dict:
    return {"update": 60, "epoch": 0, "details": [part.model_dump(mode="json") for part in parts]}


def test_the_report_shows_everything_that_the_run_kept(tmp_path):
    counts = np.array([[7, 1], [2, 5]])
    chart = Chart(
        title="PR",
        x_title="recall",
        x_range=(0, 1),
        y_range=(0, 1),
        series=[Series(label="cat", x=[0, 1], y=[1, None])],
    )
    environment = {"host": "abc", "versions": {"numpy": "9.9"}, "argv": ["mtrain", "-c", "x.yml"]}
    kept = details(chart, confusion("Confusion", ["cat", "dog"], counts, unit="images"))
    run = write_run(tmp_path / "mine", details=kept, environment=environment, summary={"remarks": ["a remark"]})
    image(run / "val_batch.jpg", 3000, 900)
    image(run / "inputs.jpg")
    assert main(["report", str(run)]) == 0
    text = (run / "report.html").read_text()
    expected = (
        "mine", "finished", "ddp", "60 of 60", "1 min 00 s", "learning rate", "accuracy", "cat", "PR", "Confusion", "a remark",
        "25.0 % of the time", "epochs: 1", "mtrain -c x.yml", "9.9", "Predictions", "Inputs", "1, 2 s together", "10",
    )  # fmt: skip
    assert [word for word in expected if word not in text] == []
    assert "abc" not in text, "the host is nobody's business"
    tags = Tags(text)
    assert tags.seen.count("svg") == 7
    assert tags.seen.count("img") == 2
    loaded = [value for name, value in tags.attributes if name in ("src", "href") and not str(value).startswith("#")]
    assert all(str(value).startswith("data:image/jpeg;base64,") for value in loaded), "nothing comes from elsewhere"
    assert "script" not in tags.seen
    assert len(text) < 1_000_000


def test_the_newest_copy_of_a_checkpoint_is_a_fact_of_the_run(tmp_path):
    copies = [{"kind": "copy", "name": f"step-0{n}", "to": f"s3://b/{ATTACK}", "time": 1_700_000_000} for n in "12"]
    text = page(RunFiles(write_run(tmp_path / "mine", [start(), update(0), *copies, end()])))
    assert "newest copy" in text
    assert "step-02 at s3://***" in text
    assert "<script>alert" not in text
    assert "step-01" not in text
    assert "newest copy" not in page(RunFiles(write_run(tmp_path / "other")))


def test_names_of_strangers_stay_text(tmp_path):
    metrics = {"score": 1.0, ATTACK: 0.5, f"accuracy/{ATTACK}": 0.5}
    lines = [
        start(model=ATTACK, device=ATTACK, resumed_from=ATTACK, classes=[ATTACK]),
        update(0, losses={"total": 1.0, ATTACK: 2.0}, unit=ATTACK),
        evaluation(1, 1.0, metrics=metrics, headline=[ATTACK]),
        {"kind": "warning", "message": ATTACK, "time": 1},
        end("failed"),
    ]
    chart = Chart(
        title=ATTACK,
        note=ATTACK,
        x_title=ATTACK,
        x_range=(0, 1),
        y_range=(0, 1),
        series=[Series(label=ATTACK, x=[0], y=[1])],
    )
    matrix = confusion(ATTACK, [ATTACK, "b"], np.eye(2, dtype=int), unit=ATTACK)
    environment = {"host": ATTACK, "versions": {ATTACK: ATTACK}, "argv": [ATTACK]}
    run = write_run(
        tmp_path / "x", lines, details=details(chart, matrix), environment=environment, summary={"remarks": [ATTACK]}
    )
    (run / "spec.yml").write_text(ATTACK)
    (run / "failures").mkdir()
    (run / "failures/rank-0.json").write_text(
        json.dumps({"error": ATTACK, "host": ATTACK, "rank": ATTACK, "traceback": ATTACK})
    )
    tags = Tags(page(RunFiles(run)))
    assert {"script", "img"} & set(tags.seen) == set()
    assert [name for name, _ in tags.attributes if name.startswith("on")] == []
    assert "failed" in page(RunFiles(run))


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b'{"kind": "upda',
        b'{"kind": "update", "update": NaN, "losses": {"total": Infinity}}\n',
        b'{"kind": "update", "update": 1, "losses": [3], "learning_rates": 7, "learning_rate": "x", "gradient_norm": true}\n',
        b'{"kind": "update", "update": 1' + b"0" * 400 + b', "losses": {"total": 1' + b"0" * 400 + b"}}\n",
        b'{"kind": "start", "update": "x", "time": "y", "classes": 3, "total_updates": [1]}\n',
        b'{"kind": "evaluation", "update": 3, "metrics": {"score": null}, "headline": {"a": 1}}\n{"kind": "end"}\n',
        b'{"kind": "start", "time": 1e300}\n{"kind": "end", "time": -5, "reason": {"a": 1}, "seconds": NaN}\n',
        b'[1]\n3\nnull\n"x"\n' + b"[" * 5000 + b"\n\xff\xfe\x00\n",
    ],
)
def test_damaged_records_leave_their_part_out(tmp_path, content):
    run = write_run(tmp_path / "broken")
    (run / "metrics.jsonl").write_bytes(content)
    for name in ("summary.json", "details.json", "environment.json", "plan.json", "val_batch.jpg", "inputs.jpg"):
        (run / name).write_bytes(content or b"{")
    (run / "failures").mkdir()
    (run / "failures/rank-0.json").write_bytes(content)
    text = page(RunFiles(run))
    assert "broken" in text
    assert "epochs: 1" in text


def test_a_report_is_bounded_whatever_the_run_holds(tmp_path):
    names = [f"class {i} {'x' * 3000}" for i in range(600)]
    metrics = {"score": 0.5, **{f"AP/{name}": 0.5 for name in names}}
    lines = [
        start(),
        *(update(i, losses={f"l{k}": 1.0 + i % 7 for k in range(20)}) for i in range(2000)),
        evaluation(9, 0.5, metrics=metrics),
    ]
    lines += [{"kind": "warning", "message": "y" * 10**5}] * 60
    series = [Series(label=name, x=list(range(2000)), y=[0.5] * 2000) for name in names[:40]]
    charts = [Chart(title="t" * 10**4, x_title="x", x_range=(0, 1), y_range=(0, 1), series=series[:4])] * 40
    run = write_run(tmp_path / "big", lines, details=details(*charts))
    (run / "spec.yml").write_text("a: 1\n" * 10**6)
    image(run / "val_batch.jpg", 4000, 4000)
    assert len(page(RunFiles(run))) < 5_000_000


def test_links_that_leave_the_run_are_not_followed(tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("the secret")
    run = write_run(tmp_path / "run")
    (run / "spec.yml").unlink()
    (run / "spec.yml").symlink_to(secret)
    os.mkfifo(run / "summary.json")  # opening one waits for a writer for ever
    assert "the secret" not in page(RunFiles(run))


def test_what_is_no_run_is_refused(tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    run = write_run(tmp_path / "run")
    wrong = {
        ("missing",): "no such folder", ("empty",): "has no metrics.jsonl", ("file",): "is a file",
        ("run", "-o", str(tmp_path)): "is a folder", ("run", "-o", str(tmp_path / "no/x.html")): "cannot be written",
    }  # fmt: skip
    for (name, *options), reason in wrong.items():
        assert main(["report", str(tmp_path / name), *options]) == 2
        assert reason in capsys.readouterr().err
    assert main(["report", str(run), "-o", str(tmp_path / "else.html")]) == 0
    assert (tmp_path / "else.html").is_file()
    assert not (run / "report.html").exists()


def test_a_report_that_fails_is_one_warning_of_the_job(tmp_path):
    run, warnings = write_run(tmp_path / "run"), []
    assert write_page(Registry.read(), run, code=0, warn=warnings.append) == run / "report.html"
    (run / "report.html").unlink()
    (run / "report.html").mkdir()
    assert write_page(Registry.read(), run, code=0, warn=warnings.append) is None
    assert len(warnings) == 1
    assert "could not be written" in warnings[0]


@pytest.mark.parametrize("code", [130, 143, 2])
def test_a_job_that_was_asked_to_end_gets_no_report(tmp_path, code):
    run = write_run(tmp_path / "run")
    assert write_page(Registry.read(), run, code=code, warn=pytest.fail) is None
    assert not (run / "report.html").exists()


def test_each_attempt_is_listed_with_its_end(tmp_path):
    lines = [start(), update(0), update(1), {**end("failed"), "time": start()["time"] + 5}]
    lines += [
        start(time=start()["time"] + 9, update=1, resumed_from="/a/b/step-1"),
        update(1),
        {**end(), "time": start()["time"] + 60},
    ]
    text = page(RunFiles(write_run(tmp_path / "run", lines)))
    rows = re.findall(r"<tr>((?:<td>[^<]*</td>){5})</tr>", text)
    cells = [re.findall(r"<td>([^<]*)</td>", row) for row in rows]
    assert [(row[0], row[2], row[3], row[4]) for row in cells] == [
        ("1", "0", "", "failed"),
        ("2", "1", "step-1", "done"),
    ]


# ------------------------------------------------------------------------------------------------------------- details
def scored(predictions, *, crowd=False) -> Scored:
    """Two images, each with an object of class a at the left and one of class b at the right."""
    categories = [{"id": 5, "name": "a"}, {"id": 3, "name": "b"}]
    truth = {
        "images": [{"id": i, "width": 100, "height": 50, "file_name": str(i)} for i in (10, 20)],
        "annotations": [
            {
                "id": n,
                "image_id": i,
                "category_id": c,
                "bbox": [x, 0, 40, 40],
                "area": 1600,
                "iscrowd": int(crowd and c == 3),
            }
            for n, (i, c, x) in enumerate([(10, 5, 0), (10, 3, 50), (20, 5, 0), (20, 3, 50)])
        ],
        "categories": categories,
    }
    entries = [{"image_id": i, "category_id": c, "bbox": [x, 0, 40, 40], "score": s} for i, c, x, s in predictions]
    found = score(truth, Listed(entries=entries))[1]
    assert found is not None
    return found


def test_the_confusion_matrix_of_detection_counts_hits_confusions_misses_and_inventions():
    predictions = [
        (10, 5, 0, 0.9),  # a found
        (10, 5, 50, 0.8),  # b taken for a
        (20, 5, 0, 0.9),  # a found
        (20, 3, 20, 0.9),  # nothing there: IoU below 0.5 with both
        (20, 3, 50, 0.1),  # score too low: b of the second image is missed
    ]
    assert confusion_counts(scored(predictions), max_detections=100).tolist() == [[2, 0, 0], [1, 0, 1], [0, 1, 0]]


def test_crowds_are_neither_found_nor_missed():
    counts = confusion_counts(scored([(10, 5, 0, 0.9), (10, 3, 50, 0.9)], crowd=True), max_detections=100)
    assert counts.tolist() == [[1, 0, 1], [0, 0, 0], [0, 0, 0]]


def test_precision_curves_follow_the_order_of_the_classes():
    overall, by_class, matrix = details_of(scored([(10, 5, 0, 0.9), (20, 5, 0, 0.8)]), max_detections=100)
    curves = {series.label: series.y for series in by_class.series}
    assert set(curves["a"]) == {1.0}
    assert set(curves["b"]) == {0.0}
    assert set(overall.series[0].y) == {0.5}
    assert matrix.rows == ["a", "b", "nothing"]


def test_of_many_classes_the_frequent_ones_keep_their_row():
    counts = np.diag(np.arange(100)) + np.eye(100, k=1, dtype=int)
    matrix = confusion("x", [str(i) for i in range(100)], counts, unit="images")
    assert matrix.rows == [*(str(i) for i in range(100 - MAX_CLASSES, 100)), f"{100 - MAX_CLASSES} other classes"]
    assert sum(map(sum, matrix.counts)) == counts.sum()
    assert matrix.counts[-1][-1] == counts[:60, :60].sum()


def test_details_whose_lengths_differ_are_refused():
    matrix = Matrix(title="x", rows_title="t", columns_title="p", rows=["a"], columns=["a", "b"], counts=[[1]])
    with pytest.raises(ValueError, match="do not fit"):
        read_details([matrix.model_dump()])


def test_python_writes_the_same_report(tmp_path):
    run = write_run(tmp_path / "run")
    assert mtrain.write_report(run, out=tmp_path / "a.html") == tmp_path / "a.html"
    with pytest.raises(UsageError, match="no such folder"):
        write(Path("nowhere"))


def test_a_report_names_no_host_no_person_no_path_and_no_password(tmp_path):
    private = ("hunter2", "bob", "gpu-node-7", "10.9.8.7", "id_rsa", "/srv/acme", "/home/")
    spec = {
        "train": {"epochs": 7},
        "data": {"root": "/srv/acme/cells"},
        "cluster": {
            "ips": ["10.9.8.7", "gpu-node-7"],
            "ssh": {"user": "bob", "identity_file": "/home/bob/.ssh/id_rsa"},
        },
        "report": {"reporters": {"mlflow": {"tracking_uri": "http://bob:hunter2@gpu-node-7:5000"}}},
    }
    note = {"kind": "note", "time": 1_700_000_000, "message": "gpu-node-7 reads /srv/acme/cells/a.jpg"}
    argv = ["/home/bob/venv/bin/mtrain", "--ips", "10.9.8.7,gpu-node-7", "-o", "data.root=/srv/acme/cells"]
    argv += ["cluster.options.user=bob", "report.reporters.mlflow.tracking_uri=http://bob:hunter2@gpu-node-7:5000"]
    run = write_run(
        tmp_path / "mine",
        [start(), update(0), note, end("failed")],
        spec=spec,
        environment={"host": "gpu-node-7", "argv": argv, "cores": 8},
        plan={"commands": [{"host": "10.9.8.7"}]},
        summary={"remarks": ["see /srv/acme/notes.txt"]},
    )
    (run / "failures").mkdir()
    traceback = 'File "/home/bob/nets.py", line 3, in forward'
    failure = {"rank": 1, "host": "gpu-node-7", "error": "bob@10.9.8.7 hung up", "traceback": traceback, "time": 1}
    (run / "failures/rank-1.json").write_text(json.dumps(failure))
    text = page(RunFiles(run))
    assert [word for word in private if word in text] == []
    files = RunFiles(run)
    shown = disclose(collect(files, Follower(files).refresh()), files)
    assert [name for name, _ in (*shown.facts, *shown.environment) if "host" in name] == [], (
        "not even how many there were"
    )
    for kept in ("epochs: 7", "root: cells", "mtrain --ips", "nets.py", "line 3, in forward", "hung up", "a.jpg"):
        assert kept in text, kept


@pytest.mark.parametrize(
    "place",
    [
        {"plan": {"commands": [{"host": "10.9.8.7"}, {"host": "gpu-b.acme.example"}]}},
        {"plan": {"commands": [{"argv": []}, 3, {"host": "gpu-b.acme.example"}]}},
        {"environment": {"host": "gpu-b.acme.example"}},
        {"spec": {"cluster": {"ips": ["gpu-a", "gpu-b.acme.example"]}}},
        {"spec": {"cluster": {"master_addr": "gpu-b.acme.example"}}},
        {"spec": {"report": {"reporters": {"mlflow": {"tracking_uri": "gpu-b.acme.example"}}}}},
    ],
    ids=["second of the plan", "odd plan", "environment", "second of the hosts", "master", "tracker"],
)
def test_a_host_that_one_file_alone_names_is_masked(tmp_path, place):
    note = {"kind": "note", "time": 1_700_000_000, "message": "lost gpu-b.acme.example, a.jpg is kept"}
    write_run(tmp_path / "mine", [start(), update(0), note, end("done")], **place)
    text = page(RunFiles(tmp_path / "mine"))
    assert "gpu-b" not in text
    assert "acme" not in text
    assert "lost ***, a.jpg is kept" in text
