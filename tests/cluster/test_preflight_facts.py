"""A host describes itself, and two hosts find the file in which their data differs."""

import json
import os
import socket
import sys

import numpy as np
import pytest

import mtrain
from mtrain.core.checkpoint import format, store
from mtrain.core.interfaces import Progress, State
from mtrain.jobs.preflight.facts import FactCollector, Listeners, collect, reach
from mtrain.jobs.preflight.folder_listing import MAX_SIZES, list_folder
from mtrain.jobs.preflight.requirements import _room
from mtrain.spec.model import CheckpointSpec

pytestmark = pytest.mark.smoke

HERE = "127.0.0.1"


def wanted(**more):
    return {
        "address": HERE,
        "names": [HERE],
        "cwd": ".",
        "run_dir": "runs/x",
        "python": None,
        "modules": {"json": "", "a_module_that_nobody_has": ""},
        "ports": [],
        "files": {},
        "data": None,
        **more,
    }


@pytest.fixture
def listener():
    with socket.socket() as server:
        server.bind((HERE, 0))
        server.listen()
        yield server.getsockname()[1]


# ---------------------------------------------------------------------------------------------------------------- facts
def test_facts_can_be_sent_as_json(tmp_path):
    (tmp_path / "a\udcff.jpg").write_text("name that is no UTF-8")
    actual = collect(wanted(data={"root": str(tmp_path)}))
    assert json.loads(json.dumps(actual, allow_nan=False).encode()) == actual
    assert [interface for interface, address in actual["addresses"] if address == HERE] == ["lo"]
    assert actual["names"][HERE] == [HERE]
    assert actual["host"] == socket.gethostname()


def test_an_interpreter_says_which_modules_it_lacks_and_from_which_source_it_has_mtrain():
    own = collect(wanted())["python"]
    assert own["modules"].pop("mtrain_trace") == f"mtrain-trace {mtrain.__version__}"
    assert own["modules"] == {"json": "", "a_module_that_nobody_has": None}
    assert own["packages"]["numpy"]
    other = collect(wanted(python=os.path.relpath(sys.executable)))["python"]
    assert other["modules"].pop("mtrain_trace")
    assert {**other, "executable": ""} == {**own, "executable": ""}, "another spelling is asked, and says the same"


@pytest.mark.job
def test_the_source_that_another_folder_has_is_told_apart(tmp_path):
    (tmp_path / "mtrain").mkdir()
    (tmp_path / "mtrain" / "__init__.py").write_text("")
    own = collect(wanted())["python"]["code"]
    shadow = tmp_path / "python"
    shadow.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    shadow.chmod(0o755)
    other = collect(wanted(python=str(shadow), cwd=str(tmp_path)))["python"]["code"]
    assert other["digest"] != own["digest"]
    assert other["folder"].endswith("mtrain")


@pytest.mark.job
@pytest.mark.parametrize(
    ("python", "output"),
    [
        ("/nowhere/python", "/nowhere/python is not there"),
        ("/bin/true", "does not answer as Python does"),
        ("/bin/false", "exit code 1"),
    ],
)
def test_an_interpreter_that_is_none_is_named(python, output):
    assert output in collect(wanted(python=python))["python"]["error"]


def test_a_taken_port_is_told_with_the_process_that_has_it(listener):
    actual = collect(wanted(ports=[[listener, "cluster.master_port"]]))["ports"]
    assert f"process {os.getpid()} (" in actual[str(listener)]


def test_a_port_that_another_address_of_this_machine_has_is_taken_too():
    """Some rendezvous listen at every address."""
    with socket.socket() as server:
        server.bind(("127.0.0.9", 0))
        server.listen()
        port = server.getsockname()[1]
        assert collect(wanted(ports=[[port, "key"]]))["ports"][str(port)]


def test_a_port_is_free_again_when_nothing_listens():
    with socket.socket() as server:
        server.bind((HERE, 0))
        port = server.getsockname()[1]
    assert collect(wanted(ports=[[port, "key"]]))["ports"] == {str(port): ""}


def test_disk_is_that_of_the_folder_in_which_the_run_would_be_made(tmp_path):
    actual = collect(wanted(run_dir=str(tmp_path / "not" / "yet")))["disk"]
    assert actual["path"] == str(tmp_path)
    assert actual["writable"]
    assert 0 < actual["free"] <= actual["total"]
    assert not (tmp_path / "not").exists(), "looking makes nothing"


def test_a_file_that_ranks_read_is_identified_by_size_and_content(tmp_path):
    (tmp_path / "w.pt").write_bytes(b"one")
    actual = collect(wanted(cwd=str(tmp_path), files={"model.weights": "w.pt", "plugins": "none.toml"}))["files"]
    assert actual["model.weights"]["bytes"] == 3
    assert actual["plugins"]["error"] == "No such file or directory"
    (tmp_path / "w.pt").write_bytes(b"two")
    assert (
        collect(wanted(cwd=str(tmp_path), files={"w": "w.pt"}))["files"]["w"]["digest"]
        != actual["model.weights"]["digest"]
    )


