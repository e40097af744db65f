"""Small files that hold an enormous amount of data are refused before they fill the memory; repeated images are read."""

import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from mtrain.data.images.decode import decode_bytes
from mtrain.errors import DataError
from mtrain.spec import bounds
from mtrain.tasks.classification.section import ClassificationDataSpec
from mtrain.tasks.datasets import open_data
from tests.data_readers.class_images import image
from tests.peak_memory import growth

pa = pytest.importorskip("pyarrow", reason="needs mtrain[data]")
pq = pytest.importorskip("pyarrow.parquet", reason="needs mtrain[data]")

LIMIT = 96 << 20
"""Of small files, in place of a gigabyte, which would make the tests slow."""
PIECE = 1 << 22
MOST_GROWTH = 8 * LIMIT


@pytest.fixture(autouse=True)
def low_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "SMALL_BYTES", LIMIT)


def repeated(value: bytes | None, rows: int) -> "pa.Array":
    return pa.DictionaryArray.from_arrays(pa.array(np.zeros(rows, np.int32)), pa.array([value], pa.binary()))


def labels(rows: int) -> "pa.Array":
    return pa.DictionaryArray.from_arrays(pa.array(np.arange(rows, dtype=np.int32) % 2), pa.array(["cat", "dog"]))


def write_parquet(file: Path, *tables: "pa.Table", **options: object) -> None:
    with pq.ParquetWriter(file, tables[0].schema, **options) as writer:
        for table in tables:
            writer.write_table(table)


def parquet_of_many_rows(root: Path) -> None:
    """A quarter of a million rows of one image."""
    rows = 250_000
    table = pa.table({"image": repeated(image(), rows), "label": labels(rows)})
    write_parquet(root / "train.parquet", table, store_schema=False)


def parquet_of_large_labels(root: Path) -> None:
    """A label of 4 MB in each of 2000 rows."""
    text = pa.DictionaryArray.from_arrays(pa.array(np.zeros(2000, np.int32)), pa.array(["x" * PIECE]))
    table = pa.table({"image": repeated(image(), 2000), "label": text})
    write_parquet(root / "train.parquet", table, store_schema=False)


def parquet_of_zeros(root: Path) -> None:
    table = pa.table({"image": pa.array([bytes(PIECE)], pa.binary()), "label": pa.array(["cat"])})
    write_parquet(root / "train.parquet", *[table] * 40, compression="zstd", use_dictionary=False)


def nested_parquet_of_zeros(root: Path) -> None:
    images = pa.array([{"bytes": bytes(PIECE), "path": None}], pa.struct({"bytes": pa.binary(), "path": pa.string()}))
    table = pa.table({"image": images, "label": pa.array(["cat"])})
    write_parquet(root / "train.parquet", *[table] * 40, compression="zstd", use_dictionary=False)


def write_arrow(file: Path, batches: int, *, codec: str, content: bytes = bytes(PIECE)) -> None:
    options = pa.ipc.IpcWriteOptions(compression=codec)
    table = pa.table({"image": pa.array([content], pa.binary()), "label": pa.array(["cat"])})
    with pa.ipc.new_stream(str(file), table.schema, options=options) as writer:
        for _ in range(batches):
            writer.write_table(table)


def arrow_zstd(root: Path) -> None:
    write_arrow(root / "train.arrow", 40, codec="zstd")


def arrow_lz4(root: Path) -> None:
    write_arrow(root / "train.arrow", 40, codec="lz4")


def arrow_declared_length(root: Path, length: int = 2**40) -> None:
    """One buffer that says how large it becomes: a terabyte."""
    write_arrow(root / "train.arrow", 1, codec="zstd")
    content = (root / "train.arrow").read_bytes()
    assert content.count(struct.pack("<q", PIECE)) >= 1
    (root / "train.arrow").write_bytes(content.replace(struct.pack("<q", PIECE), struct.pack("<q", length)))


def arrow_declared_beyond_every_address(root: Path) -> None:
    arrow_declared_length(root, 2**62)


def arrow_of_many_rows(root: Path) -> None:
    rows = 250_000
    table = pa.table({"image": pa.array([b""] * rows, pa.binary()), "label": pa.array(np.zeros(rows, np.int8))})
    with pa.ipc.new_stream(
        str(root / "train.arrow"), table.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")
    ) as writer:
        writer.write_table(table)


CASES: dict[str, tuple[str, Callable[[Path], None], str]] = {
    "parquet: many rows": ("parquet", parquet_of_many_rows, "rows take"),
    "parquet: zeros": ("parquet", parquet_of_zeros, "memory"),
    "parquet: zeros in a structure": ("parquet", nested_parquet_of_zeros, "memory"),
    "arrow: zstd": ("huggingface", arrow_zstd, "memory"),
    "arrow: lz4": ("huggingface", arrow_lz4, "memory"),
    "arrow: declared length": ("huggingface", arrow_declared_length, "memory"),
    "arrow: length beyond every address": ("huggingface", arrow_declared_beyond_every_address, "memory|not a readable"),
    "arrow: many rows": ("huggingface", arrow_of_many_rows, "rows take"),
}


def opened(root: Path, form: str) -> object:
    suffix = "parquet" if form == "parquet" else "arrow"
    spec = ClassificationDataSpec(format=form, root=str(root), train=f"train.{suffix}", val=f"train.{suffix}")
    return open_data(spec).train


@pytest.mark.parametrize("name", CASES)
def test_a_file_that_expands_is_refused_by_name_in_bounded_memory(name: str, tmp_path: Path) -> None:
    form, build, says = CASES[name]
    build(tmp_path)
    (file,) = tmp_path.iterdir()
    assert file.stat().st_size < LIMIT / bounds.FACTOR
    with pytest.raises(DataError, match=says) as caught:
        opened(tmp_path, form)
    assert str(file) in str(caught.value)
    assert len(str(caught.value)) < 2000


@pytest.mark.parametrize("nested", [False, True])
def test_one_image_in_many_rows_is_read_without_growing(nested: bool, tmp_path: Path) -> None:
    rows, content = 4000, image() + bytes(1 << 20)
    column = repeated(content, rows)
    if nested:
        column = pa.StructArray.from_arrays([column, pa.nulls(rows, pa.string())], ["bytes", "path"])
    table = pa.table({"image": column, "label": labels(rows)})
    write_parquet(tmp_path / "train.parquet", table, dictionary_pagesize_limit=1 << 30, store_schema=False)
    before = pa.total_allocated_bytes()
    train = opened(tmp_path, "parquet")
    assert pa.total_allocated_bytes() - before < 64 << 20
    assert train.class_names == ("cat", "dog")
    assert train.labels.tolist() == [row % 2 for row in range(rows)]
    np.testing.assert_array_equal(train.images[rows - 1], decode_bytes(content, ""))


def test_a_label_of_4_megabytes_in_every_row_takes_its_memory_once(tmp_path: Path) -> None:
    parquet_of_large_labels(tmp_path)
    with growth() as grown:
        train = opened(tmp_path, "parquet")
    assert len(train.labels) == 2000
    assert grown.bytes < MOST_GROWTH


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
