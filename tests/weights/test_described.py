"""What a file of weights says of itself: the classes of a pickled model, and mtrain's description in safetensors."""

import json
import struct

import numpy as np
import pytest
from safetensors.numpy import save_file

from mtrain.errors import UsageError
from mtrain.weights.described import KEY, Description, class_names, pickled_labels
from mtrain.weights.pickles import Inert, Name
from mtrain.weights.reading import asked_or_said, read

YOLO = Name("models.yolo", "DetectionModel")
SPEC = {"model": {"name": "yolov5n", "options": {"width": 1}, "pruned": {"a": [1, 2]}}, "data": {"image_size": 96}}


def safetensors(folder, metadata):
    save_file({"w": np.ones(2, np.float32)}, folder / "w.safetensors", metadata=metadata)
    return folder / "w.safetensors"


@pytest.mark.parametrize(
    ("value", "names"),
    [
        ({1: "wbc", 0: "rbc"}, ["rbc", "wbc"]),
        (("rbc", "wbc"), ["rbc", "wbc"]),
        ({0: "rbc", 2: "wbc"}, []),
        ({"0": "rbc"}, []),
        (["rbc", 7], []),
        (["r\x1b[2Jbc"], []),
        (["x" * 201], []),
        ("rbc", []),
        (None, []),
    ],
)
def test_names_of_classes_are_a_list_or_numbered_texts(value, names):
    assert class_names(value) == names


def test_the_averaged_model_of_a_pickle_says_its_classes_before_the_other_one():
    first, second = Inert(YOLO, {"names": ["a"]}), Inert(YOLO, {"names": {0: "b"}})
    assert pickled_labels({"model": first, "ema": second}) == {"class_names": ["b"]}
    assert pickled_labels({"model": first, "ema": None}) == {"class_names": ["a"]}
    assert pickled_labels(first) == {"class_names": ["a"]}
    assert pickled_labels({"state_dict": {}, "names": ["c", "d"]}) == {"class_names": ["c", "d"]}
    assert pickled_labels({"model": Inert(YOLO, {})}) == {}


def test_safetensors_say_classes_model_and_size(tmp_path):
    description = Description(class_names=("rbc", "wbc"), category_ids=(3, 7), spec=SPEC)
    found = read(safetensors(tmp_path, description.entries()))
    assert found.labels == {"class_names": ["rbc", "wbc"], "category_ids": [3, 7]}
    assert (found.model, found.options, found.pruned, found.image_size) == ("yolov5n", {"width": 1}, {"a": [1, 2]}, 96)
    assert found.spec == SPEC


@pytest.mark.parametrize(
    "text",
    [
        "no JSON",
        "[" * 100_000,
        json.dumps({"class_names": 3}),
        json.dumps({"class_names": ["\x1b"], "spec": {"model": {"name": "./nets.py:Net"}}}),
        json.dumps({"spec": {"model": {"name": "/srv/nets"}}}),
        json.dumps({"spec": {"model": 4}}),
    ],
)
def test_a_description_that_cannot_be_used_is_as_none(text, tmp_path):
    found = read(safetensors(tmp_path, {KEY: text}))
    assert (found.labels, found.model, found.spec) == ({}, None, {})
    assert found.arrays["w"].tolist() == [1, 1]


def test_metadata_that_are_no_texts_are_refused_as_damaged(tmp_path):
    header = json.dumps(
        {"__metadata__": {KEY: 3}, "w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}
    ).encode()
    (tmp_path / "w.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(4))
    with pytest.raises(UsageError, match="cannot be read as safetensors"):
        read(tmp_path / "w.safetensors")


def test_classes_that_were_asked_for_replace_those_of_the_file(tmp_path):
    file = safetensors(tmp_path, Description(class_names=("rbc",)).entries())
    assert asked_or_said(file, None) == ["rbc"]
    assert asked_or_said(file, ["cell"]) == ["cell"]
    with pytest.raises(UsageError, match=r"data\.names=cat,dog"):
        asked_or_said(safetensors(tmp_path, {}), [])
