"""Annotations that the ranks of one host share: one reads, all map the same file, and nothing is left behind."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest

from mtrain.data import once_per_host
from mtrain.data.once_per_host import Form, read_once
from mtrain.errors import DataError

RANK = """
import json, os, sys
from pathlib import Path
from mtrain.core.interfaces import SplitRequest
from mtrain.tasks.detection.readers import coco
parsed = []
real = coco.read_coco_json
coco.read_coco_json = lambda file: parsed.append(1) or real(file)
split = coco.Coco().read(SplitRequest(root=Path(sys.argv[1]), split="train"))
own = Path("/proc/self/smaps").read_text().split("\\n")
print(json.dumps({
    "parsed": len(parsed), "images": len(split), "names": split.class_names, "problems": split.problems,
    "sum": float(sum(sample.boxes.sum() for sample in split.samples)),
    "rows": [str(split.samples[7].path), split.images[7].file_name, split.samples[7].image_id],
    "truth": split.ground_truth["annotations"][:3],
    "mapped": any("mtrain-once-" in line for line in own),
}), flush=True)
sys.stdin.read()  # a rank of a job does not end before the others have read
"""


def write_coco(folder: Path, images: int) -> None:
    sizes = [{"id": i + 1, "file_name": f"{i:05d}.jpg", "width": 640, "height": 480} for i in range(images)]
    boxes = [
        {"id": i + 1, "image_id": i // 2 + 1, "category_id": 1 + i % 2, "bbox": [i % 300, 5, 20, 30], "iscrowd": 0}
        for i in range(2 * images)
    ]
    names = [{"id": 1, "name": "cat"}, {"id": 2, "name": "dog"}]
    (folder / "annotations").mkdir(parents=True)
    content = {"images": sizes, "annotations": boxes, "categories": names}
    (folder / "annotations" / "instances_train.json").write_text(json.dumps(content))
    (folder / "train").mkdir()
    (folder / "train" / "00000.jpg").touch()


def read_on_ranks(folder: Path, count: int, *, told: int) -> list[dict]:
    """What each of ``count`` processes of one parent has read, where the launcher says that there are ``told``."""
    (folder / "tmp").mkdir(exist_ok=True)
    environ = {**os.environ, "TMPDIR": str(folder / "tmp"), "LOCAL_WORLD_SIZE": str(told)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    ranks = [subprocess.Popen([sys.executable, "-c", RANK, str(folder)], env=environ, **pipes) for _ in range(count)]
    found = [json.loads(rank.stdout.readline()) for rank in ranks]
    for rank in ranks:
        rank.communicate("")
    assert [rank.returncode for rank in ranks] == [0] * count
    return found


@pytest.mark.job
def test_of_three_ranks_one_reads_and_all_see_the_same(tmp_path):
    write_coco(tmp_path, 1500)
    (alone,) = read_on_ranks(tmp_path, 1, told=1)
    found = read_on_ranks(tmp_path, 3, told=3)
    assert sorted(rank["parsed"] for rank in found) == [0, 0, 1]
    assert all(rank["mapped"] for rank in found)
    for rank in found:
        assert {**rank, "parsed": 1, "mapped": False} == {**alone, "mapped": False}
    assert list((tmp_path / "tmp").iterdir()) == [], "the last rank has removed the name"


@pytest.mark.job
def test_few_images_are_read_by_each_rank_and_a_rank_that_does_not_come_leaves_nothing(tmp_path):
    write_coco(tmp_path / "few", 20)
    assert [rank["parsed"] for rank in read_on_ranks(tmp_path / "few", 2, told=2)] == [1, 1]
    assert list((tmp_path / "few" / "tmp").iterdir()) == []
    write_coco(tmp_path / "many", 1500)
    assert [rank["parsed"] for rank in read_on_ranks(tmp_path / "many", 1, told=2)] == [1]
    assert list((tmp_path / "many" / "tmp").iterdir()) == []


FORM = Form(
    take_apart=lambda content: (content["arrays"], content["facts"]),
    put_together=lambda arrays, facts: {"arrays": arrays, "facts": facts},
)
CONTENT = {
    "arrays": {"a": np.arange(6, dtype=np.int32).reshape(2, 3), "none": np.zeros((0, 4)), "b": np.array([True, False])},
    "facts": {"names": ["x"], "number": 3},
}


@pytest.fixture
def environ(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return {"LOCAL_WORLD_SIZE": "2"}


def test_arrays_of_any_shape_arrive_and_cannot_be_written_to(environ, tmp_path):
    contents = [read_once(lambda: CONTENT, key="k", form=FORM, environ=environ) for _ in range(2)]
    for content in contents:
        assert content["facts"] == CONTENT["facts"]
        assert {name: array.tolist() for name, array in content["arrays"].items()} == {
            name: array.tolist() for name, array in CONTENT["arrays"].items()
        }
        assert all(array.dtype == CONTENT["arrays"][name].dtype for name, array in content["arrays"].items())
        with pytest.raises(ValueError, match="read-only"):
            content["arrays"]["a"][0] = 1
    assert list(tmp_path.iterdir()) == []


def test_a_reader_that_fails_fails_on_every_rank(environ):
    def fail():
        raise DataError("broken")

    for _ in range(3):
        with pytest.raises(DataError, match="broken"):
            read_once(fail, key="k", form=FORM, environ=environ)
    assert read_once(lambda: CONTENT, key="k", form=FORM, environ=environ)["facts"] == CONTENT["facts"]


def test_a_full_disk_and_a_foreign_file_make_each_rank_read_by_itself(environ, tmp_path, monkeypatch):
    def full(*args):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(once_per_host, "_write", full)
        assert read_once(lambda: CONTENT, key="k", form=FORM, environ=environ) is CONTENT
    assert list(tmp_path.iterdir()) == []
    target = tmp_path / "victim"
    target.write_text("mine")
    monkeypatch.setattr(once_per_host, "_sweep", lambda folder: None)
    real = os.open
    monkeypatch.setattr(os, "open", lambda path, *more: real(target if "once" in str(path) else path, *more))
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert read_once(lambda: CONTENT, key="k", form=FORM, environ=environ) is CONTENT
    assert target.read_text() == "mine"


def test_what_a_killed_job_has_left_is_removed_after_a_day(environ, tmp_path):
    old, new, other = (
        tmp_path / f"{once_per_host.PREFIX}{name}" for name in (f"{os.geteuid()}-a", f"{os.geteuid()}-b", "77-c")
    )
    for path in (old, new, other):
        path.touch()
    for path in (old, other):
        os.utime(path, (1, 1))
    read_once(lambda: CONTENT, key="k", form=FORM, environ=environ)
    assert not old.exists()
    assert new.exists()
    assert other.exists()
