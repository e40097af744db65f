"""Which entries of a file go into a model, which do not, and the reported reason."""

import json

import numpy as np
import pytest

from mtrain.core.interfaces import Published
from mtrain.errors import CheckpointError
from mtrain.spec import plugins
from mtrain.weights.matching import Match, entry_types, match
from mtrain.weights.models import expect, fit
from mtrain.weights.names import export, neutral_names
from mtrain.weights.outline import Question, outlines
from mtrain.weights.reading import Weights, read
from mtrain.weights.writing import write
from tests.weights import golden

YOLOV5 = plugins.load("models", "yolov5n").published
PPYOLOE = plugins.load("models", "ppyoloe_s").published


def weights(arrays, layout="torch", path=golden.DATA / "file.pt"):
    return Weights(path=path, arrays=arrays, layout=layout, description="a test")


@pytest.mark.parametrize("variant", ["n", "s", "m", "l", "x"])
def test_the_outline_of_yolov5_is_the_published_state(variant):
    facts = json.loads((golden.DATA / "golden_yolov5" / "facts.json").read_text())[f"yolov5{variant}"]
    found = outlines([Question(model=f"yolov5{variant}", classes=80)])[0]
    published = [(name, tuple(shape), dtype) for name, shape, dtype in facts["nc80"]["state_dict"]]
    assert [(name, entry.shape, entry.dtype) for name, entry in found.items()] == published


@pytest.mark.parametrize("size", ["s", "m", "l", "x"])
def test_the_outline_of_ppyoloe_is_the_published_state_under_neutral_names(size):
    facts = json.loads((golden.DATA / "golden_ppyoloe" / "state_dicts" / f"ppyoloe_crn_{size}_nc80.json").read_text())
    found = outlines([Question(model=f"ppyoloe_{size}", classes=80)])[0]
    names = neutral_names({name: np.zeros(shape) for name, shape, *_ in facts["entries"]})
    counters = {name for name in found if name.endswith("num_batches_tracked")}
    assert {name: entry.shape for name, entry in found.items() if name not in counters} == {
        name: array.shape for name, array in names.items()
    }
    assert len(counters) == sum(name.endswith("._mean") for name, *_ in facts["entries"])


def test_an_unknown_model_has_no_outline():
    assert outlines([Question(model="none"), Question(model="yolov5n")])[0] is None


@pytest.mark.parametrize(("model", "classes"), [("yolov5n", 80), ("yolov5n", 3)])
def test_the_number_of_classes_is_read_off_the_shapes(model, classes):
    wanted = expect(weights(golden.yolov5("n", classes=classes)), model)
    assert wanted.classes == classes
    assert fit(weights(golden.yolov5("n", classes=classes)), wanted).left_over == []


def test_ppyoloe_of_paddle_fits_counters_start_at_zero_and_the_bins_become_whole_numbers():
    file = weights(golden.ppyoloe("s"), "paddle")
    wanted = expect(file, "ppyoloe_s")
    found = fit(file, wanted)
    assert (wanted.classes, found.left_over, found.unused, found.warnings()) == (80, [], [], [])
    assert len(found.matched) == 423
    assert len(found.counters) == 78
    assert found.matched["yolo_head.proj_conv.weight"].tolist() == np.arange(17).reshape(1, 17, 1, 1).tolist()
    assert found.matched["yolo_head.proj_conv.weight"].dtype == np.int64


def test_bins_that_are_no_whole_numbers_are_told():
    arrays = golden.ppyoloe("s")
    arrays["yolo_head.proj_conv.weight"] = arrays["yolo_head.proj_conv.weight"] + 0.5
    file = weights(arrays, "paddle")
    assert fit(file, expect(file, "ppyoloe_s")).inexact == ["yolo_head.proj_conv.weight"]


