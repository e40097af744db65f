"""Names, messages and log lines that others have written: no control character reaches the terminal, none is a command."""

import ast
import json
import logging
from io import StringIO
from pathlib import Path

import pytest

from mtrain.commands import main
from mtrain.core.interfaces.queue import QueuedJob
from mtrain.errors import MtrainError, UsageError
from mtrain.records.console import Notes, Plain, Quiet
from mtrain.records.rich import Rich
from mtrain.spec import config, identifiers, terminal
from tests.sources import nodes, source_files

CLEAR, TITLE, RED = "\x1b[2J\x1b[H", "\x1b]0;owned\x07", "\x1b[31m"
NASTY = f"cat{CLEAR}{TITLE}{RED}\r\u202egod\udcff\x9b2J"


def is_safe(text: str) -> bool:
    """Return whether a terminal would show the text as it is, colours of the display aside."""
    return not any(letter in text for letter in "\x07\x9b\u202e\udcff") and CLEAR not in text and "\x1b]" not in text


def test_control_characters_become_visible_and_other_text_stays():
    assert terminal.printable("größe 猫 🐈\u200d⬛ a\u00a0b\tc\nd\r\ne") == "größe 猫 🐈\u200d⬛ a\u00a0b\tc\nd\ne"
    assert terminal.printable("a\x1b[1;31mb\x1b[0m") == "ab"
    assert terminal.printable("\x1b[2J\x07\r\x00\x7f\x9b\u2028\u202e\ud800") == (
        r"\u001b[2J\u0007\u000d\u0000\u007f\u009b\u2028\u202e\ud800"
    )
    assert terminal.one_line("a\n\tb") == r"a\u000a\u0009b"
    assert terminal.printable("x" * 10, limit=3) == "xxx"


def test_json_text_keeps_its_value():
    value = {"name": "a\x7f\x9b\u202eb"}
    assert json.loads(terminal.printable(json.dumps(value, ensure_ascii=False))) == value


@pytest.mark.parametrize("kind", [Quiet, Notes, Plain, Rich])
@pytest.mark.parametrize("is_terminal", [False, True])
def test_displays_print_names_and_messages_without_their_control_characters(kind, is_terminal):
    class Stream(StringIO):
        def isatty(self) -> bool:
            return is_terminal

    stream = Stream()
    display = kind(stream) if kind in (Quiet, Notes) else kind(stream, title=NASTY)
    display.start({"kind": "start", "model": NASTY})
    display.note(NASTY)
    display.message({"kind": "warning", "message": NASTY})
    display.message({"kind": "note", "message": NASTY})
    display.update({"update": 0, "total_updates": 1, "losses": {NASTY: 1.0}, "samples_per_second": 1.0, "unit": NASTY})
    display.evaluation({"epoch": 1, "update": 1, "metrics": {NASTY: 1.0}})
    display.tick()
    display.close()
    assert is_safe(stream.getvalue()), stream.getvalue()
    assert "cat" in stream.getvalue()


