"""Texts as rows of tokens: documents stay apart, each label is the next token, and the loss counts tokens, not rows."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from mtrain.core.interfaces import SplitRequest
from mtrain.core.samples.sampler import Shuffled
from mtrain.errors import DataError
from mtrain_language.documents import Document, Documents
from mtrain_language.evaluator import TokenEvaluator
from mtrain_language.packing import NONE, pack
from mtrain_language.readers.python_docs import PythonDocs
from mtrain_language.readers.text import TextFiles, TextOptions
from mtrain_language.source import RowSource
from mtrain_language.tokens import Bytes, FromFile

END = Bytes().end


def rows_of(*texts: str, length: int = 4):
    return pack([Document(text) for text in texts], Bytes(), length=length)


def test_documents_are_packed_one_after_the_other_and_end_with_their_token():
    rows = rows_of("abc", "de", "fghi")
    assert rows.tokens.tolist() == [[97, 98, 99, END], [100, 101, END, 102], [103, 104, 105, END]]
    assert rows.labels.tolist() == [[98, 99, END, NONE], [101, END, NONE, 103], [104, 105, END, NONE]]
    assert rows.positions.tolist() == [[0, 1, 2, 3], [0, 1, 2, 0], [0, 1, 2, 3]]
    assert rows.dropped == 0
    assert rows.counts.tolist() == [3, 3, 3]


def test_no_token_is_padding_and_what_fills_no_row_is_counted():
    rows = rows_of("abcdef", "gh", length=4)
    assert rows.tokens.size == 8
    assert rows.dropped == 2


def test_a_prompt_is_read_and_not_learned():
    rows = pack([Document("yes", prompt="is it? ")], Bytes(), length=11)
    assert rows.tokens.tolist() == [[*b"is it? yes", END]]
    assert rows.labels.tolist() == [[*[NONE] * 6, *b"yes", END, NONE]]


def test_rows_without_a_label_are_left_out():
    rows = pack([Document("y", prompt="a long question")], Bytes(), length=4)
    assert (rows.labels != NONE).any(axis=1).all()
    assert len(rows) == 1
    assert rows.labels[0].tolist() == [NONE, NONE, ord("y"), END]


def test_too_little_text_names_both_numbers():
    with pytest.raises(DataError, match=r"16 tokens in a row, but 1 documents have 4"):
        rows_of("abc", length=16)
    with pytest.raises(DataError, match="a split has no document"):
        pack([], Bytes(), length=16)


@pytest.mark.parametrize("parts", [1, 2, 3, 6])
def test_however_an_update_is_divided_its_loss_is_the_mean_over_its_tokens(parts):
    """The mean over equal parts of each part's mean over rows, as ranks and micro batches compute it."""
    rows = pack([Document("x" * n, prompt="p" * (n % 5)) for n in range(1, 60)], Bytes(), length=16)
    order = Shuffled(len(rows), global_batch=6, seed=3)
    source, rng = RowSource(rows, order=order), np.random.default_rng(0)
    nll = rng.uniform(1, 5, rows.tokens.shape) * (rows.labels != NONE)
    for update in range(3):
        indices = order.global_batch_indices(1, update)
        means = []
        for part in np.split(indices, parts):
            batch = source.collate([source.sample(1, int(index), update=update) for index in part])
            means.append(np.mean(nll[batch["index"]].sum(axis=1) * batch["scale"]))
        wanted = nll[indices].sum() / rows.counts[indices].sum()
        assert np.mean(means) == pytest.approx(wanted, rel=1e-14)
        assert len(set(rows.counts[indices].tolist())) > 1, "rows of equal counts would show nothing"


def test_perplexity_counts_each_row_once_and_each_token_alike():
    batch = {"index": np.array([0, 1])}
    first, second = TokenEvaluator(), TokenEvaluator()
    first.add(batch, [(3.0, 3, 1), (8.0, 2, 2)])
    second.add({"index": np.array([1, 2])}, [(8.0, 2, 2), (1.0, 5, 0)])
    metrics = first.result([first.partial(), second.partial()])
    assert metrics["loss"] == pytest.approx(12 / 10)
    assert metrics["perplexity"] == pytest.approx(math.exp(1.2))
    assert metrics["accuracy"] == pytest.approx(3 / 10)
    assert metrics["score"] == -metrics["loss"]


def test_a_share_of_documents_is_held_back_and_none_is_in_both_splits():
    documents = Documents([Document(str(number)) for number in range(50)])
    train, val = documents.divide(0.1, seed=0)
    assert len(val) == 5
    assert sorted(int(item.text) for item in [*train.items, *val.items]) == list(range(50))
    assert documents.divide(0.1, seed=1)[1].items != val.items


