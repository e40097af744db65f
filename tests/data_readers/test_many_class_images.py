"""A million small images: few objects whatever their number, and the same names as before."""

import gc
import tracemalloc

import pytest

from mtrain.core.interfaces import SplitRequest
from mtrain.data.texts import Texts
from mtrain.tasks.classification.readers.csv_labels import CsvLabels
from mtrain.tasks.classification.readers.image_folder import ImageFolder


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
@pytest.mark.parametrize(("reader", "write"), [(CsvLabels, write_csv), (ImageFolder, write_folders)])
def test_more_images_are_no_more_objects(tmp_path, reader, write, divide):
    write(tmp_path / "few", 70)
    write(tmp_path / "many", 270)
    reader().read(SplitRequest(root=tmp_path / "few", split="train"))  # what the first use of a module keeps
    few, many = (blocks_kept(reader(), tmp_path / name, divide=divide) for name in ("few", "many"))
    assert many < few + 70, (few, many)


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
