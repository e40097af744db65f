"""Images in Parquet and Arrow files and in tar shards: the same as in a folder, and refused in words where damaged."""

import io
import json
import re
import subprocess
import sys
import tarfile
import threading
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from mtrain.core.interfaces import SplitRequest
from mtrain.data import once_per_host
from mtrain.data.images.decode import decode_bytes
from mtrain.data.loader.pool import WorkerPool
from mtrain.errors import DataError
from mtrain.spec import plugins
from mtrain.tasks.classification.images import verify
from mtrain.tasks.classification.section import ClassificationDataSpec
from mtrain.tasks.classification.source import ClassificationSource
from mtrain.tasks.datasets import open_data
from tests.data_readers.class_images import image

pytestmark = pytest.mark.smoke

NAMES = ["cat", "dog", "emu"]
COUNT = 9
CONTENTS = [image(NAMES[i % 3], i) for i in range(COUNT)]
LABELS = [i % 3 for i in range(COUNT)]


def opened(root, form, **values):
    return open_data(ClassificationDataSpec(**{"format": form, "root": str(root), "image_size": 16, **values}))


def look(root, form, **values) -> str:
    message = ""
    try:
        splits = opened(root, form, **values).both()
        verify(*splits)
        for split in splits:
            for index in range(len(split)):
                split.images[index]
    except DataError as error:
        message = str(error)
    assert len(message) < 20_000
    return message


def is_whole(split, indices=range(COUNT)):
    """The split has these images and labels, in this order."""
    assert split.class_names == tuple(NAMES)
    assert split.labels.tolist() == [LABELS[i] for i in indices]
    for place, index in enumerate(indices):
        np.testing.assert_array_equal(split.images[place], decode_bytes(CONTENTS[index], ""))


# ------------------------------------------------------------------------------------------- written by their own writers
@pytest.fixture(scope="module")
def huggingface(tmp_path_factory):
    """Sets that the library ``datasets`` has written: a dictionary of splits, one set in two shards, and Parquet."""
    import datasets

    datasets.disable_progress_bars()
    root = tmp_path_factory.mktemp("huggingface")
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=NAMES)})
    images = [Image.open(io.BytesIO(content)) for content in CONTENTS]
    whole = datasets.Dataset.from_dict({"image": images, "label": LABELS}, features=features)
    splits = {"train": whole, "validation": whole.select([4, 2]), "test": whole.select([1])}
    datasets.DatasetDict(splits).save_to_disk(str(root / "dict"))
    whole.save_to_disk(str(root / "one"), num_shards=2)
    for name, split in splits.items():
        split.to_parquet(str(root / "parquet/data" / f"{name}-00000-of-00001.parquet"))
    return root


def test_a_saved_dictionary_of_splits_is_read_with_the_names_of_its_classes(huggingface):
    data = opened(huggingface / "dict", "huggingface")
    is_whole(data.train)
    is_whole(data.val, [4, 2])
    assert look(huggingface / "dict", "huggingface") == ""
    is_whole(opened(huggingface / "dict", "huggingface", val="test").val, [1])


def test_a_saved_set_of_several_shards_is_one_that_can_be_divided(huggingface):
    is_whole(opened(huggingface / "one", "huggingface", val="../dict/test").train)
    train, val = opened(huggingface / "one", "huggingface", split=0.34).both()
    assert (train.histogram(), val.histogram()) == (dict.fromkeys(NAMES, 2), dict.fromkeys(NAMES, 1))
    index = val.keys.index(next(key for key in val.keys if key.startswith("data-00001")))
    number = 5 + int(val.keys[index].rpartition(":")[2])  # the first shard has five rows of nine
    np.testing.assert_array_equal(val.images[index], decode_bytes(CONTENTS[number], ""))


def test_parquet_files_are_found_by_the_names_that_hugging_face_gives(huggingface):
    data = opened(huggingface / "parquet", "parquet")
    is_whole(data.train)
    is_whole(data.val, [4, 2])
    is_whole(opened(huggingface / "parquet", "parquet", val="data/test-*.parquet").val, [1])
    assert look(huggingface / "parquet", "parquet") == ""


def test_other_orders_of_names_renumber_labels(huggingface):
    turned = opened(huggingface / "dict", "huggingface", names=["emu", "dog", "cat"]).train
    assert turned.labels.tolist() == [2 - label for label in LABELS]
    with pytest.raises(DataError, match="'owl' is not among them"):
        opened(huggingface / "dict", "huggingface", names=["emu", "dog", "owl"]).train  # noqa: B018