def test_commands_print_names_of_files_and_warnings_without_their_control_characters(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "runs" / NASTY
    (run / "checkpoints" / f"step-{NASTY.replace('/', '')}").mkdir(parents=True)
    (tmp_path / f"{NASTY}.yml").write_bytes(b"\xff")
    for words in (
        ["train", "--resume", f"runs/{NASTY}"],
        ["checkpoint", "list", f"runs/{NASTY}"],
        ["evaluate", "--run", f"runs/{NASTY}"],
        ["report", f"runs/{NASTY}"],
        ["plan", "-c", f"{NASTY}.yml"],
        ["weights", "show", f"{NASTY}.yml"],
        [
            *("data", "check", "-c", "digits", "-o", f"data.root={tmp_path / 'a'}{NASTY[:10]}"),
            *("-o", "data.options.train=8", "-o", "data.options.val=8", "-o", "data.options.size=64"),
        ],
    ):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(logging, "lastResort", logging.StreamHandler())
            code = main(words)
        out, err = capfd.readouterr()
        assert is_safe(out + err), (words, out, err)
        assert "Traceback" not in err, err
        assert (code, bool(out + err)) in ((2, True), (0, True)), (words, out, err)


# ------------------------------------------------------------------------------------------------------------ job records
def record(folder: Path, **changes: object) -> None:
    """Write the record of a job, with ``changes``."""
    fields = {
        "cluster": "slurm",
        "id": "12",
        "name": "digits",
        "folder": str(folder),
        "request": str(folder / "job.sbatch"),
        "options": {},
        "submitted": 1.0,
    }
    path = folder / "runs" / ".submitted" / "digits" / "job.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**fields, **changes}))


@pytest.fixture
def called(tmp_path, monkeypatch) -> Path:
    """A file that commands of Slurm would write to."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("scancel", "scontrol", "sacct", "squeue"):
        (folder / name).write_text(f'#!/bin/sh\necho "$0 $@" >> {tmp_path / "called"}\n')
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "called"


@pytest.mark.parametrize(
    "changes",
    [
        {"id": "--user=root"},
        {"id": "-u root"},
        {"id": "1 2"},
        {"id": "../../namespaces/x"},
        {"id": f"1{NASTY}".encode("utf-8", "replace").decode()},
        {"id": 7},
        {"id": ""},
        {"name": "../../x"},
        {"name": "-x"},
        {"cluster": ["slurm"]},
        {"options": "x"},
        {"submitted": "now"},
    ],
    ids=str,
)
@pytest.mark.parametrize("command", ["cancel", "status", "logs"])
def test_a_record_with_another_kind_of_id_reaches_no_command_of_the_scheduler(
    tmp_path, called, changes, command, capfd
):
    record(tmp_path, **changes)
    assert main([command]) == 2
    error = capfd.readouterr().err
    assert "job.json" in error
    assert "Traceback" not in error
    assert is_safe(error)
    assert not called.exists()


@pytest.mark.smoke
@pytest.mark.job
def test_a_good_record_reaches_scancel_as_its_id(tmp_path, called, capfd):
    record(tmp_path)
    assert main(["cancel"]) == 0, capfd.readouterr().err
    assert "scancel 12" in called.read_text()


def test_plugins_cannot_make_a_job_with_an_option_for_an_id(tmp_path):
    with pytest.raises(UsageError, match="letter or a digit"):
        QueuedJob(cluster="x", id="--all", name="a", folder=tmp_path, request=tmp_path)


# ------------------------------------------------------------------------------------------------------------- run names
@pytest.mark.parametrize(
    "name", ["../../x", "..", ".", "a/b", "/etc/x", ".hidden", "-x", "", " a", "a\nb", RED, "x" * 201]
)
def test_a_run_name_that_is_no_single_folder_is_refused(tmp_path, name):
    with pytest.raises(MtrainError, match=r"one folder.*report\.dir"):
        config.load("vit_digits", overrides=[f"report.name={json.dumps(name)}"], environ={})


def test_a_refused_name_is_shown_with_one_backslash_before_a_control_character():
    for check in (identifiers.checked_run_name, identifiers.checked_job_id):
        with pytest.raises(UsageError, match=r"'a\\u000ab'"):
            check("a\nb")


@pytest.mark.parametrize("name", ["a", "digits-2", "2024.05.01 größe", "x" * 200, "a=b,c+d@e"])
def test_other_run_names_are_taken_as_they_are(name):
    spec = config.load("vit_digits", overrides=[f"report.name={json.dumps(name)}"], environ={}).spec
    assert spec.report.name == name


def test_the_file_of_a_spec_cannot_name_a_run_that_leads_out_of_the_folder_of_runs(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "...yml").write_text("model: {}\n")
    assert main(["plan", "-c", "...yml"]) == 2
    assert "Traceback" not in capfd.readouterr().err


# ------------------------------------------------------------------------------------------------------------ the source
PRINTS = {
    "spec/terminal.py": "the one place",
    "records/console.py": "control characters of the display, around safe text",
}
RANKS_AND_PROBES = (
    "backends",
    "launchers",
    "mtrain_kit",
    "mtrain_clusters/_ray",
    "mtrain_language/meshes/estimate.py",
    "mtrain_tensorflow",
    "rank",
    "_probe.py",
    "outline.py",
    "interpreter.py",
)
"""Programs whose output goes to a log or a pipe."""


def test_every_module_that_prints_does_it_through_terminal():
    found = {
        name
        for name, file in source_files().items()
        if not any(part in name for part in RANKS_AND_PROBES)
        for node in nodes(file)
        if isinstance(node, ast.Call)
        and (
            (isinstance(node.func, ast.Attribute) and node.func.attr in ("echo", "secho"))
            or (getattr(node.func, "id", "") == "print" and "getpid" not in ast.unparse(node))
        )
    }
    assert found - set(PRINTS) == set()
