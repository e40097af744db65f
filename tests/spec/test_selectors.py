"""The task, model, data set and backend of a spec decide on its other keys: one rule for what a former choice had."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from mtrain.errors import SpecError
from mtrain.spec import config, plugins
from mtrain.spec.building import Tasks
from mtrain.spec.model import Spec
from mtrain.spec.schema import dot, walk

DETECTOR = "model: {name: yolov5n}\ndata: {format: coco, augment: {mosaic: 0.7, degrees: 5.0}, cache: ram}\ntrain: {epochs: 1}\n"
CLASSIFIER = "_BASE_: base.yml\nmodel: {name: vit}\ndata: {format: digits_classes}\n"


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def load(file, *overrides, environ=None, **flags):
    given = {path.replace("__", "."): config.Given(value, f"--{path} {value}") for path, value in flags.items()}
    return config.load(file, overrides=overrides, flags=given, environ=environ or {})


def problems(file, *overrides, environ=None) -> tuple[str, ...]:
    with pytest.raises(SpecError) as caught:
        load(file, *overrides, environ=environ)
    return caught.value.problems


# ---------------------------------------------------------------------------------------------------------------- the task
def test_the_core_knows_no_word_of_a_task():
    words = (
        "mosaic",
        "crop",
        "hsv",
        "letterbox",
        "distort",
        "expand",
        "stride",
        "detect",
        "box",
        "image_size",
        "anchor",
    )
    text = json.dumps(Spec.model_json_schema()).lower().replace("paddledetection", "")
    assert [word for word in words if word in text] == []


def test_each_task_has_its_own_sections_and_the_core_those_of_all():
    schemas = {task: {dot(path) for path, _ in walk(schema)} for task, schema in Tasks().schemas.items()}
    core = {dot(path) for path, _ in walk(Spec)}
    assert schemas.keys() == {"classification", "detection", "language", "own", "segmentation"}
    assert all(core <= keys for keys in schemas.values())
    assert {"data.augment.mosaic", "evaluate.max_detections", "data.cache"} <= schemas["detection"]
    assert "data.augment.flip_lr" in schemas["classification"]
    assert not {"data.augment.mosaic", "evaluate.max_detections", "data.cache"} & schemas["classification"]


@pytest.mark.parametrize("kind", ["models", "datasets"])
def test_the_shipped_policy_says_the_task_that_each_class_says(kind):
    entries = [entry for entry in plugins.names(kind) if entry.is_own]
    declared = {entry.name: plugins.read_policy().of(kind, entry.name).task for entry in entries}
    assert declared == {entry.name: plugins.load(kind, entry.name).kind for entry in entries}


@pytest.mark.smoke
@pytest.mark.job
def test_a_spec_is_read_without_importing_its_model_and_data_set(tmp_path):
    code = "import sys; from mtrain.spec import config; config.load('yolov5n_bccd'); assert 'numpy' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path, timeout=60)


@pytest.mark.parametrize(
    ("text", "task"),
    [
        ("train: {epochs: 1}", "detection"),
        ("model: {name: vit}", "classification"),
        ("data: {format: digits_classes}", "classification"),
        ("model: {name: vit}\ndata: {format: coco}", "detection"),
        ("model: {name: yolov5n}\ndata: {format: digits_classes}", "classification"),
    ],
)
def test_the_data_set_names_the_task_and_the_model_where_it_stands_alone(text, task):
    Path("a.yml").write_text(text)
    assert load("a.yml").spec.task == task


def test_keys_of_a_weaker_source_for_the_former_task_are_left_out_with_a_note():
    Path("base.yml").write_text(DETECTOR)
    Path("a.yml").write_text(CLASSIFIER)
    loaded = load("a.yml")
    assert loaded.spec.task == "classification"
    assert loaded.values["data"]["augment"]["degrees"] == 5.0  # which both tasks have
    assert loaded.notes == (
        "data.augment.mosaic (base.yml:2), data.cache (base.yml:2): left out, were given for the task detection; it is "
        "classification now (a.yml:3)",
    )


@pytest.mark.parametrize(
    ("text", "overrides", "environ", "where"),
    [
        (CLASSIFIER.replace("classes}", "classes, cache: ram}"), (), {}, "a.yml:3 data.cache: unknown key"),
        (CLASSIFIER, ("data.cache=ram",), {}, "-o data.cache=ram: unknown key"),
        (CLASSIFIER, (), {"MTRAIN_DATA__CACHE": "ram"}, "MTRAIN_DATA__CACHE=ram: unknown key"),
    ],
)
def test_keys_of_another_task_are_refused_where_they_are_given_with_the_task_or_later(text, overrides, environ, where):
    Path("base.yml").write_text(DETECTOR)
    Path("a.yml").write_text(text)
    (line,) = problems("a.yml", *overrides, environ=environ)
    assert line.startswith(where)
    assert line.endswith("it belongs to the task detection, and this job's task is classification")


def test_an_override_of_the_task_leaves_out_what_file_and_environment_gave_for_the_former_one():
    Path("a.yml").write_text(DETECTOR)
    task = ("model.name=vit", "data.format=digits_classes")
    loaded = load("a.yml", *task, environ={"MTRAIN_EVALUATE__MAX_DETECTIONS": "300"})
    assert loaded.spec.task == "classification"
    (note,) = loaded.notes
    assert "data.augment.mosaic (a.yml:2)" in note
    assert "evaluate.max_detections (MTRAIN_EVALUATE__MAX_DETECTIONS=300)" in note


def test_a_misspelt_key_of_a_base_stays_an_error_when_the_task_changes():
    Path("base.yml").write_text(DETECTOR.replace("cache", "cashe"))
    Path("a.yml").write_text(CLASSIFIER)
    assert problems("a.yml") == ("base.yml:2 data.cashe: unknown key; did you mean 'classes'?",)


def test_what_is_switched_off_asks_for_nothing_of_another_task():
    Path("a.yml").write_text(
        "model: {name: vit}\ndata: {format: digits_classes, split: null, cache: none, "
        "augment: {mosaic: 0, mixup: 0.0, sizes: null, crop: null, interpolations: [linear]}}\n"
    )
    loaded = load("a.yml", "evaluate.max_detections=100")
    assert (loaded.spec.task, loaded.notes) == ("classification", ())
    assert problems("a.yml", "data.augment.mosaic=1.0")  # the default of the other task, and not its off


def test_keys_of_an_unknown_data_set_are_checked_as_the_models_task_has_them():
    Path("a.yml").write_text("model: {name: yolov5n}\ndata: {format: cocoo, augment: {mosaik: 1}}\n")
    known, key = sorted(problems("a.yml"))
    assert "data.augment.mosaik: unknown key; did you mean 'mosaic'?" in known
    assert "no data set 'cocoo'" in key
    Path("b.yml").write_text("model: {name: yolo}\ndata: {format: cocoo, augment: {mosaic: 1}}\n")
    assert [line.partition(": ")[0] for line in problems("b.yml")] == ["b.yml:1 model.name", "b.yml:2 data.format"]


# ------------------------------------------------------------------------------------------------------- options of plugins
@pytest.mark.parametrize(
    ("text", "override", "note"),
    [
        ("model: {name: yolov5n, options: {box: 0.1, confidence: 0.2}}", "model.name=ppyoloe_s", "model.options.box (a.yml:1)"),
        ("data: {format: voc, options: {use_difficult: false}}", "data.format=coco", "data.options.use_difficult (a.yml:1)"),
        ("backend: {name: deepspeed, options: {stage: 2}}", "backend.name=ddp", "backend.options.stage (a.yml:1)"),
    ],
)  # fmt: skip
def test_options_that_the_new_plugin_does_not_have_are_left_out(text, override, note):
    Path("a.yml").write_text(text)
    path, _, chosen = override.partition("=")
    loaded = load("a.yml", override)
    (line,) = loaded.notes
    assert line.startswith(f"{note}: left out, was given for {path} ")
    assert line.endswith(f"; it is {chosen} now (-o {override})")
    assert loaded.spec.model.options == ({"confidence": 0.2} if path == "model.name" else {})


@pytest.mark.parametrize(("given", "train"), [("format: digits, ", None), ("", "a.json")])
def test_paths_of_a_data_format_are_left_out_only_where_that_format_was_given(given, train):
    Path("base.yml").write_text(f"data: {{{given}train: a.json}}\n")
    Path("a.yml").write_text("_BASE_: base.yml\ndata: {format: coco}\n")
    loaded = load("a.yml")
    assert loaded.spec.data.train == train
    assert len(loaded.notes) == (train is None)


def test_options_beside_the_new_plugin_are_refused_and_so_are_those_of_the_same_plugin():
    Path("base.yml").write_text("model: {name: yolov5n, options: {boxx: 1}}\n")
    Path("a.yml").write_text("_BASE_: base.yml\nmodel: {name: ppyoloe_s, options: {box: 0.1}}\n")
    assert problems("a.yml")[0].startswith("a.yml:2 model.options.box: unknown key")
    Path("b.yml").write_text("_BASE_: base.yml\nmodel: {name: yolov5n}\n")
    assert problems("b.yml", "model.name=yolov5n")[0].startswith("base.yml:1 model.options.boxx: unknown key")


def test_the_choice_that_counts_is_the_one_that_changed_and_not_its_repetition():
    Path("base.yml").write_text("backend: {name: deepspeed, options: {stage: 2}}\n")
    Path("a.yml").write_text("_BASE_: base.yml\nbackend: {name: solo}\n")
    (note,) = load("a.yml", "backend.name=solo").notes
    assert "given for backend.name deepspeed; it is solo now (a.yml:2)" in note
