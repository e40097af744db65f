"""Foreign YAML is read as plain data with file and line; no value makes the import crash."""

import copy
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mtrain.errors import MtrainError, SpecError
from mtrain.spec.importers.conversion import convert
from mtrain.spec.importers.documents import MAX_FILES, read
from mtrain.spec.yaml_reader import flow, parse

YAML = Path(__file__).parents[1] / "data" / "official_yaml"


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def write(name: str, text: str) -> Path:
    Path(name).write_text(text, encoding="utf-8")
    return Path(name)


def test_later_bases_and_the_file_itself_win_and_mappings_merge():
    write("first.yml", "a: {x: 1, y: 1}\nb: 1\nc: [1, 2]\n")
    write("second.yml", "a: {y: 2}\nb: 2\n")
    document = read(write("top.yml", "_BASE_: [first.yml, second.yml]\nc: [3]\n"))
    assert document.values == {"a": {"x": 1, "y": 2}, "b": 2, "c": [3]}
    places = {key: str(document.place(path)) for key, path in {"x": ("a", "x"), "y": ("a", "y"), "c": ("c", 0)}.items()}
    assert places == {"x": "first.yml:1", "y": "second.yml:1", "c": "top.yml:2"}
    assert document.files == ["top.yml", "first.yml", "second.yml"]
    assert not document.has(("_BASE_",))
    assert list(document.leaves()) == [("a", "x"), ("a", "y"), ("b",), ("c",)]


def test_a_tag_becomes_a_name_and_its_mapping_replaces_as_a_whole():
    write("base.yml", "set: !Coco {root: a, train: b}\nplain: {p: 1, q: 1}\nlist:\n  - !Cosine {n: 1}\n  - !Step\n")
    document = read(write("top.yml", "_BASE_: [base.yml]\nset: {root: c}\nplain: !Other {p: 2}\nword: !Word 1e-3\n"))
    assert document.values["set"] == {"root": "c"}
    assert document.values["plain"] == {"name": "Other", "p": 2}
    assert document.values["list"] == [{"name": "Cosine", "n": 1}, {"name": "Step"}]
    assert document.values["word"] == 0.001
    assert not document.has(("set", "train"))
    assert str(document.place(("list", 1, "name"))) == "base.yml:5"


@pytest.mark.parametrize("tag", ["!!python/name:os.system", "!<tag:evil,2000:x>", "!a!b", "!!map"])
def test_tags_that_are_more_than_a_word_are_refused_or_mean_nothing(tag):
    text = f"{'%TAG !a! tag:evil,2000:' if tag.startswith('!a!') else ''}\n{'---' if tag.startswith('!a!') else ''}\nkey: {tag} 1\n"
    with pytest.raises(SpecError, match=r"bad\.yml:3 key: the tag .* is not allowed"):
        read(write("bad.yml", text))


def test_local_tags_stay_a_mistake_in_a_spec():
    assert parse("a: !Word {b: 1}", name="spec.yml").problems == [
        "spec.yml:1 a: the tag !Word is not allowed; write plain values"
    ]


def test_integers_that_no_one_can_print_are_no_integers():
    assert parse(f"a: {'9' * 5000}", name="x").values == {"a": float("inf")}
    assert isinstance(parse(f"a: 0x{'f' * 5000}", name="x").values["a"], str)


def test_the_number_of_files_is_limited_however_they_refer_to_one_another():
    last = 12
    for i in range(last):
        write(f"{i}.yml", f"_BASE_: [{i + 1}.yml, {i + 1}.yml, {i + 1}.yml]\n")
    with pytest.raises(SpecError, match=f"more than {MAX_FILES} files"):
        read(write(f"{last}.yml", "a: 1\n").with_name("0.yml"))


VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**400), 10**400),
    st.integers(-5, 100),
    st.floats(),
    st.text(max_size=8),
    st.just([]),
    st.just({}),
    st.lists(st.one_of(st.integers(-3, 9), st.none(), st.text(max_size=3), st.just({"name": [1]})), max_size=4),
    st.dictionaries(st.text(max_size=4), st.integers(), max_size=3),
)


def _changed(values: dict, data) -> dict:
    """A copy with one value, at any depth, replaced by anything, or taken away."""
    changed = copy.deepcopy(values)
    inner = changed
    for _ in range(12):
        keys = list(inner) if isinstance(inner, dict) else list(range(len(inner)))
        key = data.draw(st.sampled_from(keys))
        child = inner[key]
        if isinstance(child, dict | list) and child and data.draw(st.integers(0, 3)):
            inner = child
            continue
        if data.draw(st.booleans()):
            inner[key] = data.draw(VALUES)
        else:
            del inner[key]
        return changed
    return changed


@pytest.mark.parametrize(
    "file",
    [
        "paddledetection/ppyoloe/ppyoloe_crn_s_300e_coco.yml",
        *(f"yolov5/{name}.yaml" for name in ("yolov5s", "hyp.VOC", "cells")),
    ],
)
def test_no_value_of_a_file_ends_in_a_crash(file):
    """Either a spec that loads, or one clear error: never another exception."""
    values = read(YAML / file).values

    @settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(st.data())
    def check(data):
        text = "".join(f"{flow(key)}: {flow(value)}\n" for key, value in _changed(values, data).items())
        try:
            imported = convert([write("changed.yml", text)])
        except MtrainError:
            return
        message = len(imported.carried) + len(imported.dropped)
        assert message == len(list(read(Path("changed.yml")).leaves()))

    check()