@pytest.mark.job
def test_shards_of_the_library_webdataset_are_read(tmp_path):
    code = (
        "import sys, webdataset\n"
        "from tests.data_readers.test_class_shards import CONTENTS, LABELS\n"
        "with webdataset.ShardWriter(sys.argv[1] + '/train-%06d.tar', maxcount=4, verbose=0) as writer:\n"
        "    for i, content in enumerate(CONTENTS):\n"
        "        writer.write({'__key__': f'{i:04d}', 'png': content, 'cls': LABELS[i]})\n"
    )
    # A process of its own: the library loads a framework where one is installed.
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-W", "ignore", "-c", code, str(tmp_path)], cwd=root, check=True, timeout=120)
    assert len(list(tmp_path.glob("train-*.tar"))) == 3
    is_whole(opened(tmp_path, "webdataset", names=NAMES, val="train-000002.tar").train)
    is_whole(opened(tmp_path, "webdataset", names=NAMES, val="train-000002.tar").val, [8])


# -------------------------------------------------------------------------------------------------------------- by hand
def table(images, labels, **schema):
    return pa.table({"image": images, "label": labels}, **schema)


def parquet_set(root, whole, name="train.parquet", **options):
    root.mkdir(parents=True, exist_ok=True)
    pq.write_table(whole, root / name, **options)
    return root


def arrow_set(root, whole, *, form="stream"):
    root.mkdir(parents=True)
    writer = pa.ipc.new_stream if form == "stream" else pa.ipc.new_file
    with writer(str(root / "train.arrow"), whole.schema) as target:
        target.write_table(whole, max_chunksize=2)
    return root


def test_plain_bytes_and_labels_of_any_integer_or_text_are_read(tmp_path):
    words = [NAMES[label] for label in LABELS]
    for number, labels in enumerate((pa.array(LABELS, pa.int8()), pa.array(LABELS, pa.uint64()), pa.array(words))):
        root = parquet_set(tmp_path / str(number), table(pa.array(CONTENTS, pa.binary()), labels), row_group_size=2)
        is_whole(opened(root, "parquet", names=NAMES, val="train.parquet").train)
    is_whole(opened(tmp_path / "2", "parquet", val="train.parquet").val)
    for form in ("stream", "file"):
        root = arrow_set(tmp_path / form, table(pa.array(CONTENTS, pa.large_binary()), pa.array(words)), form=form)
        is_whole(opened(root, "huggingface", val="train.arrow").train)


def test_rows_with_a_path_alone_are_read_from_beside_the_file(tmp_path):
    images = [{"bytes": None, "path": "a.png"}, {"bytes": CONTENTS[1], "path": "gone.png"}]
    root = parquet_set(tmp_path / "set", table(images, ["cat", "dog"]))
    (root / "a.png").write_bytes(CONTENTS[0])
    train = opened(root, "parquet", val="train.parquet").train
    for index in range(2):
        np.testing.assert_array_equal(train.images[index], decode_bytes(CONTENTS[index], ""))


def cut(root, name, share=0.5):
    content = (root / name).read_bytes()
    (root / name).write_bytes(content[: int(len(content) * share)])


def with_metadata(whole, features):
    return whole.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})


def bad_offsets(root):
    """An Arrow file whose offsets point far beyond its data."""
    offsets = np.array([0, 1_000_000, 16], np.int32)
    column = pa.Array.from_buffers(pa.binary(), 2, [None, pa.py_buffer(offsets.tobytes()), pa.py_buffer(b"x" * 16)])
    arrow_set(root, table(column, ["cat", "dog"]))


BINARY = pa.array(CONTENTS, pa.binary())
ARROW = {
    "truncated": (
        lambda root: (arrow_set(root, table(BINARY, LABELS)), cut(root, "train.arrow")),
        r"train\.arrow: not a readable Arrow file",
    ),
    "text": (
        lambda root: (arrow_set(root, table(BINARY, LABELS)), (root / "train.arrow").write_text("x" * 99)),
        "not a readable Arrow",
    ),
    "offsets out of the file": (bad_offsets, r"train\.arrow: damaged"),
    "no images": (
        lambda root: arrow_set(root, table(LABELS, LABELS)),
        r"no column is clearly meant, of image, label; name one with data\.options\.image_column",
    ),
    "an image that is null": (
        lambda root: arrow_set(root, table(pa.array([CONTENTS[0], None], pa.binary()), [0, 1])),
        "row 1: no image in this row",
    ),
    "a label that is null": (lambda root: arrow_set(root, table(BINARY, [None, *LABELS[1:]])), "row 0: no label"),
    "labels of a test split": (
        lambda root: arrow_set(
            root, with_metadata(table(BINARY, [-1] * COUNT), {"label": {"_type": "ClassLabel", "names": NAMES}})
        ),
        "9 of 9 labels .*are none of its 3 classes",
    ),
    "floats as labels": (
        lambda root: arrow_set(root, table(BINARY, [0.5] * COUNT)),
        "column 'label' is of the type double",
    ),
    "state with a path": (
        lambda root: (
            arrow_set(root / "train", table(BINARY, LABELS)),
            (root / "train/state.json").write_text('{"_data_files": [{"filename": "../x"}]}'),
        ),
        r"state\.json: names '\.\./x'; expected names of files in the same folder",
    ),
    "state of other content": (
        lambda root: (
            arrow_set(root / "train", table(BINARY, LABELS)),
            (root / "train/state.json").write_text("[" * 100_000),
        ),
        r"state\.json: not the state of a saved Dataset",
    ),
}


