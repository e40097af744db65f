"""A trace may be anybody's: torn, foreign, endless, or made to harm. It ends in one line, and never in the verdict "different"."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mtrain.commands import main as mtrain_main
from mtrain_trace import command, files, masking, reading, recorder
from tests.trace.test_compare_command import write

CANNOT_TELL = command.CANNOT_TELL


def rank(folder: Path, number: int = 0) -> Path:
    return next(folder.glob(f"rank-{number:05d}-*"))


def facts_with(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = rank(folder) / "process.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return change


def optimizer_with(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        facts = json.loads((rank(folder) / "process.json").read_text())
        facts_with(optimizers=[{**facts["optimizers"][0], **changes}])(folder)

    return change


def lines_with(file: str = "updates.jsonl", **changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = rank(folder) / file
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        path.write_text("".join(json.dumps({**line, **changes}) + "\n" for line in lines))

    return change


def text_of(file: str, content: str | bytes) -> Callable[[Path], None]:
    data = content.encode() if isinstance(content, str) else content
    return lambda folder: (rank(folder) / file).write_bytes(data) and None


def replaced(file: str, make: Callable[[Path], Any]) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = rank(folder) / file
        path.unlink(missing_ok=True)
        make(path)

    return change


def micro_with(**changes: Any) -> Callable[[Path], None]:
    micro = {"loss": 1.0, "samples": ["a"], "targets": [], "modes": [0, 1], "autocast": None}
    return lines_with(micro_batches=[{**micro, **changes}])


ROW = {"digest": "0" * 16, "norm": 1.0, "sketch": [0.0] * 16}
DEEP = "[" * 100_000
BROKEN: dict[str, Callable[[Path], None]] = {
    "no optimizers": facts_with(optimizers=[]),
    "optimizers are none": facts_with(optimizers=None),
    "an optimizer is a word": facts_with(optimizers=["SGD"]),
    "an optimizer without facts": facts_with(optimizers=[{}]),
    "rank is a word": facts_with(rank="first"),
    "ranks are a list": facts_with(ranks=[2]),
    "ranks without end": text_of("process.json", '{"rank": 0, "ranks": 1e400, "optimizers": []}'),
    "facts are a list": text_of("process.json", "[]"),
    "facts are empty": text_of("process.json", ""),
    "facts are torn": text_of("process.json", '{"rank": 0, "ranks'),
    "facts are nested": text_of("process.json", DEEP),
    "facts are bytes": text_of("process.json", b"\xff\xfe\x00\x01"),
    "facts are a pipe": replaced("process.json", os.mkfifo),
    "facts are endless": replaced("process.json", lambda path: path.symlink_to("/dev/zero")),
    "facts are a folder": replaced("process.json", Path.mkdir),
    "updates are a pipe": replaced("updates.jsonl", os.mkfifo),
    "updates are endless": replaced("updates.jsonl", lambda path: path.symlink_to("/dev/zero")),
    "updates are a folder": replaced("updates.jsonl", Path.mkdir),
    "updates are missing": replaced("updates.jsonl", lambda path: None),
    "updates lead nowhere": replaced("updates.jsonl", lambda path: path.symlink_to("nowhere")),
    "arrays are a pipe": replaced("arrays.jsonl", os.mkfifo),
    "updates are empty": text_of("updates.jsonl", ""),
    "updates are words": text_of("updates.jsonl", "one\ntwo\n"),
    "updates are numbers": text_of("updates.jsonl", "1\n2\n"),
    "updates are nested": text_of("updates.jsonl", DEEP + "\n"),
    "an integer of many digits": text_of("updates.jsonl", '{"update": ' + "9" * 5000 + "}\n"),
    "an update without facts": text_of("updates.jsonl", "{}\n"),
    "updates of no optimizer": lines_with(optimizer=7),
    "an update is a word": lines_with(update="x"),
    "micro batches are a number": lines_with(micro_batches=3),
    "rates are none": lines_with(rates=None),
    "rates are words": lines_with(rates=["lr"]),
    "a digest is a word": lines_with(weights={**ROW, "digest": "zz"}),
    "a sketch is a word": lines_with(weights={**ROW, "sketch": "long"}),
    "a sketch is empty": lines_with(weights={**ROW, "sketch": []}),
    "a row is a list": lines_with(weights=[1, 2]),
    "a clip is a number": lines_with(clip=1),
    "a loss is a word": micro_with(loss="low"),
    "a loss is a huge integer": micro_with(loss=10**400),
    "samples are a number": micro_with(samples=5),
    "samples are lists": micro_with(samples=[[1]]),
    "groups are numbers": optimizer_with(groups=5),
    "shapes are words": optimizer_with(shapes="square", groups=[["v"]]),
    "a negative square": text_of("arrays.jsonl", '{"update": 0, "optimizer": 0, "weights": {"w": ["0", -1, [0]]}}\n'),
    "weights of arrays are a list": text_of("arrays.jsonl", '{"update": 0, "optimizer": 0, "weights": []}\n'),
    "arrays without facts": text_of("arrays.jsonl", "{}\n"),
    "saves are numbers": facts_with(ranks=2, saves=[[1]]),
    "epochs are words": lambda folder: [facts_with(ranks=2)(folder), text_of("epochs.jsonl", '{"epoch": "x"}\n')(folder)][0],
}  # fmt: skip


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain") / "plain"
    write(folder)
    return folder


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_trace_is_one_line_and_no_verdict(
    tmp_path: Path, plain: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "t")
    BROKEN[name](tmp_path / "t")
    for pair in ((plain, tmp_path / "t"), (tmp_path / "t", plain), (tmp_path / "t", tmp_path / "t")):
        code = command.main(["compare", *map(str, pair)])
        told = capsys.readouterr()
        if code in (command.SAME, command.DIFFERENT):  # what is broken is not needed
            assert name in HARMLESS, (code, told)
            continue
        assert code in (command.WRONG_USE, CANNOT_TELL)
        assert len(told.err.splitlines()) == 1
        assert told.err.startswith("error: ")
    assert mtrain_main(["compare", str(plain), str(tmp_path / "t")]) == code or name in HARMLESS
    assert "Traceback" not in capsys.readouterr().err


HARMLESS = {"shapes are words"}
"""Of these, nothing is needed where both sides have the same arrays."""


def test_ranks_without_number_are_not_counted(tmp_path: Path) -> None:
    write(tmp_path / "t")
    facts_with(ranks=10**9)(tmp_path / "t")
    (remark,) = reading.read(tmp_path / "t").remarks
    assert "ranks [1, 2, 3, 4, 5, 6, 7, 8] and more of 1000000000 left no trace" in remark


def test_what_the_reader_holds_already_is_no_part_of_a_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A notebook may hold more than a trace may take."""
    write(tmp_path / "t")
    monkeypatch.setattr(files, "MAX_MEMORY_BYTES", 8 << 20)
    held = b"x" * (64 << 20)
    assert reading.read(tmp_path / "t").updates
    monkeypatch.setattr(files, "MAX_MEMORY_BYTES", -1)
    with pytest.raises(files.CannotTell, match="memory"):
        reading.read(tmp_path / "t")
    assert held


