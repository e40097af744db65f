"""The folder of a sweep may come from somebody else: it is read, and code that only it names is refused."""

import contextlib
import json
import os
import shutil
import sqlite3
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.sweeping.jobs import TINY, InstantJob, starts, sweep_request
from tests.sweeping.test_kills import curves

import mtrain
from mtrain.errors import SpecError, UsageError
from mtrain_sweep import search as sweep
from mtrain_sweep import starting


@pytest.fixture(autouse=True)
def instant(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setattr(sweep, "LocalJob", InstantJob)
    monkeypatch.setattr(sweep, "POLL_S", 0.0)
    monkeypatch.setattr(sweep, "refuse_what_cannot_work", lambda plan: None)
    monkeypatch.setattr(InstantJob, "metrics", staticmethod(curves), raising=False)
    monkeypatch.chdir(tmp_path)
    return


def run(folder: Path, **settings: Any) -> None:
    sweep.run(starting.prepare(sweep_request(folder, **settings)))


def resume(folder: Path) -> None:
    """Go on with a sweep of which the user says no more than its folder."""
    run(folder, resume=True, named=False, space=None)


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    """A sweep of which one trial was made, and another is still to be made."""
    folder = tmp_path / "theirs"
    run(folder, trials=1)
    change(folder, lambda values: values.update(trials=2))
    return folder


def change(folder: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    file = folder / "sweep.json"
    values = json.loads(file.read_text())
    edit(values)
    file.write_text(json.dumps(values))


def trap(folder: Path) -> str:
    """Write a program that leaves a mark, as a file of every kind; return the path of it as Python."""
    mark = folder.parent / "ran"
    program = folder / "trap.py"
    program.write_text(f"#!{sys.executable}\nopen({str(mark)!r}, 'w').close()\nmake = Trap = data = None\n")
    program.chmod(0o755)
    (folder / "yaml.py").write_text(program.read_text())
    (folder / "other.yml").write_text(f"backend: {{python: {program}}}\n")
    (folder / "policy.toml").write_text(f'[models.vit]\nmodule = "trap:Trap"\npath = "{folder}"\n')
    return str(program)


def on_a_base(values: dict[str, Any], code: str) -> None:
    """Let a file beside the sweep's name code."""
    del values["base"]["backend"]["python"]
    values["base"]["_BASE_"] = str(Path(code).with_name("other.yml"))


def policy_beside(values: dict[str, Any], code: str) -> None:
    Path(code).with_name("policy.toml").rename(Path(code).with_name("plugins.toml"))


def a_choice(values: dict[str, Any], **settings: Any) -> None:
    """Let a choice of the space stand for a value that names code."""
    (choice,) = [one for one in values["parameters"] if one["kind"] == "choice"]
    choice["settings"][0] |= settings


TRAPS: dict[str, Callable[[dict[str, Any], str], object]] = {
    "program": lambda values, code: values["base"]["backend"].update(python=code),
    "program in the space": lambda values, code: a_choice(values, **{"backend.python": code}),
    "model": lambda values, code: values["base"]["model"].update(name=f"{code}:Trap", options={}),
    "data": lambda values, code: values["base"]["data"].update(format=f"{code}:data"),
    "reporter": lambda values, code: values["base"]["report"].update(reporters={f"{code}:Trap": True}),
    "reporter in the space": lambda values, code: a_choice(values, **{"report.reporters": {f"{code}:Trap": True}}),
    "plugins": lambda values, code: values["base"].update(plugins=str(Path(code).with_name("policy.toml"))),
    "plugins in the space": lambda values, code: a_choice(values, plugins=str(Path(code).with_name("policy.toml"))),
    "cluster": lambda values, code: values["base"]["cluster"].update(name="slurm", options={"setup": [code]}),
    "base": on_a_base,
    "plugins beside it": policy_beside,
}


@pytest.mark.parametrize("name", TRAPS)
def test_code_that_only_the_folder_of_a_sweep_names_is_refused_and_not_run(theirs: Path, name: str) -> None:
    code = trap(theirs)
    change(theirs, lambda values: TRAPS[name](values, code))
    with pytest.raises(SpecError, match="not trusted to run code") as refused:
        resume(theirs)
    assert "add --resume" in str(refused.value)
    assert starting.open_sweep(theirs).trials, "its table is shown all the same"
    assert starts(theirs) == [0]
    assert not (theirs.parent / "ran").exists()
    assert "trap" not in sys.modules


def test_a_sweep_goes_on_in_the_folder_in_which_it_was_begun_and_nowhere_else(theirs: Path, monkeypatch) -> None:
    # A trial would import modules that lie in its current folder.
    trap(theirs)
    change(theirs, lambda values: values.update(folder=str(theirs)))
    with pytest.raises(UsageError, match=f"was begun in {theirs}; go there with cd, if the folder is yours"):
        resume(theirs)
    assert os.getcwd() == str(theirs.parent)
    assert starts(theirs) == [0]


def test_code_that_the_user_names_again_is_the_users(tmp_path: Path) -> None:
    (tmp_path / "aug.py").write_text("def make():\n    return None\n")
    own = {**TINY, "report": {**TINY["report"], "reporters": {"aug.py:make": True}}}
    said = {"load": lambda: mtrain.load_spec(own)}
    run(tmp_path / "mine", trials=1, **said)
    with pytest.raises(SpecError, match="not trusted to run code"):
        resume(tmp_path / "mine")
    run(tmp_path / "mine", trials=2, resume=True, **said)
    assert starts(tmp_path / "mine") == [0, 1]
    with pytest.raises(UsageError, match=r"with other settings .*reporters"):
        run(tmp_path / "mine", trials=2, resume=True)


def test_a_sweep_without_code_goes_on_by_its_folder_alone(theirs: Path) -> None:
    resume(theirs)
    assert starts(theirs) == [0, 1]


def damaged_by(folder: Path, statement: str) -> None:
    with contextlib.closing(sqlite3.connect(folder / "study.db")) as opened:
        opened.execute(statement)
        opened.commit()


@pytest.mark.parametrize(
    "statement",
    [
        "update trials set number = 77 where number = 0",
        "update trial_values set value = 'abc'",
        "update trial_intermediate_values set intermediate_value = 'abc'",
        'update trial_params set distribution_json = \'{"name": "os.system", "attributes": {}}\'',
        "delete from studies",
        "create trigger ends after insert on trials begin delete from trials; end",
    ],
)
def test_a_journal_that_no_sweep_writes_is_refused_and_left_as_it_is(theirs: Path, statement: str) -> None:
    damaged_by(theirs, statement)
    before = (theirs / "study.db").read_bytes()
    for act in (starting.open_sweep, resume):
        with pytest.raises(UsageError, match="damaged"):
            act(theirs)
    assert (theirs / "study.db").read_bytes() == before


def test_a_journal_that_is_a_link_is_not_written_through(theirs: Path) -> None:
    outside = theirs.parent / "outside.db"
    (theirs / "study.db").rename(outside)
    (theirs / "study.db").symlink_to(outside)
    before = outside.read_bytes()
    with pytest.raises(UsageError, match="is a link"):
        starting.open_sweep(theirs)
    with pytest.raises(UsageError, match="is a link"):
        resume(theirs)
    assert outside.read_bytes() == before


@pytest.mark.parametrize("name", ["specs", "logs"])
def test_a_file_in_place_of_a_folder_is_a_reason_and_no_traceback(theirs: Path, name: str) -> None:
    if (theirs / name).exists():
        shutil.rmtree(theirs / name)
    (theirs / name).write_text("a file")
    resume(theirs)
    assert starts(theirs) == [0]
    (failed,) = [trial for trial in starting.open_sweep(theirs).trials if trial.number == 1]
    assert "File exists" in failed.user_attrs["reason"]


@pytest.mark.parametrize(
    "edit",
    [
        lambda values: values.update(base={}),
        lambda values: values["base"].update(report=[1]),
        lambda values: values.update(seed=-5),
        lambda values: values["parameters"][0].update(low=5, high=1),
        lambda values: values["parameters"][0].update(low=0, log=True),
        lambda values: values["parameters"][1].update(choices=[], settings=[]),
        lambda values: values["parameters"][1].update(settings=[{}]),
        lambda values: values.update(evil=1),
    ],
)
def test_a_definition_that_no_sweep_writes_is_refused_whole(
    theirs: Path, edit: Callable[[dict[str, Any]], object]
) -> None:
    change(theirs, edit)
    for look in (starting.open_sweep, resume):
        with pytest.raises(UsageError, match="it is not what a sweep writes"):
            look(theirs)
