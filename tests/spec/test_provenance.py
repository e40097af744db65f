"""Merged values and where each came from, against merges that were done by hand."""

from typing import Any

import pytest

from mtrain.spec.provenance import Layers, Misplaced, Origin


def merged(*sources: tuple[str, dict[str, Any]]) -> Layers:
    """Layers of files by name, the weakest first."""
    layers = Layers()
    for name, values in sources:
        layers.begin()
        layers.merge(values, lambda _, name=name, level=layers.level: Origin("file", file=name, level=level))  # type: ignore[misc]
    return layers


def origins(layers: Layers) -> dict[str, str]:
    return {".".join(map(str, path)): str(origin) for path, origin in layers.origins.items()}


TWO = (
    ("base", {"optimizer": {"rule": "sgd", "groups": [{"match": "a"}, {"match": "b"}]}, "train": {"epochs": 3}}),
    ("own", {"optimizer": {"rule": "adam", "groups": [{"match": "c"}]}, "data": {"root": None}}),
)


def test_sections_are_merged_and_lists_replaced_with_the_origins_of_what_is_left() -> None:
    layers = merged(*TWO)
    assert layers.values == {
        "optimizer": {"rule": "adam", "groups": [{"match": "c"}]},
        "train": {"epochs": 3},
        "data": {"root": None},
    }
    assert origins(layers) == {
        "optimizer": "own",
        "optimizer.rule": "own",
        "optimizer.groups": "own",
        "optimizer.groups.0": "own",
        "optimizer.groups.0.match": "own",
        "train": "base",
        "train.epochs": "base",
        "data": "own",
        "data.root": "own",
    }
    assert [(value, str(origin)) for value, origin in layers.choices(("optimizer", "rule"))] == [
        ("sgd", "base"),
        ("adam", "own"),
    ]
    assert [layers.number(path) for path in (("train", "epochs"), ("data", "root"), ("data", "train"))] == [1, 2, -1]
    assert [layers.is_touched(path) for path in (("train", "epochs"), ("data", "root"))] == [False, True]


def test_what_is_dropped_was_never_set_and_nothing_below_it() -> None:
    layers = merged(*TWO)
    layers.drop(("optimizer",))
    assert layers.values == {"train": {"epochs": 3}, "data": {"root": None}}
    assert origins(layers) == {"train": "base", "train.epochs": "base", "data": "own", "data.root": "own"}
    assert not layers.is_set(("optimizer", "groups", 0, "match"))
    assert layers.origin(("optimizer", "rule")) == Origin("default")
    layers.drop(("train", "epochs"))
    assert (layers.values["train"], layers.is_set(("train",)), layers.number(("train", "epochs"))) == ({}, True, -1)


def test_a_place_in_a_list_is_replaced_alone() -> None:
    layers = merged(*TWO[:1])
    flag = Origin("flag", text="-o x")
    layers.assign(("optimizer", "groups", "1", "match"), "z", flag, {})
    layers.assign(("optimizer", "groups", 0), {"learning_rate_factor": 2.0}, flag, {})
    assert layers.values["optimizer"]["groups"] == [{"match": "a", "learning_rate_factor": 2.0}, {"match": "z"}]
    for path, origin in (
        (("optimizer", "groups", 0, "match"), "base"),
        (("optimizer", "groups", 0, "learning_rate_factor"), "-o x"),
    ):
        assert str(layers.origin(path)) == origin
    for path in (("optimizer", "groups", 2, "match"), ("train", "epochs", "more")):
        with pytest.raises(Misplaced):
            layers.assign(path, 1, flag, {})


def test_a_list_that_nobody_has_set_starts_as_its_default() -> None:
    layers = merged(*TWO[1:])
    default = {"data": {"sizes": [1, 2, 3]}}
    layers.assign(("data", "sizes", 1), 9, Origin("flag", text="-o x"), default)
    assert layers.values["data"]["sizes"] == [1, 9, 3]
    assert default == {"data": {"sizes": [1, 2, 3]}}


FILE, TYPED = Origin("file"), Origin("override")


def test_an_override_inside_a_list_changes_neither_its_twin_nor_what_the_source_gave():
    span = [0.5, 1.5]
    given = {"contrast": span, "brightness": span}
    layers = Layers()
    layers.merge({"distort": given}, lambda _: FILE)
    layers.begin()
    layers.assign(("distort", "contrast", 0), 0.7, TYPED, {})
    assert layers.values == {"distort": {"contrast": [0.7, 1.5], "brightness": [0.5, 1.5]}}
    assert given == {"contrast": [0.5, 1.5], "brightness": [0.5, 1.5]}
    assert layers.origin(("distort", "contrast", 0)) == TYPED
    assert layers.origin(("distort", "brightness", 0)) == FILE


def test_the_value_that_was_replaced_is_remembered_as_it_was():
    layers = Layers()
    groups = [{"match": "a"}]
    layers.merge({"groups": groups}, lambda _: FILE)
    layers.begin()
    layers.assign(("groups", 0, "match"), "b", TYPED, {})
    assert layers.choices(("groups", 0, "match")) == [("a", FILE), ("b", TYPED)]
    assert groups == [{"match": "a"}]
