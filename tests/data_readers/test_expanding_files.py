"""Small files that hold an enormous amount of data are refused before they fill the memory; repeated images are read."""

import subprocess
import sys
from pathlib import Path

import pytest

from mtrain.spec import bounds
from tests.data_readers.class_images import image


@pytest.mark.job
@pytest.mark.smoke
def test_reading_anything_ends_in_words_where_memory_lacks(tmp_path: Path) -> None:
    """In a process of its own: what earlier tests have freed here would do for reading it."""
    for split in ("train", "val"):
        (tmp_path / split / "cat").mkdir(parents=True)
        (tmp_path / split / "cat/a.png").write_bytes(image())
    (tmp_path / "train.csv").write_text("path,label\n" + "train/cat/a.png,cat\n" * 1_000_000)
    code = (
        "import sys; from mtrain.errors import DataError; from mtrain.tasks import datasets\n"
        "from mtrain.tasks.classification.section import ClassificationDataSpec\n"
        "datasets.memory_limit = lambda: 64 << 20\n"
        "spec = ClassificationDataSpec(format='csv_labels', root=sys.argv[1], val='train.csv')\n"
        "try: datasets.open_data(spec).train\n"
        "except DataError as error: print(error)\n"
        "assert len(bytes(100 << 20)) == 100 << 20, 'the limit lasts no longer than the reading'\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    assert "memory" in done.stdout
    assert str(tmp_path) in done.stdout


@pytest.mark.parametrize(("most", "expected"), [("5000000", 3000000), ("2000000", 0), ("1000", 0), ("max", None)])
def test_what_the_group_of_a_process_has_left_is_its_limit_without_what_it_uses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: str, expected: int | None
) -> None:
    (tmp_path / "most").write_text(f"{most}\n")
    (tmp_path / "used").write_text("2000000\n")
    monkeypatch.setattr(bounds, "GROUP_FILES", ((str(tmp_path / "most"), str(tmp_path / "used")),))
    found = bounds.available_bytes()
    assert found == expected or (expected is None and found > 5000000)


def test_a_file_may_grow_to_a_hundred_times_its_size_but_not_beyond_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "memory_limit", lambda: 8 << 30)
    assert [bounds.limit_of(size) for size in (0, 1 << 20, 20 << 20, 1 << 30)] == [
        1 << 30,
        1 << 30,
        2000 << 20,
        8 << 30,
    ]
