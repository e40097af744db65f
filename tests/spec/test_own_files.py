"""Files that a user names are read only where they are regular and small: a pipe is not waited for, a device not read."""

import ast
import os
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mtrain.commands import main
from tests.sources import nodes, source_files

SECONDS = 60


@pytest.fixture(autouse=True)
def no_hang() -> Iterator[None]:
    def ring(*_: object) -> None:
        raise TimeoutError(f"still at work after {SECONDS} seconds")

    former = signal.signal(signal.SIGALRM, ring)
    signal.alarm(SECONDS)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, former)


def pipe(path: Path) -> None:
    os.mkfifo(path)


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def folder(path: Path) -> None:
    path.mkdir()


def listening(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as opened:
        opened.bind(str(path))  # a relative name: long ones are no addresses


def eight_megabytes(path: Path) -> None:
    path.write_text("class Own: pass\nx = [" + "1," * (4 << 20) + "]\n")


def nested(path: Path) -> None:
    path.write_text("class Own: pass\nx = " + "1 + " * 100_000 + "1\n")


KINDS = (pipe, device, folder, listening, eight_megabytes, nested)
COMMANDS = {
    "model": ("plan", "-o", "model.name={file}:Own"),
    "data set": ("plan", "-o", "data.format={file}:Own"),
    "reporter": ("plan", "-o", "report.to=[{file}:Own]"),
    "script": ("run", "--backend", "solo", "{file}"),
    "spec": ("plan", "-c", "{file}"),
}


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("what", COMMANDS)
def test_a_file_of_another_kind_is_refused_and_not_waited_for(
    what: str, kind: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    kind(Path("own.py"))  # type: ignore[operator]
    code = main([word.format(file=tmp_path / "own.py") for word in COMMANDS[what]])
    stderr = capsys.readouterr().err
    assert code == 2, stderr
    assert "own.py" in stderr
    assert "Traceback" not in stderr
    assert len(stderr) < 4000


@pytest.mark.job
def test_an_enormous_file_of_code_takes_little_memory(tmp_path: Path) -> None:
    eight_megabytes(tmp_path / "own.py")
    limit = 2 << 30
    command = [sys.executable, "-m", "mtrain", "plan", "-o", f"model.name={tmp_path / 'own.py'}:Own"]
    ended = subprocess.run(
        command,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)),
    )
    assert ended.returncode == 2, ended.stderr
    assert "own.py" in ended.stderr


ALLOWED = {
    "files of mtrain or of a library": (
        "core/compiling.py mtrain_kit/skeleton.py system/interpreter.py system/interpreter_probe.py records/html.py "
        "data/images/handwritten.py mtrain_ui/pages/app.py mtrain_ui/pages/rendering.py mtrain_deploy/serving/page.py "
        "mtrain_language/readers/python_docs.py"
    ),
    "files of the kernel": (
        "system/copied.py jobs/hosts/agent.py spec/bounds.py system/proc.py jobs/preflight/facts.py launchers/withheld.py "
        "system/placement.py system/vectors.py data/once_per_host.py jobs/watch/looks.py system/memory.py"
    ),
    "files that the same job has just written": (
        "jobs/plan/micro_batch.py commands/predict.py mtrain_clusters/_kubernetes/queue.py compare/jobs.py "
        "mtrain_deploy/exporting/job.py mtrain_deploy/commands/prune.py mtrain_deploy/pruning/worker.py "
        "mtrain_deploy/exporting/rank.py rank/spec/predict.py rank/worker.py "
        "records/reporters/tensorboard.py mtrain_ui/trackers/tracker.py mtrain_ui/trackers/visualdl.py system/runfolder.py "
        "tasks/detection/convert.py mtrain_kit/check_context.py mtrain_kit/kit.py mtrain_kit/plugin_kit.py mtrain_kit/rank_records.py "
        "mtrain_kit/ranks.py mtrain_kit/test_conformance.py"
    ),
    "a mounted secret; an object store": ("mtrain_clusters/_kubernetes/client.py weights/backup/place.py"),
}
"""Modules that open files without `mtrain.spec.files`, with the reason why nobody else chooses the file."""


def opens_by_itself(file: Path) -> bool:
    """Return whether a module reads a path by other means than `mtrain.spec.files`."""
    for node in nodes(file):
        if isinstance(node, ast.Call):
            called = node.func
            method = called.attr if isinstance(called, ast.Attribute) else ""
            name = method or (called.id if isinstance(called, ast.Name) else "")
            modes = [a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
            if method in ("read_bytes", "read_text") or (name == "open" and {"r", "rb"} & set(modes)):
                return True
    return False


def test_files_that_others_choose_are_opened_in_one_place() -> None:
    found = {name for name, file in source_files().items() if opens_by_itself(file)}
    assert found == {name for names in ALLOWED.values() for name in names.split()}
