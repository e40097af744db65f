"""Specs and checkpoints that are enormous, circular or nested without end are refused at once, or passed over."""

import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from mtrain.core.checkpoint import store as checkpoint
from mtrain.core.interfaces import Progress, State
from mtrain.errors import CheckpointError, SpecError
from mtrain.records.history import read_history
from mtrain.spec.config import load
from mtrain.spec.files import parse_json, read_bytes, read_text

DEEP = 200_000
SECONDS = 20


@pytest.fixture(autouse=True)
def no_hang() -> Iterator[None]:
    def ring(*_: object) -> None:
        raise TimeoutError(f"still at work after {SECONDS} seconds")

    former = signal.signal(signal.SIGALRM, ring)
    signal.alarm(SECONDS)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, former)


def write(folder: Path, name: str, *bases: str, **train: object) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"_BASE_: {json.dumps(bases)}\ntrain: {json.dumps(train)}\n")
    return folder / name


def test_a_diamond_of_bases_of_many_levels_is_read_at_once(tmp_path: Path) -> None:
    levels = 20
    write(tmp_path, f"a{levels}.yml", seed=1)
    write(tmp_path, f"b{levels}.yml", seed=2)
    for level in range(levels - 1, 0, -1):
        for side in "ab":
            write(tmp_path, f"{side}{level}.yml", f"a{level + 1}.yml", f"b{level + 1}.yml")
    assert load(str(write(tmp_path, "top.yml", "a1.yml", "b1.yml")), environ={}).spec.train.seed == 2


def test_a_base_that_two_files_share_is_weaker_than_the_last_that_names_it(tmp_path: Path) -> None:
    """As if every file were laid down with its bases below it, one after the other: the order is what it always was."""
    write(tmp_path, "shared.yml", seed=1, batch_size=4, patience=5)
    write(tmp_path, "first.yml", "shared.yml", seed=2, patience=6)
    write(tmp_path, "second.yml", "shared.yml", batch_size=8)
    spec = load(str(write(tmp_path, "top.yml", "first.yml", "second.yml", patience=7)), environ={}).spec
    assert (spec.train.seed, spec.train.batch_size, spec.train.patience) == (1, 8, 7)


def test_more_bases_than_any_spec_has_are_refused(tmp_path: Path) -> None:
    names = [write(tmp_path, f"{number}.yml").name for number in range(150)]
    with pytest.raises(SpecError, match="more than 100 files"):
        load(str(write(tmp_path, "wide.yml", *names)), environ={})
    for number in range(150):
        write(tmp_path, f"{number}.yml", f"{number + 1}.yml")
    with pytest.raises(SpecError, match="below one another"):
        load(str(write(tmp_path, "deep.yml", "0.yml")), environ={})


@pytest.mark.parametrize("name", ["x" * 5_000, "~nosuchuser/a.yml", "a\0b.yml", "x/" * 2_500, "."])
def test_a_base_of_a_name_that_no_file_can_have_is_refused(tmp_path: Path, name: str) -> None:
    file = tmp_path / "a.yml"
    file.write_text(f"_BASE_: {json.dumps(name)}\n")
    with pytest.raises(SpecError, match="_BASE_") as error:
        load(str(file), environ={})
    assert len(str(error.value)) < 1000


@pytest.mark.parametrize("name", ["x" * 5_000, "x/" * 2_500 + "a.yml", "~nosuchuser/a.yml"])
def test_a_spec_of_a_name_that_no_file_can_have_is_refused(name: str) -> None:
    with pytest.raises(SpecError, match="no such file"):
        load(name, environ={})


def test_aliases_without_end_in_a_spec_are_refused(tmp_path: Path) -> None:
    lines = ["a0: &a0 [x, x]"] + [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 12)]
    (tmp_path / "a.yml").write_text("\n".join(lines))
    with pytest.raises(SpecError, match="aliases"):
        load(str(tmp_path / "a.yml"), environ={})


