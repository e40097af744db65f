"""The reporters for MLflow, Weights & Biases and VisualDL: what their own libraries read back, and services that are down."""

import importlib.util
import json
import os
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from mtrain.core.interfaces.reporter import ReportedRun
from mtrain.errors import PluginError
from mtrain.spec import plugins
from mtrain_ui.trackers.background import Background
from mtrain_ui.trackers.visualdl import _precedes

HERE = Path(__file__).parents[2]
KEY = "0123456789" * 4


def needs(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")


def job(name: str, folder: Path, *words: str, options: dict | None = None, **variables: str) -> dict:
    """Run one job in a process of its own; return what the reporter said."""
    line = [sys.executable, "-m", "tests.trackers.tracked", name, json.dumps(options or {}), str(folder), *words]
    environ = {key: value for key, value in os.environ.items() if not key.startswith(("WANDB_", "MLFLOW_"))}
    environ |= {"OMP_NUM_THREADS": "1", **variables}
    ended = subprocess.run(line, cwd=HERE, env=environ, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr
    return dict(json.loads(ended.stdout.splitlines()[-1]))


# -------------------------------------------------------------------------------------------------------------- mlflow
@pytest.mark.job
def test_a_resumed_job_goes_on_in_the_same_run_of_a_real_store(tmp_path):
    needs("mlflow")
    options = {"tracking_uri": (tmp_path / "store").as_uri(), "checkpoints": True}
    for words in (("0", "7", "failed"), ("5", "10", "done")):
        told = job("mlflow", tmp_path, *words, options=options, MLFLOW_ALLOW_FILE_STORE="true")
        assert (told["trouble"], told["error"]) == ("", "")
    runs = [file.parent for file in (tmp_path / "store").glob("*/*/meta.yaml") if file.parent.parent.name != "models"]
    assert [folder.name for folder in runs] == [json.loads((tmp_path / "mlflow.json").read_text())["run_id"]]
    (run,) = runs
    assert (run / "params" / "train.epochs").read_text() == "3"
    assert (run / "params" / "data.options.._a.py_B").read_text() == "true"
    names = [path.name for path in (run / "params").iterdir()]
    assert [name for name in names if name.startswith("report")] == [], (
        "where the tracking server is, is not told to it"
    )
    steps = [int(line.split()[2]) for line in (run / "metrics" / "loss" / "total").read_text().splitlines()]
    assert steps == [*range(7), *range(5, 10)]
    assert [line.split()[1:] for line in (run / "metrics" / "metric" / "AP_50").read_text().splitlines()] == [
        ["0.5", "7"],
        ["0.5", "10"],
    ]
    # The metric of one class, beside that of all.
    assert [line.split()[1] for line in (run / "metrics" / "metric" / "AP_50.cat").read_text().splitlines()] == [
        "0.25"
    ] * 2
    assert not (run / "metrics" / "gradient_norm").exists()
    assert (run / "tags" / "mtrain.error").read_text() == "ValueError: x"
    assert "status: 3" in (run / "meta.yaml").read_text(), "finished, after it had failed"
    kept = sorted(path.parent.name for path in run.glob("artifacts/checkpoints/*/weights.bin"))
    assert kept == ["step-00000007", "step-00000010"]
    images = [path.name for path in run.glob("artifacts/images/*") if path.suffix == ".png"]
    assert sorted(name.rpartition("+timestamp")[0] for name in images) == ["val_batch+step+10", "val_batch+step+7"]


# --------------------------------------------------------------------------------------------------------------- wandb
def messages(content: bytes) -> Iterator[bytes]:
    """Yield the messages of a W&B file: LevelDB's log format, in blocks of 32 KiB, after seven bytes of its own."""
    place, parts = 7, b""
    assert content[:4] == b":W&B"
    while place + 7 <= len(content):
        left = 32768 - place % 32768
        if left < 7:
            place += left
            continue
        _, length, kind = struct.unpack_from("<IHB", content, place)
        if kind == 0:  # the rest of the block is empty
            place += left
            continue
        parts += content[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # a whole message, or the last part of one
            yield parts
            parts = b""


def wandb_records(folder: Path) -> list[tuple[str, list]]:
    """Return (run id, records) of each offline file, the oldest first, in the form that ``wandb sync`` sends."""
    from wandb.proto import wandb_internal_pb2

    files = sorted(folder.glob("wandb/offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime)
    return [
        (file.stem.removeprefix("run-"), [*map(wandb_internal_pb2.Record.FromString, messages(file.read_bytes()))])
        for file in files
    ]


def logged(records: list, name: str) -> list[tuple[int, object]]:
    rows = [
        {item.key or ".".join(item.nested_key): item.value_json for item in record.history.item}
        for record in records
        if record.HasField("history")
    ]
    return [(json.loads(row["update"]), json.loads(row[name])) for row in rows if name in row]


@pytest.mark.job
def test_wandb_keeps_a_run_offline_and_a_resumed_job_goes_on_with_its_id(tmp_path):
    needs("wandb")
    options = {"mode": "offline", "checkpoints": True}
    for words in (("0", "7", "failed"), ("5", "10", "done")):
        told = job("wandb", tmp_path, *words, options=options)
        assert (told["trouble"], told["error"]) == ("", "")
    files = wandb_records(tmp_path)
    run_id = json.loads((tmp_path / "wandb.json").read_text())["id"]
    assert [name for name, _ in files] == [run_id, run_id]
    first, second = (records for _, records in files)
    assert [update for update, _ in logged(first, "loss/total")] == list(range(7))
    assert [update for update, _ in logged(second, "loss/total")] == list(range(5, 10))
    assert logged(second, "metric/AP@50") == [(10, 0.5)]
    assert logged(second, "metric/AP@50/cat") == [(10, 0.25)]
    assert logged(first, "gradient_norm") == []
    (run,) = [record.run for record in first if record.HasField("run")][:1]
    assert {item.key: item.value_json for item in run.config.update}["train.epochs"] == '"3"'
    ((update, image),) = logged(second, "val_batch.path")
    assert update == 10
    assert list(tmp_path.glob(f"wandb/*/files/{image}"))
    artefacts = [record.artifact for record in second if record.HasField("artifact")]
    assert {(item.type, "step-00000010" in item.aliases) for item in artefacts} == {("model", True)}
    assert [record.exit.exit_code for _, file in files for record in file if record.HasField("exit")] == [1, 0]


# ------------------------------------------------------------------------------------------------------------ visualdl
@pytest.mark.parametrize(
    ("tag", "update", "kept"),
    [
        ("loss/total", 4, True), ("loss/total", 5, False), ("learning_rate", 6, False),
        ("metric/AP", 5, True), ("metric/AP", 6, False), ("hparam", 9, True), ("meta_data_tag", 9, True),
    ],
)  # fmt: skip
def test_a_job_resumed_after_five_updates_keeps_their_values_and_the_evaluation_after_them(tag, update, kept):
    """Updates are numbered from 0, evaluations by the updates before them."""
    assert _precedes(SimpleNamespace(tag=tag, id=update), 5) is kept


@pytest.mark.job
def test_visualdl_reads_the_curves_of_a_resumed_job_once_and_its_images(tmp_path):
    needs("visualdl")
    job("visualdl", tmp_path, "0", "7", "failed")
    file = tmp_path / "visualdl" / "vdlrecords.mtrain.log"
    with file.open("ab") as written:
        written.write(b"\x40\0\0\0\0\0\0\0half")  # as a killed writer leaves it
    told = job("visualdl", tmp_path, "5", "10", "done")
    assert (told["trouble"], told["error"]) == ("", "")
    from visualdl import LogReader

    reader = LogReader(file_path=str(file))
    assert [point.id for point in reader.get_data("scalar", "loss/total")] == list(range(10))
    assert [(point.id, point.value) for point in reader.get_data("scalar", "metric/AP@50")] == [(10, 0.5)]
    assert [point.value for point in reader.get_data("scalar", "metric/AP@50/cat")] == [0.25]
    assert [image.id for image in reader.get_data("image", "evaluation/val_batch")] == [10]
    (parameters,) = reader.get_data("hyper_parameters", "hparam")
    values = {item.name: item.string_value for item in parameters.hparam.hparamInfos}
    assert values["train.epochs"] == "3"


# ----------------------------------------------------------------------------------------------- a service that is down
@pytest.fixture
def silent_address():
    """The address of a server that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.job
@pytest.mark.parametrize(
    ("name", "is_silent"),
    [
        ("mlflow", False),
        pytest.param("wandb", False, marks=pytest.mark.slow),
        pytest.param("mlflow", True, marks=pytest.mark.slow),
    ],
)
def test_a_service_that_is_down_neither_blocks_nor_fails_a_job(name, is_silent, tmp_path, silent_address):
    """Each of 500 records would wait for seconds where the service is silent: far longer than ``job`` lets a process run."""
    needs(name)
    address = silent_address if is_silent else "http://127.0.0.1:9"
    own = {"tracking_uri": address} if name == "mlflow" else {"mode": "online"}
    variables = {"WANDB_BASE_URL": address, "WANDB_API_KEY": KEY}
    told = job(name, tmp_path, "0", "500", "done", options={**own, "end_wait_s": 2.0}, **variables)
    assert "of its transfers were not done 2 s after the end (end_wait_s)" in told["error"]


def test_a_call_that_fails_is_tried_again_and_told_once():
    calls: list[str] = []

    def call() -> None:
        calls.append("call")
        if len(calls) < 4:
            raise ConnectionError("no route")

    background = Background(lambda: None, is_down=lambda error: isinstance(error, OSError), first_pause_s=0.01)
    background.add(call)
    background.add(lambda: calls.append("after"))
    assert background.close(timeout_s=20) == 0
    assert calls == ["call"] * 4 + ["after"]
    sentence = background.take_sentence()
    assert (
        sentence == "the service does not answer, and is tried again while the job goes on: ConnectionError: no route"
    )
    assert background.take_sentence() == ""


def test_what_a_service_refuses_is_dropped_and_a_refused_opening_ends_all():
    done = threading.Event()
    background = Background(lambda: None, is_down=lambda error: False)
    background.add(lambda: int("x"))
    background.add(done.set)
    assert background.close(timeout_s=20) == 0
    assert done.is_set()
    assert "the service refuses some of the records: ValueError" in background.take_sentence()
    refused = Background(lambda: int("x"), is_down=lambda error: False)
    refused.close(timeout_s=20)
    assert isinstance(refused.refused, ValueError)


def test_a_tracker_that_lacks_a_package_of_its_store_is_named_with_its_extra(tmp_path, monkeypatch):
    """MLflow imports what a store needs when its client is made."""

    def make_client(tracking_uri: str | None) -> None:
        raise ModuleNotFoundError("No module named 'sqlalchemy'", name="sqlalchemy")

    monkeypatch.setitem(sys.modules, "mlflow", SimpleNamespace(MlflowClient=make_client))
    target = plugins.load("reporters", "mlflow")
    run = ReportedRun(folder=tmp_path, rank=0, size=1, start_update=0, spec={})
    with pytest.raises(
        PluginError, match=r"mlflow: the package sqlalchemy is not installed; install it with: .*\[mlflow\]"
    ):
        target(target.Options(), run)


@pytest.mark.parametrize("name", ["mlflow", "wandb", "visualdl"])
def test_a_tracker_that_is_not_installed_is_named_with_its_extra(name, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, name, None)
    target = plugins.load("reporters", name)
    run = ReportedRun(folder=tmp_path, rank=0, size=1, start_update=0, spec={})
    with pytest.raises(PluginError, match=rf"{name} is not installed; install it with: .*\[{name}\]"):
        target(target.Options(), run)