@pytest.mark.parametrize("layout", ["paddle", "torch"])
@pytest.mark.parametrize("spelled", ["paddle", "torch"])
def test_either_spelling_of_names_is_accepted_in_either_format(layout, spelled):
    arrays = golden.ppyoloe("s") if spelled == "paddle" else neutral_names(golden.ppyoloe("s"))
    file = weights(arrays, layout)
    assert len(fit(file, expect(file, "ppyoloe_s")).matched) == 423


def test_both_spellings_of_one_name_are_refused():
    with pytest.raises(CheckpointError, match="the same meaning"):
        neutral_names({"bn._mean": np.zeros(1), "bn.running_mean": np.zeros(1)})


def test_of_another_number_of_classes_the_head_is_left_out_and_it_is_said():
    held = golden.yolov5("n", classes=3)
    found = match(weights(golden.yolov5("n")), entry_types(held), YOLOV5)
    assert len(found.matched) == 343
    assert found.summary().endswith("343 of 349 arrays taken")
    (told,) = found.warnings()
    assert told.startswith(
        "the number of classes differs, so the head keeps its start values (6 arrays): "
        "model.24.m.0.weight (255, 64, 1, 1) there, (24, 64, 1, 1) here"
    )
    assert told.endswith("and 2 more")


def test_half_precision_becomes_what_the_model_has():
    held = golden.yolov5("n")
    halved = {n: a.astype(np.float16) if a.dtype.kind == "f" else a for n, a in held.items()}
    found = match(weights(halved), entry_types(held), YOLOV5)
    golden.equal(found.matched, {n: a.astype(held[n].dtype) for n, a in halved.items()})


def test_a_job_that_trains_keeps_its_own_anchors_and_says_so():
    held = golden.yolov5("n")
    held["model.24.anchors"] = held["model.24.anchors"] + 1
    found = match(weights(golden.yolov5("n")), entry_types(held), YOLOV5, own=held)
    assert found.from_data == ["model.24.anchors"]
    assert "model.24.anchors" not in found.matched
    assert found.warnings() == ["taken from this job's data, not from the file (1 array): model.24.anchors"]
    assert "model.24.anchors" in match(weights(golden.yolov5("n")), entry_types(held), YOLOV5).matched


def test_state_that_only_a_running_job_has_is_neither_asked_for_nor_exported():
    held = golden.yolov5("n") | {"balance.moved_L": np.ones(3)}
    assert match(weights(golden.yolov5("n")), entry_types(held), YOLOV5).left_over == []
    assert set(export(held, YOLOV5, layout="torch")) == set(golden.yolov5("n"))


def test_a_file_of_the_backbone_alone_is_put_into_its_place():
    prefix = "backbone."
    part = {n.removeprefix(prefix): a for n, a in golden.ppyoloe("s").items() if n.startswith(prefix)}
    file = weights(part, "paddle")
    found = fit(file, expect(file, "ppyoloe_s"))
    assert (found.prefix, len(found.matched), found.unused) == (prefix, len(part), [])
    assert found.missing


def test_a_wrapper_of_all_names_is_taken_off():
    wrapped = {f"module.{name}": array for name, array in golden.yolov5("n").items()}
    assert match(weights(wrapped), entry_types(golden.yolov5("n")), YOLOV5).left_over == []


@pytest.mark.parametrize(
    ("arrays", "layout", "value", "right"),
    [
        (golden.ppyoloe("m"), "paddle", "ppyoloe_s", "ppyoloe_m"),
        (golden.yolov5("s"), "torch", "yolov5n", "yolov5s"),
        (golden.yolov5("n"), "torch", "ppyoloe_x", "yolov5n"),
    ],
)
def test_weights_of_another_model_are_refused_and_that_model_is_named(arrays, layout, value, right):
    file = weights(arrays, layout)
    with pytest.raises(CheckpointError, match=rf"arrays fit {value} by name and shape; {len(arrays)} fit {right}: use"):
        fit(file, expect(file, value))


