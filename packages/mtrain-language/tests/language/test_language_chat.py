"""Conversations: what a chat template renders, which tokens are learned, and what is refused."""

import json
from pathlib import Path

import numpy as np
import pytest

from mtrain.core.interfaces import SplitRequest
from mtrain.errors import DataError
from mtrain_language.chat import template_of
from mtrain_language.documents import Document
from mtrain_language.packing import NONE, pack
from mtrain_language.readers.text import TextFiles, TextOptions
from mtrain_language.tokens import Bytes, FromFile

pytestmark = [pytest.mark.job, pytest.mark.smoke]

ASKED = {"role": "user", "content": "1 + 1?"}
SAID = {"role": "assistant", "content": "2"}
MORE = ({"role": "user", "content": "And 1 more?"}, {"role": "assistant", "content": "3, <b>&"})
TURNS = (ASKED, SAID, *MORE)
TEMPLATES = {
    "chatml": None,
    "llama": "{{ bos_token }}{% for m in messages %}\n[{{ m.role | tojson }}] {{ m.content | trim }}{{ eos_token }}\n"
    '{%- endfor %}\n{% if add_generation_prompt %}["assistant"] {% endif %}',
    "tagged": "{% for m in messages %}{% if m.role == 'assistant' %}A: {% generation %}{{ m.content }}!{% endgeneration %}"
    "{% else %}{% if loop.index > 9 %}{% break %}{% endif %}Q: {{ m.content }} {% endif %}{% endfor %}"
    "{% if add_generation_prompt %}A: {% endif %}",
}


def written(folder: Path, source: str | None) -> str:
    if source is None:
        return "chatml"
    (folder / "chat.jinja").write_text(source)
    return str(folder / "chat.jinja")


@pytest.mark.parametrize("name", TEMPLATES)
def test_answers_are_learned_and_nothing_else(name: str, tmp_path: Path) -> None:
    template = template_of("bytes", written(tmp_path, TEMPLATES[name]))
    assert template is not None
    parts = template.parts(TURNS)
    assert "".join(text for text, _ in parts) == template.text(TURNS)
    answers = {
        "chatml": ["2<|im_end|>\n", "3, <b>&<|im_end|>\n"],
        "llama": ["2", "3, <b>&"],
        "tagged": ["2!", "3, <b>&!"],
    }
    assert [text for text, learned in parts if learned] == answers[name]
    (rows,) = [pack([Document("", messages=TURNS)], Bytes(), length=len(template.text(TURNS)) + 1, template=template)]
    learned = [int(token) for token in rows.labels[0] if token != NONE]
    assert learned == [*"".join(answers[name]).encode(), Bytes().end]
    places = np.flatnonzero(rows.labels[0] != NONE)
    assert all(
        rows.tokens[0][place + 1] == rows.labels[0][place] for place in places if place + 1 < rows.tokens.shape[1]
    )


def tokenizer_folder(folder: Path, **config: object) -> Path:
    """Write a tokenizer of words whose text ends with ``<|im_end|>``."""
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

    words = ["user", "assistant", "1", "+", "?", "2", "3", "And", "more", ",", "<", "b", ">&", "[UNK]"]
    library = Tokenizer(models.WordLevel({word: place for place, word in enumerate(words)}, unk_token="[UNK]"))
    library.pre_tokenizer = pre_tokenizers.Whitespace()
    library.add_special_tokens([AddedToken("<|im_start|>"), AddedToken("<|im_end|>")])
    library.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": {"content": "<|im_end|>", "__type": "AddedToken"}, **config})
    )
    return folder


def test_the_token_that_ends_an_answer_ends_the_document(tmp_path: Path) -> None:
    folder = tokenizer_folder(tmp_path)
    tokenizer, template = FromFile(folder, end_token=None), template_of(str(folder), "chatml")
    rows = pack([Document("", messages=(ASKED, SAID))], tokenizer, length=10, template=template)
    names = [tokenizer.library.id_to_token(int(token)) for token in rows.tokens[0]]
    assert names == ["<|im_start|>", "user", "1", "+", "1", "?", "<|im_end|>", "<|im_start|>", "assistant", "2"]
    assert [int(token) for token in rows.labels[0] if token != NONE] == [5, tokenizer.end]


@pytest.mark.parametrize("place", ["file", "config", "named"])
def test_the_template_of_the_tokenizers_folder_is_taken(place: str, tmp_path: Path) -> None:
    source = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}{% endfor %}"
    found = {"config": source, "named": [{"name": "other", "template": "x"}, {"name": "default", "template": source}]}
    folder = tokenizer_folder(tmp_path, **({"chat_template": found[place]} if place in found else {}))
    if place == "file":
        (folder / "chat_template.jinja").write_text(source)
    template = template_of(str(folder), None)
    assert template is not None
    assert template.text([SAID]) == "<assistant>2<|im_end|>"


def test_transformers_renders_the_same(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    for source in (TEMPLATES["llama"], TEMPLATES["tagged"]):
        folder = tokenizer_folder(tmp_path, bos_token="<|im_start|>", chat_template=source)
        theirs, ours = AutoTokenizer.from_pretrained(folder), template_of(str(folder), None)
        assert ours is not None
        for asks in (False, True):
            expected = theirs.apply_chat_template(list(TURNS), tokenize=False, add_generation_prompt=asks)
            assert ours.text(TURNS, asks=asks) == expected


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("{% if %}", "is no template"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].__class__.__mro__ }}", "does not take a conversation"),
        ("{% set _ = messages.append(1) %}{{ messages }}", "does not take a conversation"),
        ("{{ messages | length }}", "otherwise than alone"),
    ],
)
def test_a_template_that_cannot_be_used_is_refused(source: str, said: str, tmp_path: Path) -> None:
    template = template_of("bytes", written(tmp_path, source))
    assert template is not None
    with pytest.raises(DataError, match=said):
        template.parts(TURNS)


def test_conversations_need_a_template(tmp_path: Path) -> None:
    assert template_of("bytes", None) is None
    with pytest.raises(DataError, match=r"name one with data\.chat_template"):
        pack([Document("", messages=(ASKED, SAID))], Bytes(), length=8)
    with pytest.raises(DataError, match=r"nothing\.jinja"):
        template_of("bytes", str(tmp_path / "nothing.jinja"))


def test_the_reader_takes_conversations(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"talk": list(TURNS)}) + "\n")
    reader = TextFiles(TextOptions(messages="talk"))
    assert reader.read(SplitRequest(split="all", root=tmp_path)).items[0].messages == TURNS


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"text": "x"}, "nothing given"),
        ({"talk": "x"}, "str given"),
        ({"talk": [{"role": "user"}]}, "turn 1"),
        ({"talk": [ASKED]}, "nothing to learn"),
    ],
)
def test_a_row_without_a_conversation_is_named(row: dict[str, object], said: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(DataError, match=rf"a\.jsonl:1.*{said}"):
        TextFiles(TextOptions(messages="talk")).read(SplitRequest(split="all", root=tmp_path))