def save_three(folder: Path) -> list[Path]:
    store = checkpoint.Checkpoints(folder, keep_last=5, keep_best=1, asynchronous=False)
    for update in (1, 2, 3):
        arrays = {"a.weight": np.full(3, update, np.float32)}
        state = State(weights=arrays, ema=arrays, moments={}, counters={})
        store.save(state, Progress(update=update), score=None, spec={}, extra={})
    return checkpoint.list_all(folder)


@pytest.mark.parametrize("file", ["MANIFEST.json", "state.json"])
@pytest.mark.parametrize("content", ["[" * DEEP, "[" * DEEP + "]" * DEEP, '{"files":' * DEEP, "", "\0" * 100])
def test_a_checkpoint_whose_json_is_no_json_is_passed_over(tmp_path: Path, file: str, content: str) -> None:
    folders = save_three(tmp_path / "checkpoints")
    (folders[-1] / file).write_text(content)
    assert checkpoint.newest(tmp_path / "checkpoints") == folders[-2]
    with pytest.raises(CheckpointError):
        checkpoint.load(folders[-1])


def test_a_manifest_that_waits_or_holds_strange_values_is_passed_over(tmp_path: Path) -> None:
    folders = save_three(tmp_path / "checkpoints")
    manifest = folders[-1] / "MANIFEST.json"
    saved = json.loads(manifest.read_text())
    for change in (
        {"score": 10**400},
        {"serial": "x"},
        {"files": {"a\0b": {"size_bytes": 1}}},
        {"files": {"x" * 5000: []}},
    ):
        manifest.write_text(json.dumps(saved | change))
        assert checkpoint.newest(tmp_path / "checkpoints") == folders[-2]
        checkpoint.score_of(folders[-1])
        checkpoint.looks_whole(folders[-1])
    manifest.unlink()
    os.mkfifo(manifest)
    assert checkpoint.newest(tmp_path / "checkpoints") == folders[-2]


def test_a_line_of_brackets_among_the_records_is_passed_over(tmp_path: Path) -> None:
    records = [json.dumps({"kind": "update", "update": 1}), "[" * DEEP, json.dumps({"kind": "update", "update": 2})]
    (tmp_path / "metrics.jsonl").write_text("\n".join(records) + "\n")
    assert list(read_history(tmp_path / "metrics.jsonl").updates) == [1, 2]


def test_only_regular_files_of_a_bounded_size_are_read(tmp_path: Path) -> None:
    (tmp_path / "long").write_bytes(b"x" * 11)
    (tmp_path / "bom").write_bytes(b"\xef\xbb\xbfhello")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    os.mkfifo(tmp_path / "pipe")
    for path, reason in {
        tmp_path / "long": "11 bytes, more than the 10",
        tmp_path / "pipe": "is a named pipe",
        tmp_path: "is a folder",
        Path("/dev/zero"): "is a device",
        tmp_path / "a\0b": "no file can have this name",
        tmp_path / ("x" * 5_000): "too long",
        tmp_path / "none": "No such file",
    }.items():
        with pytest.raises(OSError, match=re.escape(reason)) as error:
            read_bytes(path, limit=10)
        assert error.value.strerror
    assert read_text(tmp_path / "bom", limit=10) == "hello"
    with pytest.raises(ValueError, match="byte 0"):
        read_text(tmp_path / "binary", limit=10)
    with pytest.raises(ValueError, match="nested too deeply"):
        parse_json("[" * DEEP)


def test_thousands_of_reporters_are_one_short_mistake(tmp_path: Path) -> None:
    (tmp_path / "a.yml").write_text("report:\n  reporters:\n" + "".join(f"    r{i}: true\n" for i in range(5000)))
    with pytest.raises(SpecError) as caught:
        load(str(tmp_path / "a.yml"), environ={})
    assert len(caught.value.problems) == 1
    assert "5000 reporters" in str(caught.value)
    assert len(str(caught.value)) < 500


def test_of_thousands_of_mistakes_the_first_are_listed_and_the_rest_counted() -> None:
    error = SpecError([f"mistake {number}" for number in range(5000)])
    assert error.problems[:2] == ("mistake 0", "mistake 1")
    assert int(error.problems[-1].split()[2]) + len(error.problems) - 1 == 5000
    assert len(str(error)) < 20_000