@pytest.mark.parametrize("name", ARROW)
def test_arrow_files_of_any_kind_are_refused_in_words(name, tmp_path):
    build, says = ARROW[name]
    build(tmp_path / "set")
    values = {} if "state" in name else {"val": "train.arrow"}
    message = look(tmp_path / "set", "huggingface", **values)
    assert re.search(says, message), message or "was read"


def test_parquet_files_of_any_kind_are_refused_in_words(tmp_path):
    root = parquet_set(tmp_path / "a", table(BINARY, LABELS))
    assert "no column 'img'; its columns are image, label" in look(
        root, "parquet", val="train.parquet", options={"image_column": "img"}
    )
    cut(root, "train.parquet")
    assert re.search(r"train\.parquet: not a readable Parquet file", look(root, "parquet", val="train.parquet"))
    root = parquet_set(tmp_path / "b", table(BINARY, LABELS))
    content = bytearray((root / "train.parquet").read_bytes())
    content[50:250] = bytes(200)
    (root / "train.parquet").write_bytes(bytes(content))
    assert re.search("damaged|not a readable|images cannot be used", look(root, "parquet", val="train.parquet"))
    assert "has an evaluation split of its own" in look(
        parquet_set(parquet_set(tmp_path / "c", table(BINARY, LABELS)), table(BINARY, LABELS), "val.parquet"),
        "parquet",
        split=0.5,
    )


def test_images_that_do_not_fit_into_memory_are_refused_with_the_way_out(tmp_path, monkeypatch):
    import psutil

    root = parquet_set(tmp_path / "a", table(BINARY, LABELS))
    monkeypatch.setattr(psutil, "virtual_memory", lambda: type("Memory", (), {"available": 1000})())
    assert "use data.format: huggingface, which reads images from the disk" in look(
        root, "parquet", val="train.parquet"
    )


