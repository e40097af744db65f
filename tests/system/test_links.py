"""A run folder of somebody else holds links to files elsewhere: nothing is written there."""

import ast
import errno
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mtrain.commands import main
from mtrain.spec import outputs
from mtrain.spec.files import path_problem
from mtrain.system import runfolder
from mtrain.system.runfolder import RunFolder
from tests import warm
from tests.once import once
from tests.sources import nodes, source_files
from tests.starts import starts_processes

pytestmark = pytest.mark.smoke

QUICK = ["train.updates=4", "train.epochs=null", "train.batch_size=8", "data.workers=0", "checkpoint.every_updates=2"]
FILES = [
    ".lock-0",
    "spec.next.yml",
    "metrics.jsonl",
    "summary.json",
    "hosts.jsonl",
    "logs/rank-0.log",
    "failures/rank-0.json",
    "checkpoints/step-00000006",
]
FOLDERS = ["logs", "tensorboard", "checkpoints", "live"]


@pytest.fixture(scope="module", autouse=True)
def mask() -> Iterator[None]:
    """Keep this process's mask, which the command line changes."""
    before = os.umask(0o022)
    os.umask(before)
    yield
    os.umask(before)


@pytest.fixture(scope="module")
@starts_processes
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``runs/small``, four updates on one rank."""
    values = [word for value in QUICK for word in ("-o", value)]
    words = [
        "-c",
        "vit_digits",
        "-b",
        "solo",
        "--devices",
        "cpu",
        "--name",
        "small",
    ]

    def train(folder: Path) -> None:
        done = warm.run("train", *words, "-o", f"report.dir={folder / 'runs'}", *values, cwd=folder)
        assert done.returncode == 0, done.stderr

    return once(tmp_path_factory, "links", train) / "runs" / "small"


def contents(folder: Path) -> dict[str, tuple[bytes | None, int]]:
    """Return name -> content and kind of everything in a folder."""
    return {
        str(path.relative_to(folder)): (
            path.read_bytes() if path.is_file() else None,
            stat.S_IFMT(path.lstat().st_mode),
        )
        for path in sorted(folder.rglob("*"))
    }


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A folder of the user that a link of the run folder leads to."""
    folder = tmp_path / "outside"
    (folder / "deep").mkdir(parents=True)
    (folder / "file").write_text('{"kept": true}')
    (folder / "deep" / "file").write_text("kept too")
    return folder


@pytest.mark.parametrize("name", [*FILES, *FOLDERS, "absent", "new folder"])
def test_a_link_out_of_the_run_folder_is_refused_and_nothing_is_written_there(trained, outside, tmp_path, name, capfd):
    run = shutil.copytree(trained, tmp_path / "run", symlinks=True)
    # The last two are links to what does not exist: it would be made.
    link = run / {"absent": "metrics.jsonl", "new folder": "logs"}.get(name, name)
    target = {"absent": outside / "made", "new folder": outside / "made"}.get(
        name, outside / ("file" if name in FILES and not name.startswith("checkpoints") else "deep")
    )
    if link.is_dir() and not link.is_symlink():
        shutil.rmtree(link)
    link.unlink(missing_ok=True)
    link.symlink_to(os.path.relpath(target, link.parent))
    if name == "checkpoints":  # A checkpoint is read through the link; writing beside it would be the harm.
        shutil.copytree(trained / "checkpoints" / "step-00000004", outside / "deep" / "step-00000004")
    before = contents(outside)
    code = main(["train", "--resume", str(run), "-o", "train.updates=6"])
    error = capfd.readouterr().err
    assert contents(outside) == before
    assert code == 2, error
    assert str(link) in error
    assert "link" in error
    assert "Traceback" not in error


def test_links_above_the_run_folder_and_links_that_stay_in_it_are_followed(trained, tmp_path):
    """The run folder on another disk, reached through a link, in a folder of runs that is a link too."""
    disk = tmp_path / "disk" / "store"
    disk.mkdir(parents=True)
    shutil.copytree(trained, disk / "small", symlinks=True)
    (tmp_path / "runs").symlink_to(disk.parent)
    linked = tmp_path / "runs" / "linked"
    linked.symlink_to("store/small")
    (linked / "logs" / "first.log").symlink_to("rank-0.log")
    assert main(["train", "--resume", str(linked), "-o", "train.updates=5"]) == 0
    assert (disk / "small" / "checkpoints" / "step-00000005").is_dir()


@pytest.mark.parametrize("place", ["link", "inside/link"])
def test_a_link_out_of_a_folder_is_found_in_its_folders_too(tmp_path, place):
    (tmp_path / "run/inside").mkdir(parents=True)
    (tmp_path / "run/inside/stays").symlink_to("../file")
    outputs.refuse_links_out(tmp_path / "run")
    (tmp_path / "run" / place).symlink_to(tmp_path / "outside")
    with pytest.raises(OSError, match=place):
        outputs.refuse_links_out(tmp_path / "run")


WRITERS: dict[str, Callable[[Path], object]] = {
    "append": lambda path: outputs.open_to_write(path, "a").close(),
    "truncate": lambda path: outputs.open_to_write(path, "w").close(),
    "update": lambda path: outputs.open_to_write(path, "rb+").close(),
}


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("kind", ["link", "broken link", "pipe", "device"])
def test_only_regular_files_are_opened_for_writing(tmp_path, kind, writer):
    path, target = tmp_path / "file", tmp_path / "target"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path = Path("/dev/null")
    else:
        path.symlink_to(target)
    if kind == "link":
        target.write_text("kept")
    with pytest.raises(OSError):  # noqa: PT011  # each kind has its own errno
        WRITERS[writer](path)
    assert target.exists() == (kind == "link")
    assert kind != "link" or target.read_text() == "kept"