@pytest.mark.job
@pytest.mark.smoke
@pytest.mark.parametrize("kind", ["facts", "line", "lines"])
def test_large_traces_end_before_they_take_the_memory(tmp_path: Path, kind: str) -> None:
    write(tmp_path / "t")
    path = rank(tmp_path / "t") / ("process.json" if kind == "facts" else "updates.jsonl")
    with path.open("wb") as file:
        if kind == "lines":  # each sample is a word of its own
            for number in range(60):
                samples = ",".join(f'"{number * 100_000 + place}"' for place in range(100_000))
                micro = f'[{{"loss": 1, "samples": [{samples}], "targets": [], "modes": null, "autocast": null}}]'
                head = f'{{"update": {number}, "optimizer": 0, "micro_batches": {micro}, "clip": null, "rates": [], '
                file.write((head + '"rng": null, "steps": null, "weights_changed_outside": false}\n').encode())
        else:
            file.truncate(3 << 30)  # sparse
    program = (
        "import resource; resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30)); "
        f"from mtrain_trace import command, files; files.MAX_MEMORY_BYTES = {300 << 20}; "
        f"raise SystemExit(command.main(['compare', {str(tmp_path / 't')!r}, {str(tmp_path / 't')!r}]))"
    )
    environ = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environ, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == CANNOT_TELL, done.stderr
    assert "MiB" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_no_control_character_of_a_trace_reaches_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    evil = "\x1b]0;title\x07\u202e"
    write(tmp_path / "a")
    write(tmp_path / "b", rate=0.2)
    for name in "ab":
        optimizer_with(rule=f"SGD{evil}", unseen=[evil])(tmp_path / name)
        facts_with(stacks=[evil], torch=evil, framework="torch")(tmp_path / name)
    assert command.main(["compare", str(tmp_path / "a"), str(tmp_path / "b")]) == command.DIFFERENT
    text_of("process.json", f'{{"form": "{evil}"}}'.replace("\x1b", "\\u001b").replace("\x07", "\\u0007"))(
        tmp_path / "a"
    )
    assert command.main(["compare", str(tmp_path / "a"), str(tmp_path / "b")]) == command.WRONG_USE
    told = capsys.readouterr()
    assert "\\u001b]0;title" in told.out
    assert "\\u001b" in told.err
    assert not set("\x1b\x07\u202e") & set(told.out + told.err)


