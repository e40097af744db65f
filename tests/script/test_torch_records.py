"""What a script's job records: the update that an evaluation belongs to, and means over the micro batches of an update."""

import json
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.util import tensor_util

import mtrain
from mtrain.commands import main
from mtrain.core.checkpoint import store
from mtrain.errors import ScriptError
from tests.script.runs import SCRIPTS, done, largest_difference, weights

sys.path.insert(0, str(SCRIPTS))
from points import Plain, accuracy


@pytest.fixture
def torch(monkeypatch, tmp_path):
    """torch, in an empty folder."""
    import torch

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["script.py"])
    return torch


def prepared(torch: Any, session: Any, **settings: Any) -> Any:
    return session.prepare(lambda: torch.nn.Linear(8, 2), optimizer=mtrain.SGD(learning_rate=0.1), **settings)


def loss_of(torch: Any, model: Any, batch: Any) -> Any:
    return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])


@pytest.mark.parametrize("accumulate", [1, 2])
def test_an_evaluation_is_recorded_after_the_updates_that_have_changed_the_weights(torch, accumulate):
    records: list[Mapping[str, Any]] = []
    with mtrain.session(reporters=[records.append]) as session:
        model, optimizer = prepared(torch, session, accumulate=accumulate)
        data = Plain(20, 1)
        session.evaluate(model, data, metric=accuracy)
        for batch in session.batches(Plain(24, 0), global_batch=8, updates=3):
            session.evaluate(model, data, metric=accuracy)
            optimizer.update(loss_of(torch, model, batch))
            session.evaluate(model, data, metric=accuracy)
        session.evaluate(model, data, metric=accuracy)
    found = [record["update"] for record in records if record["kind"] == "evaluation"]
    before_and_after = {1: [0, 1, 1, 2, 2, 3], 2: [0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3]}
    assert found == [0, *before_and_after[accumulate], 3]


def test_recorded_values_are_means_over_the_micro_batches_of_an_update(torch):
    records: list[Mapping[str, Any]] = []
    losses: list[float] = []
    with mtrain.session(reporters=[records.append]) as session:
        model, optimizer = prepared(torch, session, accumulate=2)
        for number, batch in enumerate(session.batches(Plain(24, 0), global_batch=8, updates=3)):
            loss = loss_of(torch, model, batch)
            losses.append(float(loss.detach()))
            optimizer.update(loss)
            session.log(number=number, square=torch.tensor(float(number**2)))
    updates = [record["losses"] for record in records if record["kind"] == "update"]
    assert [update["number"] for update in updates] == [0.5, 2.5, 4.5]
    assert [update["square"] for update in updates] == [0.5, 6.5, 20.5]
    means = [(losses[place] + losses[place + 1]) / 2 for place in (0, 2, 4)]
    assert [update["loss"] for update in updates] == pytest.approx(means, rel=1e-6)


def trained(torch, reporters=(), updates=6, **calls):
    """Train; ``calls``: maps ``u<number>`` to a function of the session that is called in the body of that update."""
    with mtrain.session(reporters=reporters) as session:
        model, optimizer = prepared(torch, session)
        for batch in session.batches(Plain(24, 0), global_batch=8, updates=updates):
            calls.get(f"u{session.progress.update}", lambda session: None)(session)
            optimizer.update(loss_of(torch, model, batch))
        calls.get("end", lambda session: None)(session)
        return session.run_dir, model.weight.detach().clone()


@pytest.mark.job
def test_a_checkpoint_that_is_kept_by_name_outlives_the_rotation_and_is_resumed(torch, tmp_path, capsys):
    script = str(SCRIPTS / "train_named.py")
    done(tmp_path, "--name", "whole", "-b", "ddp", "--nproc-per-node", "2", "-o", "checkpoint.keep_last=1", script)
    folder = tmp_path / "runs/whole/checkpoints"
    assert sorted(path.name for path in folder.iterdir()) == ["step-00000012", "the.end", "warm"]
    assert store.load(folder / "warm").progress.update == 3
    assert store.load(folder / "the.end").progress.update == 12
    expected = weights(tmp_path, "whole")
    done(tmp_path, "--resume", "runs/whole/checkpoints/warm", "-b", "solo", "-o", "cluster.shards=2", script)
    lines = [json.loads(line) for line in (tmp_path / "runs/whole/metrics.jsonl").read_text().splitlines()]
    assert [line["update"] for line in lines if line["kind"] == "start"] == [0, 3]
    assert largest_difference(weights(tmp_path, "whole"), expected) <= 1e-12
    assert main(["weights", "export", str(folder / "warm"), "--to", str(tmp_path / "warm.safetensors")]) == 0
    assert main(["checkpoint", "show", str(folder / "warm")]) == 0
    capsys.readouterr()
    assert main(["checkpoint", "list", str(tmp_path / "runs/whole")]) == 0
    listed = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert [name for name in listed if name in ("warm", "the.end")] == ["the.end", "warm"]