def test_a_small_part_of_a_file_is_no_file_of_the_model_though_no_other_model_fits_better():
    arrays = dict(golden.yolov5("n"))
    fitting = list(arrays)[:40]
    others = {f"neck.{number}.weight": np.zeros((3, 2)) for number in range(60)}
    file = weights({name: arrays[name] for name in fitting} | others)
    with pytest.raises(CheckpointError, match=r"\d+ of its 100 arrays fit yolov5n .*other options \(--option\)"):
        fit(file, expect(file, "yolov5n"))
    assert len(fit(weights({name: arrays[name] for name in fitting}), expect(file, "yolov5n")).matched) == 40


def test_weights_of_no_known_model_are_refused():
    file = weights({"classifier.weight": np.zeros((3, 2))})
    with pytest.raises(
        CheckpointError, match="0 of its 1 arrays fit yolov5n by name and shape; is it of another model"
    ):
        fit(file, expect(file, "yolov5n"))


@pytest.mark.parametrize("shape", [(2, 3), (3, 3)])
def test_linear_weights_are_transposed_for_paddle_and_back(tmp_path, shape):
    held = {
        "fc.weight": np.arange(np.prod(shape), dtype=np.float32).reshape(shape),
        "fc.bias": np.zeros(shape[0], np.float32),
    }
    there = export(held, Published(), layout="paddle")
    np.testing.assert_array_equal(there["fc.weight"], held["fc.weight"].T)
    write(tmp_path / "w.pdparams", there)
    golden.equal(match(read(tmp_path / "w.pdparams"), entry_types(held), Published()).matched, held)


def test_a_paddle_file_with_matrices_as_here_is_recognised_by_one_that_is_not_square():
    held = {"a.weight": np.arange(6.0).reshape(2, 3), "b.weight": np.arange(4.0).reshape(2, 2)}
    golden.equal(match(weights(held, "paddle"), entry_types(held), Published()).matched, held)
    turned = {"a.weight": held["a.weight"].T, "b.weight": held["b.weight"].T}
    golden.equal(match(weights(turned, "paddle"), entry_types(held), Published()).matched, held)


@pytest.mark.parametrize("ending", [".pdparams", ".pt", ".safetensors"])
@pytest.mark.parametrize("model", ["yolov5n", "ppyoloe_s"])
def test_import_of_export_is_the_same(tmp_path, model, ending):
    """Counters aside, which Paddle does not have."""
    file = weights(golden.yolov5("n") if model == "yolov5n" else golden.ppyoloe("s"))
    told = YOLOV5 if model == "yolov5n" else PPYOLOE
    held = fit(file, expect(file, model)).matched
    layout = {".pdparams": "paddle", ".pt": "torch", ".safetensors": "neutral"}[ending]
    write(tmp_path / f"w{ending}", export(held, told, layout=layout))
    back = fit(read(tmp_path / f"w{ending}"), expect(read(tmp_path / f"w{ending}"), model))
    lost = {name for name in held if name.endswith("num_batches_tracked")} if layout == "paddle" else set()
    golden.equal(back.matched, {name: array for name, array in held.items() if name not in lost})
    assert back.left_over == []


def test_export_of_import_has_the_published_names_shapes_and_types(tmp_path):
    state = golden.ppyoloe("s")
    file = weights(state, "paddle")
    golden.equal(export(fit(file, expect(file, "ppyoloe_s")).matched, PPYOLOE, layout="paddle"), state)
    file = weights(golden.yolov5("n"))
    golden.equal(export(fit(file, expect(file, "yolov5n")).matched, YOLOV5, layout="torch"), golden.yolov5("n"))


def test_a_file_with_statistics_of_its_own_was_not_folded():
    """Biases that the model lacks and a statistic that is missing may be another model's."""
    array = np.ones(1, np.float32)
    lacking = {"missing": ["b.running_mean"], "unused": ["c.bias"]}
    assert Match(file=None, matched={"c.weight": array}, **lacking).has_folded_norms
    assert not Match(file=None, matched={"c.weight": array, "a.running_mean": array}, **lacking).has_folded_norms