def test_a_missing_pyarrow_is_one_sentence_with_the_command(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    for form in ("parquet", "huggingface"):
        message = look(tmp_path, form)
        assert re.search(rf"data\.format: {form} needs pyarrow, .*; install it with: pip install .*\[data\]", message)


# -------------------------------------------------------------------------------------------------------------- tar files
def shard(file, members, *, mode="w"):
    file.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(file, mode) as archive:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return file


def members(count=COUNT, *, label=lambda i: [("cls", str(LABELS[i]).encode())]):
    return [
        (f"set/{i:03d}.{extension}", content)
        for i in range(count)
        for extension, content in [("jpg", CONTENTS[i]), *label(i)]
    ]


def test_labels_are_numbers_words_or_in_json(tmp_path):
    labels = {
        "numbers": lambda i: [("cls", f" {LABELS[i]}\n".encode())],
        "words": lambda i: [("cls", NAMES[LABELS[i]].encode())],
        "json": lambda i: [("json", json.dumps({"label": NAMES[LABELS[i]], "x": [1]}).encode())],
        "numbers in json": lambda i: [("json", json.dumps({"label": LABELS[i]}).encode())],
        "both, cls counts": lambda i: [("json", b'{"label": "none"}'), ("cls", NAMES[LABELS[i]].encode())],
    }
    for name, label in labels.items():
        shard(tmp_path / name / "train.tar", members(label=label))
        is_whole(opened(tmp_path / name, "webdataset", names=NAMES, val="train.tar").train)
    options = {"image_extension": "a.png", "label_extension": "txt"}
    odd = [("x.a.png", CONTENTS[0]), ("x.png", CONTENTS[1]), ("x.txt", b"dog"), (".x", b""), ("README", b"")]
    shard(tmp_path / "odd/train.tar", odd)
    data = opened(tmp_path / "odd", "webdataset", names=NAMES, val="train.tar", options=options)
    assert data.train.labels.tolist() == [1]


def test_the_ranks_of_a_host_share_one_list_of_the_same_shards(tmp_path, monkeypatch):
    listed = []

    def read_once(make, *, key, form):
        listed.append(key)
        return make()

    monkeypatch.setattr(once_per_host, "read_once", read_once)
    shard(tmp_path / "set" / "train-0.tar", members())
    shard(tmp_path / "set" / "val-0.tar", members())
    for _ in range(2):
        opened(tmp_path / "set", "webdataset", names=NAMES).both()
    assert len(listed) == 2 * len(set(listed)) == 4, "one for each split, and the same on each rank"


def test_shards_are_read_in_the_order_of_their_names(tmp_path):
    for number in (2, 0, 1):
        shard(tmp_path / f"train-{number}.tar", members()[6 * number : 6 * number + 6])
    is_whole(opened(tmp_path, "webdataset", names=NAMES, val="train-[01].tar").train)
    is_whole(opened(tmp_path, "webdataset", names=NAMES, val="train-[01].tar").val, range(6))


def links(file):
    shard(file, members(2))
    with tarfile.open(file, "a") as archive:
        for name, kind in (
            ("set/009.jpg", tarfile.SYMTYPE),
            ("../../out.jpg", tarfile.LNKTYPE),
            ("p.jpg", tarfile.FIFOTYPE),
        ):
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, "/etc/passwd"
            archive.addfile(info)


TAR = {
    "compressed": (lambda file: shard(file, members(), mode="w:gz"), "compressed, so that its images have no positions"),
    "truncated": (lambda file: (shard(file, members()), cut(file.parent, file.name, 0.3)), "damaged"),
    "text": (lambda file: (shard(file, []), file.write_text("x" * 2000)), "damaged"),
    "empty": (lambda file: (shard(file, []), file.write_bytes(b"")), "damaged"),
    "no member": (lambda file: shard(file, []), "holds no image"),
    "no label": (lambda file: shard(file, members(label=lambda i: [])), r"set/000: no label: no \.cls among jpg"),
    "no image": (lambda file: shard(file, [("a.cls", b"1")]), r"a: 0 images among its extensions \(cls\)"),
    "two images": (lambda file: shard(file, [("a.jpg", b"1"), ("a.png", b"1"), ("a.cls", b"1")]), "2 images among"),
    "a label without a key": (
        lambda file: shard(file, members(1, label=lambda i: [("json", b'{"class": 1}')])),
        r"no key 'label' with text or a whole number; set data\.options\.label_key",
    ),
    "brackets": (lambda file: shard(file, members(1, label=lambda i: [("json", b"[" * 100_000)])), "nested too deeply"),
    "a label of other bytes": (lambda file: shard(file, members(1, label=lambda i: [("cls", b"\xff\xfe")])), "no UTF-8 text"),
    "members apart": (
        lambda file: shard(file, [*members(2), ("set/000.txt", b"")]),
        "set/000: its members are not beside each other",
    ),
    "a member twice": (lambda file: shard(file, [("a.jpg", b"1"), ("a.jpg", b"1"), ("a.cls", b"1")]), "there twice"),
    "a damaged image": (
        lambda file: shard(file, [("a.jpg", CONTENTS[0][:99]), ("a.cls", b"1")]),
        r"train\.tar a: truncated PNG",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TAR)
def test_shards_of_any_kind_are_refused_in_words(name, tmp_path):
    build, says = TAR[name]
    build(tmp_path / "set/train.tar")
    message = look(tmp_path / "set", "webdataset", val="train.tar")
    assert re.search(says, message), message or "was read"


def test_links_and_paths_out_of_a_shard_mean_nothing(tmp_path):
    links(tmp_path / "train.tar")
    assert len(opened(tmp_path, "webdataset", val="train.tar").train) == 2
    assert not (tmp_path.parent.parent / "out.jpg").exists()


# ------------------------------------------------------------------------------------------------------------- all formats
@pytest.mark.job
@pytest.mark.parametrize("form", ["parquet", "huggingface", "webdataset"])
def test_the_samples_are_those_of_an_array_for_any_number_of_workers_and_no_thread_is_left(form, tmp_path, huggingface):
    roots = {"parquet": huggingface / "parquet", "huggingface": huggingface / "dict", "webdataset": tmp_path}
    shard(tmp_path / "train.tar", members())
    values = {"names": NAMES, "val": "train.tar"} if form == "webdataset" else {}
    before = set(threading.enumerate())
    train = opened(roots[form], form, **values).train
    assert set(threading.enumerate()) <= before
    source = ClassificationSource(train, side=16, resize="crop", crop_share=0.875)
    expected = np.stack([source.sample(0, index).image for index in (8, 0, 5)])
    pool = WorkerPool({"train": source}, workers=2)
    try:
        loader = pool.loader("train", lambda e, u: [np.array([8, 0, 5])], micro_batch=3, updates_per_epoch=1)
        (batch,) = loader.micro_batches(0)
        np.testing.assert_array_equal(batch["images"], expected)
        loader.close()
    finally:
        pool.close()


@pytest.mark.parametrize("form", ["parquet", "huggingface", "webdataset"])
def test_the_policy_knows_the_formats(form):
    assert plugins.task_of("datasets", form) == "classification"
    with pytest.raises(DataError, match=r"data\.images: given"):
        plugins.load("datasets", form)().read(SplitRequest(root=Path("."), images="x", split="train"))