@pytest.mark.parametrize("name", ["", "step-1", "a/b", ".hidden", 3, ".."])
def test_a_checkpoint_under_a_name_that_is_none_is_refused(torch, name):
    with pytest.raises(ScriptError, match="expected a name of letters"):
        trained(torch, u1=lambda session: session.save(name))


def pictures_of(torch) -> Mapping[str, Any]:
    figure = Figure(figsize=(2, 1))
    figure.subplots().plot([1, 2])
    grey = np.linspace(0, 1, 48).reshape(6, 8)
    return {
        "grey": grey,
        "one/channel": torch.tensor(grey)[None],
        "colour": np.full((6, 8, 3), 200, np.uint8),
        "torch": torch.rand(3, 5, 8, dtype=torch.bfloat16),
        "alpha": np.zeros((6, 8, 4), np.uint8),
        "pillow": Image.new("RGB", (8, 6)),
        "figure": figure,
    }


def pixels_of(file) -> np.ndarray:
    with Image.open(file) as image:
        return np.asarray(image)


def test_pictures_and_histograms_reach_the_records_the_run_folder_and_tensorboard(torch):
    records: list[Mapping[str, Any]] = []
    pictures = pictures_of(torch)

    def show(session):
        for name, picture in pictures.items():
            (session.figure if name == "figure" else session.image)(name, picture)
        session.histogram("weights", torch.tensor([[0.0, 1.0], [1.0, float("nan")]]), bins=2)

    run, _ = trained(torch, [records.append], u2=show)
    shown = {record["name"]: record for record in records if record["kind"] == "image"}
    assert list(shown) == list(pictures)
    assert all(record["update"] == 2 for record in shown.values())
    pixels = {name: pixels_of(run / record["file"]) for name, record in shown.items()}
    sizes = {name: (array.shape[1], array.shape[0]) for name, array in pixels.items()}
    assert sizes == {
        **dict.fromkeys(("grey", "one/channel", "colour", "alpha", "pillow"), (8, 6)), "torch": (8, 5), "figure": (200, 100),
    }  # fmt: skip
    assert np.array_equal(pixels["grey"], pixels["one/channel"])
    (histogram,) = (record for record in records if record["kind"] == "histogram")
    assert (histogram["counts"], histogram["edges"]) == ([1, 2], [0.0, 0.5, 1.0])
    read = EventAccumulator(str(run / "tensorboard"), size_guidance={"images": 0, "tensors": 0}).Reload()
    assert set(pictures) <= set(read.Tags()["images"])
    assert tensor_util.make_ndarray(read.Tensors("weights")[0].tensor_proto).tolist() == [[0, 0.5, 1], [0.5, 1, 2]]


WRONG = {
    "a list": lambda session: session.image("x", [1, 2]),
    "two channels": lambda session: session.image("x", np.zeros((6, 8, 2))),
    "large numbers": lambda session: session.image("x", np.full((3, 4), 300)),
    "a name out of the folder": lambda session: session.image("../x", np.zeros((3, 4))),
    "no numbers": lambda session: session.histogram("x", np.array([np.nan])),
    "no ranges": lambda session: session.histogram("x", np.ones(3), bins=0),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_no_picture_and_no_histogram_is_refused(torch, name):
    with pytest.raises(ScriptError, match=r"session\.(image|histogram)\('[./x]+'\).*expected"):
        trained(torch, u1=WRONG[name])


def test_pictures_change_nothing(torch):
    _, plain = trained(torch)
    _, shown = trained(torch, u1=lambda session: session.image("noise", torch.rand(3, 4)))
    assert torch.equal(plain, shown)