def test_a_replaced_file_takes_the_place_of_a_link(tmp_path):
    (tmp_path / "target").write_text("kept")
    (tmp_path / "file").symlink_to("target")
    outputs.write_text(tmp_path / "file", "new")
    assert not (tmp_path / "file").is_symlink()
    assert ((tmp_path / "file").read_text(), (tmp_path / "target").read_text()) == ("new", "kept")


def test_a_file_that_could_not_be_written_whole_leaves_the_old_one_and_nothing_else(tmp_path):
    (tmp_path / "file").write_text("old")

    def fail() -> None:
        with outputs.replace(tmp_path / "file") as file:
            file.write(b"half")
            raise OSError("no room")

    with pytest.raises(OSError, match="no room"):
        fail()
    assert contents(tmp_path) == {"file": (b"old", stat.S_IFREG)}


def test_a_disk_that_takes_no_more_is_told_with_the_name_of_the_file(tmp_path, monkeypatch, capfd):
    (tmp_path / "file.onnx").write_text("good")

    def write_half() -> None:
        with outputs.replaced_by(tmp_path / "file.onnx") as new:
            assert (new.parent, new.suffix) == (tmp_path, ".onnx")
            new.write_text("half")
            raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space left") as told:
        write_half()
    assert [path.read_text() for path in tmp_path.iterdir()] == ["good"]
    expected = f"{tmp_path / 'file.onnx'}: cannot be written: No space left on device; make room on that disk"
    assert path_problem(told.value).startswith(expected)

    def fails(*arguments, **options):
        raise told.value

    monkeypatch.setattr("mtrain.commands.front.main", fails)
    assert main(["plan"]) == 2
    assert capfd.readouterr().err.startswith(f"error: {expected}")


LIBRARIES = {"onnx.save", "save_file", "imwrite", "savefig", "imsave"}
"""Calls with which libraries write files that a person has named or keeps."""
MADE_ANEW = {
    "mtrain_deploy/exporting/onnx_file.py": "a work folder, from which the file is moved when it is complete",
    "records/plots.py": "the content of a page, in memory",
    "rank/script/pictures.py": "the content of a picture, in memory",
    "compare/referee_jobs.py": "a folder of this comparison",
}


def test_what_libraries_write_takes_the_place_of_a_file_in_one_step():
    found = set()
    ends = {name.rpartition(".")[2] for name in LIBRARIES}
    for module, file in source_files().items():
        within = [
            (node.lineno, node.end_lineno)
            for node in nodes(file)
            if isinstance(node, ast.With) and any("replace" in ast.unparse(item) for item in node.items)
        ]
        for node in nodes(file):
            if not isinstance(node, ast.Call) or getattr(node.func, "attr", getattr(node.func, "id", "")) not in ends:
                continue
            name = ast.unparse(node.func)
            is_one = name in LIBRARIES or name.rpartition(".")[2] in LIBRARIES
            if is_one and not any(first <= node.lineno <= last for first, last in within):
                found.add(module)
    assert found == set(MADE_ANEW)


def test_a_long_name_leaves_room_for_the_temporary_one(tmp_path):
    outputs.write_bytes(tmp_path / ("é" * 127), b"x")
    assert [len(path.name) for path in tmp_path.iterdir()] == [127]


def test_a_lock_that_is_a_link_is_refused_by_every_host_of_a_job(tmp_path, outside):
    run = RunFolder(tmp_path / "run", node=3)
    run.make()
    (run.path / ".lock-3").symlink_to(outside / "file")
    with pytest.raises(runfolder.UsageError, match="link"), runfolder.take_folder(run, node=3):
        pass
    assert (outside / "file").read_text() == '{"kept": true}'


# --------------------------------------------------------------------------------------------------------- the source
ELSEWHERE = {
    "mtrain_kit/skeleton.py": "a new folder that the user names",
    "tasks/detection/convert.py": "a new folder that the user names",
    "tasks/detection/readers/digits.py": "a new folder, renamed when it is complete",
    "tasks/segmentation/readers/digits_masks.py": "a new folder, renamed when it is complete",
    "data/once_per_host.py": "a file of this user alone in the temporary folder, with O_NOFOLLOW",
    "data/generated.py": "a new folder, renamed when it is complete",
    "system/copied.py": "descriptors of this process",
    "core/checkpoint/store.py": "a new folder, renamed when it is complete",
    "spec/terminal.py": "the device that takes everything",
    "system/stacks.py": "a file in memory",
    "system/attempts.py": "a lock that is kept open, with O_NOFOLLOW",
}
"""Files that write without ``mtrain.spec.outputs``, and where to."""


def writes_by_itself(call: ast.Call) -> bool:
    """Return whether a call opens a file for writing."""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    owner = getattr(getattr(call.func, "value", None), "id", "")
    if name in {"write_text", "write_bytes", "touch"}:
        return owner != "outputs" and isinstance(call.func, ast.Attribute)
    if name in {"copy2", "copyfile", "copy", "copytree"}:
        return owner == "shutil"
    if name != "open":
        return False
    words = [node.value for node in ast.walk(call) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    names = {node.attr for node in ast.walk(call) if isinstance(node, ast.Attribute)}
    return bool(names & {"O_WRONLY", "O_RDWR", "O_CREAT"}) or any(
        set(word) <= set("rwaxbt+") and set(word) & set("wax+") for word in words
    )


def test_every_module_that_writes_into_folders_of_others_does_it_through_outputs():
    found = {
        name
        for name, file in source_files().items()
        for node in nodes(file)
        if isinstance(node, ast.Call) and writes_by_itself(node) and (name in ELSEWHERE or "mtrain_kit/" not in name)
    }
    assert found - set(ELSEWHERE) == set()
    assert set(ELSEWHERE) - found == set()