def read(root, split="train", **options):
    return TextFiles(TextOptions(**options)).read(SplitRequest(split=split, root=root)).items


def test_files_of_text_and_json_lines_are_read_by_split(tmp_path):
    (tmp_path / "train").mkdir()
    (tmp_path / "train/b.txt").write_text("second")
    (tmp_path / "train/a.md").write_text("first")
    (tmp_path / "val.jsonl").write_text('{"text": "third"}\n\n{"text": "fourth"}\n')
    assert [item.text for item in read(tmp_path)] == ["first", "second"]
    assert [item.text for item in read(tmp_path, "val")] == ["third", "fourth"]


def test_questions_and_answers_have_fields_of_their_own(tmp_path):
    (tmp_path / "train.jsonl").write_text(json.dumps({"q": "one?", "a": "yes"}) + "\n")
    assert read(tmp_path, text="a", prompt="q") == [Document("yes", prompt="one?")]


def test_parquet_and_the_folders_of_datasets_are_read(tmp_path):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    table = pyarrow.table({"text": ["one", "two"], "number": [1, 2]})
    parquet.write_table(table, tmp_path / "train.parquet")
    (tmp_path / "validation").mkdir()
    target = str(tmp_path / "validation/data-00000.arrow")
    with pyarrow.OSFile(target, "wb") as file, pyarrow.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table)
    assert [item.text for item in read(tmp_path)] == ["one", "two"]
    assert [item.text for item in read(tmp_path, "val")] == ["one", "two"]


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("train.jsonl", b'{"body": "x"}\n', r"train.jsonl:1: no field 'text'; it has body"),
        ("train.jsonl", b'{"text": 3}\n', r"train.jsonl:1: a int as field 'text'"),
        ("train.jsonl", b'{"text": "x"}\n{"te', r"train.jsonl:2: no JSON"),
        ("train.jsonl", b"[1]\n", r"it is no object"),
        ("train.txt", b"\xff\xfe\x00", r"UTF-8"),
        ("train.parquet", b"PAR1", r"damaged"),
        ("train.txt", b" \n", r"hold no text"),
    ],
)
def test_a_file_that_is_no_text_is_named(tmp_path, name, content, said):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=said):
        read(tmp_path)


def test_the_docstrings_of_python_are_there_and_divided():
    train, val = (PythonDocs().read(SplitRequest(split=split)).items for split in ("train", "val"))
    assert len(train) > 1000
    assert len(val) == pytest.approx(len(train) / 19, rel=0.05)
    assert not {item.text for item in train[:50]} & {item.text for item in val[:3]}


@pytest.fixture
def tokenizer_file(tmp_path):
    """A tokenizer.json of whole words, in a folder as a model has it."""
    tokenizers = pytest.importorskip("tokenizers")
    words = {word: number for number, word in enumerate(["[?]", "a", "rose", "is", "<stop>"])}
    library = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[?]"))
    library.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    library.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


@pytest.mark.job
@pytest.mark.smoke
def test_a_tokenizer_of_a_folder_is_used_with_the_token_that_its_config_names(tokenizer_file):
    (tokenizer_file / "tokenizer_config.json").write_text('{"eos_token": {"content": "<stop>"}}')
    found = FromFile(tokenizer_file, end_token=None)
    assert found.encode("a rose is a rose").tolist() == [1, 2, 3, 1, 2]
    assert (found.size, found.end) == (5, 4)
    assert found.decode([1, 2]) == "a rose"


@pytest.mark.job
@pytest.mark.smoke
def test_a_tokenizer_that_names_no_end_asks_for_it(tokenizer_file):
    with pytest.raises(DataError, match=r"data\.end_token"):
        print(FromFile(tokenizer_file, end_token=None).end)
    with pytest.raises(DataError, match="no token '<end>'"):
        print(FromFile(tokenizer_file, end_token="<end>").end)
    assert FromFile(tokenizer_file, end_token="<stop>").end == 4


@pytest.mark.job
@pytest.mark.smoke
def test_a_damaged_tokenizer_is_named(tmp_path):
    pytest.importorskip("tokenizers")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match=r"tokenizer\.json"):
        print(FromFile(tmp_path, end_token=None).size)
    with pytest.raises(DataError, match="No such file"):
        print(FromFile(tmp_path / "nowhere", end_token=None).size)


def test_bytes_are_every_text():
    text = "Grüße, 世界\0\n"
    assert Bytes().decode([*Bytes().encode(text), END]) == text


def test_other_tokens_and_other_labels_have_another_fingerprint():
    rows = pack([Document("some words"), Document("and others")], Bytes(), length=8)
    others = [replace(rows, **{name: getattr(rows, name)[::-1]}) for name in ("tokens", "labels")]
    assert len({RowSource(each).fingerprint for each in (rows, *others)}) == 3