def test_a_trace_is_its_owners_alone_and_holds_no_secret_of_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [
        "train.py",
        "--api-key",
        "abcdef123456",
        "--lr",
        "0.1",
        "--token=abc",
        "s3://user:word@host/x",
        "hf_" + "a" * 20,
    ]
    monkeypatch.setattr(sys, "argv", words)
    before = os.umask(0)
    try:
        out = recorder.Recorder(str(tmp_path / "t"))
        out.describe(recorder.facts_of_process())
        out.write(recorder.UPDATES, {})
        out.close()
    finally:
        os.umask(before)
    (folder,) = (tmp_path / "t").iterdir()
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}
    shown = json.loads((folder / recorder.PROCESS).read_text())["command"]
    assert shown == ["train.py", "--api-key", "***", "--lr", "0.1", "--token=***", "***", "***"]
    assert masking.mask_words(["--secret", "--lr", "1"]) == ["--secret", "--lr", "1"]


def test_nothing_but_the_door_opens_or_prints_what_a_trace_holds() -> None:
    package = Path(files.__file__).parent
    readers = ("reading", "rank_checks", "comparing", "causes", "wording", "command", "bisecting")
    for name in readers:
        text = (package / f"{name}.py").read_text()
        for word in ("json.load", "open(", "read_text", "print("):
            allowed = word == "open(" and name in ("command", "bisecting")  # /dev/null, and a log that is written
            assert word not in text or allowed, (name, word)


def test_what_two_trainings_cannot_be_told_by_has_an_exit_code_of_its_own(
    tmp_path: Path, plain: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "two")
    path = rank(tmp_path / "two") / "process.json"
    facts = json.loads(path.read_text())
    facts_with(optimizers=facts["optimizers"] * 2)(tmp_path / "two")
    lines = (rank(tmp_path / "two") / "updates.jsonl").read_text()
    text_of("updates.jsonl", lines + lines.replace('"optimizer": 0', '"optimizer": 1'))(tmp_path / "two")
    assert command.main(["compare", str(plain), str(tmp_path / "two")]) == CANNOT_TELL
    assert "A has 1 optimizer(s), B 2" in capsys.readouterr().out
    assert mtrain_main(["compare", str(plain), str(tmp_path / "two")]) == CANNOT_TELL
    write(tmp_path / "other", rate=0.2)
    assert mtrain_main(["compare", str(plain), str(tmp_path / "two"), str(tmp_path / "other")]) == command.DIFFERENT
    write(tmp_path / "nothing")
    lines_with(micro_batches=[])(tmp_path / "nothing")
    for line in ("weights", "gradients"):
        path = rank(tmp_path / "nothing") / "updates.jsonl"
        path.write_text(path.read_text().replace(f'"{line}"', '"unknown"'))
    assert command.main(["compare", str(tmp_path / "nothing"), str(tmp_path / "nothing")]) == CANNOT_TELL
    assert "hold nothing that can be compared" in capsys.readouterr().err


def test_an_error_of_the_program_itself_is_no_verdict(
    plain: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: Any) -> None:
        raise AssertionError("a mistake")

    monkeypatch.setattr("mtrain_trace.command.causes.explain", fail)
    assert command.main(["compare", str(plain), str(plain)]) == CANNOT_TELL
    assert mtrain_main(["compare", str(plain), str(plain)]) == CANNOT_TELL
    told = capsys.readouterr().err.splitlines()
    assert ["AssertionError: a mistake" in line for line in told] == [True, True]


def test_ranks_that_have_made_other_numbers_of_updates_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "t")
    further = tmp_path / "t" / "rank-00001-host-2"
    further.mkdir()
    for name in ("process.json", "updates.jsonl"):
        (further / name).write_text((rank(tmp_path / "t") / name).read_text().replace('"rank": 0', '"rank": 1'))
    (further / "updates.jsonl").write_text((further / "updates.jsonl").read_text().splitlines()[0] + "\n")
    for folder in ("t",):
        facts_with(ranks=2)(tmp_path / folder)
    assert command.main(["compare", str(tmp_path / "t"), str(tmp_path / "t")]) == command.SAME
    told = capsys.readouterr().out
    assert "its ranks have made other numbers of updates; 1 of 2, which some ranks have not made, are left out" in told
    assert "SAME BITS over 1 updates" in told