def test_a_question_that_fails_is_answered_with_the_reason():
    collector = FactCollector(clock=lambda: 5.0)
    answer = collector.answer({"do": "dance"})
    assert answer == {"error": "'dance' is none of resolve, facts, listen, connect", "clock": 5.0}
    assert "KeyError" in collector.answer({"do": "facts"})["error"]
    collector.close()


# ----------------------------------------------------------------------------------------------------------------- data
def fill(folder, names):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    return folder


@pytest.mark.parametrize(
    "change",
    [
        lambda folder: (folder / "b/7.jpg").write_text("longer than before"),
        lambda folder: (folder / "b/7.jpg").unlink(),
        lambda folder: (folder / "b/7a.jpg").write_text("new"),
    ],
    ids=["larger", "missing", "one more"],
)
def test_one_file_that_differs_changes_the_digest(tmp_path, change):
    names = [f"{folder}/{number}.jpg" for folder in "abc" for number in range(40)]
    left, right = (fill(tmp_path / side, names) for side in ("left", "right"))
    assert list_folder(left).digest() == list_folder(right).digest()
    change(right)
    assert list_folder(left).digest() != list_folder(right).digest()


def test_what_is_not_data_is_left_out(tmp_path):
    plain = list_folder(fill(tmp_path / "plain", ["a.jpg", "b/c.jpg"]))
    more = fill(tmp_path / "more", ["a.jpg", "b/c.jpg", ".DS_Store", "labels.cache", "runs/x/log", ".git/config"])
    assert list_folder(more, skip=[more / "runs"]) == plain


def test_links_are_followed_once(tmp_path):
    folder = fill(tmp_path / "data", ["real/a.jpg"])
    (folder / "again").symlink_to("real")
    (folder / "real" / "round").symlink_to(folder)
    assert [name for name, _ in list_folder(folder).files] == ["again/a.jpg"]


def test_of_a_large_folder_all_names_and_some_sizes_are_compared(tmp_path, monkeypatch):
    monkeypatch.setattr("mtrain.jobs.preflight.folder_listing.MAX_SIZES", 100)
    listing = list_folder(fill(tmp_path, [f"{number:04}" for number in range(1000)]))
    assert (len(listing.files), listing.known_sizes, listing.complete) == (1000, 100, True)
    assert MAX_SIZES > 1000


def test_a_folder_that_takes_too_long_is_given_up(tmp_path):
    times = iter([0.0, *[10.0] * 1000])
    listing = list_folder(fill(tmp_path, ["a", "b"]), clock=lambda: next(times))
    assert not listing.complete


def test_a_data_folder_that_is_not_there_is_told(tmp_path):
    actual = collect(wanted(data={"root": str(tmp_path / "none")}))["data"]
    assert actual == {"root": str(tmp_path / "none"), "error": "No such file or directory"}


# ---------------------------------------------------------------------------------------------------------------- reach
def test_a_listener_is_reached_and_known_by_its_word():
    listeners = Listeners()
    port, word = listeners.open(HERE)
    other_port, other_word = listeners.open(HERE)
    assert word != other_word
    places = [(port, word), (other_port, word), (port, word)]
    actual = reach([{"address": HERE, "port": port, "word": word} for port, word in places], source=HERE)
    assert actual == ["", "another machine or program answers there", ""]
    listeners.close()
    assert reach([{"address": HERE, "port": port, "word": word}]) == ["Connection refused"]
    listeners.close()


def test_one_that_accepts_and_says_nothing_is_not_reached(listener):
    target = {"address": HERE, "port": listener, "word": "word"}
    assert reach([target], timeout_s=0.2) == ["no answer within 0.2 s"]


def test_a_source_that_is_not_this_machines_is_told():
    assert reach([{"address": HERE, "port": 9, "word": "word"}], source="192.0.2.7") == [
        "Cannot assign requested address"
    ]


def test_a_host_of_a_job_that_goes_on_needs_room_only_for_what_does_not_take_the_place_of_former_checkpoints(tmp_path):
    writer = store.Checkpoints(tmp_path, keep_last=2, keep_best=1, asynchronous=False)
    for update, score in ((1, 0.9), (2, 0.1), (3, 0.2)):
        state = State(weights={"w": np.zeros(1 << 20, dtype=np.float32)})
        writer.save(state, Progress(update=update), score=score, spec={}, extra={})
    newest = tmp_path / "step-00000003"
    each, records = format.size_of(newest), 16 << 20
    full = _room(newest, CheckpointSpec(keep_last=2, keep_best=1))
    assert full["least"] == pytest.approx(each + records, abs=4096), "three are there, the fourth is being written"
    assert _room(newest, CheckpointSpec(keep_last=3, keep_best=2))["least"] == pytest.approx(
        3 * each + records, abs=4096
    )
    assert _room(newest, CheckpointSpec(keep_last=1, keep_best=0))["least"] == records, "one of three goes first"
