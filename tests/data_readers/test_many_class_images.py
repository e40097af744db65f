"""A million small images in shards: few objects whatever their number, listed once per host, and the same names as before."""

import gc
import io
import json
import os
import subprocess
import sys
import tarfile
import tracemalloc

import pytest

from mtrain.core.interfaces import SplitRequest
from mtrain.data.texts import Texts
from mtrain.tasks.classification.readers.csv_labels import CsvLabels
from mtrain.tasks.classification.readers.image_folder import ImageFolder
from mtrain.tasks.classification.readers.webdataset import WebDataset
from tests.data_readers.class_images import image

CONTENT = image("cat", 0)

RANK = """
import json, sys
from pathlib import Path
from mtrain.core.interfaces import SplitRequest
from mtrain.tasks.classification.readers import webdataset
listed = []
real = webdataset._members
webdataset._members = lambda file: listed.append(file.name) or real(file)
split = webdataset.WebDataset().read(SplitRequest(root=Path(sys.argv[1]), split="train"))
print(json.dumps({
    "listed": listed, "images": len(split), "names": split.class_names, "labels": split.labels[:50].tolist(),
    "origins": [split.origins[7], split.origins[-1]], "keys": split.keys[-2:], "size": split.images[7].shape,
    "mapped": "mtrain-once-" in Path("/proc/self/smaps").read_text(),
}), flush=True)
sys.stdin.read()  # a rank of a job does not end before the others have read
"""


def write_shards(folder, images, *, in_a_shard=1000):
    folder.mkdir(exist_ok=True)
    for first in range(0, images, in_a_shard):
        with tarfile.open(folder / f"train-{first // in_a_shard:03d}.tar", "w") as archive:
            for number in range(first, min(first + in_a_shard, images)):
                for name, content in (
                    (f"{number:06d}.png", CONTENT),
                    (f"{number:06d}.cls", f"class{number % 7}".encode()),
                ):
                    member = tarfile.TarInfo(name)
                    member.size = len(content)
                    archive.addfile(member, io.BytesIO(content))


def write_csv(folder, images):
    folder.mkdir()
    rows = (f"{number:06d}.png,class{number % 7}\n" for number in range(images))
    (folder / "train.csv").write_text("".join(["path,label\n", *rows]))


def write_folders(folder, images):
    for number in range(images):
        name = folder / "train" / f"class{number % 7}" / f"{number:06d}.png"
        name.parent.mkdir(parents=True, exist_ok=True)
        name.touch()


def blocks_kept(reader, folder, *, divide):
    """The blocks of memory that a split holds."""
    gc.collect()
    tracemalloc.start()
    before = len(tracemalloc.take_snapshot().traces)
    split = reader.read(SplitRequest(root=folder, split="train"))
    kept = split.divide(0.3, seed=1) if divide else split
    del split
    gc.collect()
    blocks = len(tracemalloc.take_snapshot().traces) - before
    tracemalloc.stop()
    assert len(kept)
    return blocks


@pytest.mark.parametrize("divide", [False, True])
@pytest.mark.parametrize(
    ("reader", "write"), [(WebDataset, write_shards), (CsvLabels, write_csv), (ImageFolder, write_folders)]
)
def test_more_images_are_no_more_objects(tmp_path, reader, write, divide):
    write(tmp_path / "few", 70)
    write(tmp_path / "many", 270)
    reader().read(SplitRequest(root=tmp_path / "few", split="train"))  # what the first use of a module keeps
    few, many = (blocks_kept(reader(), tmp_path / name, divide=divide) for name in ("few", "many"))
    assert many < few + 70, (few, many)


@pytest.mark.job
def test_of_three_ranks_one_lists_the_shards_and_all_see_the_same(tmp_path):
    write_shards(tmp_path, 1100)
    (tmp_path / "tmp").mkdir()

    def read_on_ranks(count):
        environ = {**os.environ, "TMPDIR": str(tmp_path / "tmp"), "LOCAL_WORLD_SIZE": str(count)}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        argv = [sys.executable, "-c", RANK, str(tmp_path)]
        ranks = [subprocess.Popen(argv, env=environ, **pipes) for _ in range(count)]
        found = [json.loads(rank.stdout.readline()) for rank in ranks]
        for rank in ranks:
            rank.communicate("")
        assert [rank.returncode for rank in ranks] == [0] * count
        return found

    (alone,), found = read_on_ranks(1), read_on_ranks(3)
    assert sorted(rank.pop("listed") for rank in found) == [[], [], alone.pop("listed")]
    assert [rank.pop("mapped") for rank in found] == [True] * 3
    assert not alone.pop("mapped")
    assert found == [alone] * 3
    assert alone["origins"] == [f"{tmp_path}/train-000.tar 000007", f"{tmp_path}/train-001.tar 001099"]
    assert alone["keys"] == ["train-001.tar/001098", "train-001.tar/001099"]
    assert list((tmp_path / "tmp").iterdir()) == []


def test_texts_are_a_sequence_of_what_was_given():
    given = ["a", "", "Füße", "\udc80 no text", "b" * 1000]
    texts = Texts.of(given)
    assert texts == given
    assert texts != given[:-1]
    assert texts[1:3] == given[1:3]
    assert texts[-1] == given[-1]
    assert texts.index("Füße") == 2
    with pytest.raises(IndexError):
        texts[5]
    assert list(Texts.of([])) == []
