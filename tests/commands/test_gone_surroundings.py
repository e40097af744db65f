"""The folder in which a command was typed, its output or the disk may be gone: one error says so, without a traceback."""

import io
import os
import sys

import pytest

from mtrain.backends import horovod
from mtrain.commands import main
from mtrain.errors import LaunchError
from mtrain.jobs.run.closing import closing_lines
from mtrain.spec import terminal
from mtrain.spec.files import path_problem


class Full(io.StringIO):
    """An output on a full disk."""

    def write(self, text: str) -> int:
        raise OSError(28, "No space left on device")


VERBS = {
    "plan": ["plan"],
    "train": ["train"],
    "without a verb": [],
    "run": ["run", "x.py"],
    "sweep": ["sweep"],
    "doctor": ["doctor"],
    "config show": ["config", "show"],
    "data check": ["data", "check"],
    "evaluate": ["evaluate"],
    "predict": ["predict", "a.png"],
    "quantise": ["quantise", "x"],
    "submit": ["submit"],
}


@pytest.mark.parametrize("words", VERBS.values(), ids=VERBS)
def test_a_folder_that_was_deleted_under_the_command_is_one_error(words, tmp_path, monkeypatch, capsys):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    try:
        assert main(words) == 2
    finally:
        os.chdir(tmp_path)
    shown = capsys.readouterr()
    assert "Traceback" not in shown.err + shown.out
    assert "the current folder does not exist any more" in shown.err or words == ["predict", "a.png"]


def test_only_a_current_folder_that_is_gone_is_named_so():
    assert path_problem(FileNotFoundError(2, "No such file or directory")) == "", "the current folder exists"


@pytest.mark.parametrize("words", [["plan", "-c", "digits"], ["config", "list"], ["--help"]])
def test_output_for_which_there_is_no_room_is_one_error(words, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdout", Full())
    assert main(words) == 2
    assert "No space left on device; make room" in capsys.readouterr().err


def test_streams_that_the_caller_has_closed_are_opened_on_nothing(monkeypatch):
    for name in ("stdin", "stdout", "stderr"):
        monkeypatch.setattr(sys, name, None)
    before = set(os.listdir("/proc/self/fd"))
    terminal.open_closed_streams()
    streams = (sys.stdin, sys.stdout, sys.stderr)
    terminal.say("to nobody")
    assert sys.stdin.read() == ""
    assert not sys.stdout.isatty()
    for stream in streams:
        stream.close()
    assert set(os.listdir("/proc/self/fd")) == before


def test_a_host_without_an_address_for_its_own_name_is_refused_for_horovod(monkeypatch):
    monkeypatch.setattr(horovod.socket, "gethostname", lambda: "nowhere.invalid")
    with pytest.raises(
        LaunchError, match=r"own name, nowhere\.invalid, has no address .* `127\.0\.1\.1 nowhere\.invalid"
    ):
        horovod.check_own_name()
    monkeypatch.setattr(horovod.socket, "gethostname", lambda: "localhost")
    horovod.check_own_name()


def test_no_folder_that_is_empty_is_listed_at_the_end(tmp_path):
    for name in ("checkpoints", "logs"):
        (tmp_path / name).mkdir()
    (tmp_path / "logs/rank-0.log").touch()
    assert [line.partition(":")[0] for line in closing_lines({}, run_dir=tmp_path)] == ["logs"]
