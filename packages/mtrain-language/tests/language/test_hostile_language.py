"""Chat templates, tokenizers and JSON lines of strangers: one sentence each, no traceback, and no more memory or time than allowed."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mtrain.core.interfaces import SplitRequest
from mtrain.errors import DataError
from mtrain.spec.bounded_process import BoundedProcess, Failed
from mtrain_language import chat, rendering, tokens
from mtrain_language.chat import ChatTemplate, template_of
from mtrain_language.documents import Document
from mtrain_language.packing import NONE, pack
from mtrain_language.readers.text import TextFiles, TextOptions
from mtrain_language.tokens import Bytes, FromFile
from tests.peak_memory import peak_bytes

TURNS = [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}]
LARGE = 1 << 30
"""Bytes of which no process of a test may take twice as many."""
TEMPLATES = {
    "a text of 3 GB": "{{ 'x' * 3000000000 }}",
    "a list of 10^9": "{{ [1] * 1000000000 }}",
    "format": "{{ '{:>9999999999}'.format(1) }}",
    "percent": "{{ '%9999999999d' % 1 }}",
    "center": "{{ 'x' | center(9999999999) }}",
    "indent": "{{ 'x\\ny' | indent(9999999999) }}",
    "batch": "{{ [1] | batch(10 ** 9, 'x') | list }}",
    "indented JSON": "{{ [[1]] | tojson(indent=9999999999) }}",
    "a power": "{{ 10 ** (10 ** 9) }}",
    "digits": "{{ 10 ** 100000 }}",
    "loops in loops": "{% for a in range(99999) %}" * 3 + "{% endfor %}" * 3,
    "doubling": "{% set n = namespace(s='x') %}{% for i in range(99) %}{% set n.s = n.s ~ n.s %}{% endfor %}{{ n.s }}",
    "nothing": "",
    "nothing of it": "{# a note #}",
    "a zero": "{{ 1 / 0 }}",
    "recursion": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "itself": "{% include 'x' %}",
    "nesting": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "blocks": "{% if 1 %}" * 3000 + "{% endif %}" * 3000,
    "loops": "{% for a in [1] %}" * 500 + "{% endfor %}" * 500,
    "no attribute": "{{ messages.x.y }}",
    "no text": "{{ messages[0] + 1 }}",
    "an index": "{{ messages[99].content }}",
    "a class": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "globals": "{{ cycler.__init__.__globals__.os.system('touch owned') }}",
    "raises": "{{ raise_exception('x' * 100000) }}",
    "surrogates": "{{ '\\ud800' }}{{ messages[0].content }}",
    "a broken tag": "{% for %}",
    "a number": "{{ 1e400 }}{{ messages | sum(attribute='content') }}",
}


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat, "_SECONDS", 1)
    monkeypatch.setattr(tokens, "_SECONDS", 2)


def peak_of(bounded: object) -> int:
    """Return the largest size that the process has had; 0 of one that has been ended."""
    return peak_bytes(bounded._process.pid) if isinstance(bounded, BoundedProcess) and bounded._process else 0


def one_sentence(error: DataError) -> str:
    said = str(error)
    assert "\n" not in said
    assert "Traceback" not in said
    assert len(said) < 600
    return said


@pytest.mark.smoke
@pytest.mark.job
@pytest.mark.parametrize("name", TEMPLATES)
def test_a_hostile_template_is_one_error(
    name: str, short: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "chat.jinja").write_text(TEMPLATES[name])
    template = template_of("bytes", "chat.jinja")
    assert template is not None
    if name in ("surrogates", "a class", "percent", "digits"):  # perhaps a text, which has to be small then
        try:
            assert len(template.text(TURNS)) < 1 << 20
        except DataError as error:
            one_sentence(error)
    else:
        with pytest.raises(DataError) as caught:
            template.parts(TURNS)
        assert one_sentence(caught.value).startswith("data.chat_template: chat.jinja ")
    assert not (tmp_path / "owned").exists()
    assert peak_of(template._renderer) < 1.5 * LARGE
    template.close()


@pytest.mark.smoke
@pytest.mark.job
def test_an_empty_template_is_refused_where_rows_are_made(tmp_path: Path) -> None:
    (tmp_path / "chat.jinja").write_text("")
    with pytest.raises(DataError, match="shows nothing of a conversation"):
        pack(
            [Document("", messages=tuple(TURNS))],
            Bytes(),
            length=4,
            template=template_of("bytes", str(tmp_path / "chat.jinja")),
        )


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"chat_template": ["x"]}, None),
        ({"chat_template": [{"name": "default", "template": 5}]}, None),
        ({"chat_template": {"default": "x"}}, None),
        ({"chat_template": 5}, None),
        ({"eos_token": 5}, "eos_token is no text"),
        ({"eos_token": {"content": ["x"]}}, "eos_token is no text"),
        ([1], "is no configuration"),
        ("[" * 100_000, "cannot be read: nested too deeply"),
        ("1" * 5_000, "cannot be read"),
        ("{", "cannot be read"),
        ('"' + "x" * (5 << 20) + '"', "more than the"),
    ],
)
def test_a_strange_configuration_of_a_tokenizer_is_one_error(config: Any, said: str | None, tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    if said is None:
        assert template_of(str(tmp_path), None) is None
        return
    with pytest.raises(DataError, match=said) as caught:
        FromFile(tmp_path, end_token=None)._named_end()
    one_sentence(caught.value)


def tokenizer(folder: Path, **changes: Any) -> FromFile:
    """Write a tokenizer of words with further steps."""
    from tokenizers import Tokenizer, models

    library = Tokenizer(models.WordLevel({"[?]": 0, "a": 1, "<stop>": 2}, unk_token="[?]"))
    described = json.loads(library.to_str())
    (folder / "tokenizer.json").write_text(json.dumps({**described, **changes}))
    return FromFile(folder, end_token="<stop>")


def replaced(by: str, count: int) -> dict[str, Any]:
    step = {"type": "Replace", "pattern": {"String": "a"}, "content": by}
    return {"normalizer": {"type": "Sequence", "normalizers": [step] * count}}


TOKENIZERS: dict[str, dict[str, Any]] = {
    "a chain of replacements": replaced("a" * 64, 8),
    "a long text before each": {
        "normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "a" * 10**5}] * 400}
    },
    "no model": {"model": None},
    "a step that is none": {"normalizer": {"type": "Nothing"}},
    "a pattern": {"normalizer": {"type": "Replace", "pattern": {"Regex": "(a+)+$"}, "content": "b"}},
    "nesting": {"normalizer": json.loads('{"type": "Sequence", "normalizers": [' * 50 + "]}" * 50)},
}


@pytest.mark.smoke
@pytest.mark.job
@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_hostile_tokenizer_is_one_error(name: str, short: None, tmp_path: Path) -> None:
    found = tokenizer(tmp_path, **TOKENIZERS[name])
    try:
        assert len(found.encode("a" * 64)) < 1 << 20
        assert name in ("a pattern", "nesting")
    except DataError as error:
        said = one_sentence(error)
        assert said.startswith(f"data.tokenizer: {tmp_path / 'tokenizer.json'}: ")
        assert said.endswith("or `bytes`")
    assert peak_of(found._process) < 2 * LARGE
    found._process.close()


@pytest.mark.smoke
@pytest.mark.job
@pytest.mark.parametrize("content", [b"", b"{", b"[" * 10**5, b"\xff\xfe", b"null", b"9" * 10**5])
def test_a_damaged_tokenizer_is_one_error(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(DataError) as caught:
        print(FromFile(tmp_path, end_token=None).size)
    one_sentence(caught.value)


@pytest.mark.smoke
@pytest.mark.job
def test_many_texts_have_the_tokens_of_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = tokenizer(tmp_path, pre_tokenizer={"type": "Whitespace"})
    monkeypatch.setattr(tokens, "_CALL_BYTES", 8)
    texts = ["a a", "", "b", "a " * 20, "\udce9 a"]
    together = found.encode_all(texts)
    assert [row.tolist() for row in together] == [[1, 1], [], [0], [1] * 20, [0, 1]]
    assert all(row.dtype == np.int32 for row in together)
    assert found.encode_all([]) == []
    assert found.encode("a").tolist() == [1], "the process that has ended begins again"


@pytest.mark.smoke
@pytest.mark.job
# ------------------------------------------------------------------------------------------------------------ one process
def test_what_a_process_holds_of_a_stranger_ends_with_its_words() -> None:
    ended = BoundedProcess("os:_Environ", limit_bytes=1 << 28)
    with pytest.raises(Failed, match="missing"):
        ended.call("get")
    crashing = BoundedProcess("builtins:object", limit_bytes=1 << 28)
    with pytest.raises(Failed, match="has no attribute 'nothing'"):
        crashing.call("nothing")
    assert crashing._process is not None
    crashing._process.kill()
    with pytest.raises(Failed, match=r"by SIGKILL: a fault in the library, or more than 0\.2 GiB"):
        crashing.call("nothing")
    with pytest.raises(Failed, match="has no attribute"):
        crashing.call("nothing")
    crashing.close()
    crashing.close()


# ------------------------------------------------------------------------------------------------------- conversations
COUNTED = "{% for m in messages %}{{ loop.index }}{{ m.content }};{% endfor %}"
COUNTED += "{% if add_generation_prompt %}{{ messages | length + 1 }}{% endif %}"
TEMPLATE = (
    "{{ bos }}{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
STRIPPED = (
    "{% for m in messages %}{% set c = m.content %}{% if m.role == 'assistant' and not loop.last %}{% set c = c.split('|')[-1] %}"
    "{% endif %}<{{ m.role }}>{{ c }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
LAST_TEN = STRIPPED.replace("not loop.last", "loop.revindex > 10")


def talk(answers: int, *, roles: tuple[str, ...] = ("user",)) -> list[dict[str, str]]:
    turns = [{"role": "system", "content": "Be brief."}]
    for number in range(answers):
        turns += [{"role": role, "content": f"{role} {number}? "} for role in roles]
        turns.append({"role": "assistant", "content": f"think {number}|it is {number * number}"})
    return turns


class Counting(rendering.Renderer):
    turns = 0

    def _text(self, messages: Any, *, asks: bool = False) -> str:
        self.turns += len(messages)
        return super()._text(messages, asks=asks)


@pytest.mark.parametrize("source", [TEMPLATE, chat._CHATML, COUNTED])
@pytest.mark.parametrize("roles", [("user",), ("user", "tool"), ()])
def test_a_long_conversation_has_the_parts_that_each_answer_alone_shows(
    source: str, roles: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    renderer, messages = rendering.Renderer(source, {"bos": "<s>"}), talk(40, roles=roles)
    parts, _ = renderer.parts([*messages, {"role": "user", "content": "left out"}])
    monkeypatch.setattr(rendering, "_EXACT", 1000)
    assert parts == renderer.parts(messages)[0]
    assert "".join(text for text, _ in parts) == renderer.text(messages, False)[0]


@pytest.mark.parametrize("source", [STRIPPED, LAST_TEN])
@pytest.mark.parametrize("answers", [2, 16, 17, 40])
def test_a_template_that_shows_earlier_turns_otherwise_is_refused_at_any_length(source: str, answers: int) -> None:
    renderer, messages = rendering.Renderer(source, {}), talk(answers)
    if source is LAST_TEN and answers == 2:
        assert len(renderer.parts(messages)[0]) == 4
        return
    with pytest.raises(ValueError, match="otherwise than alone"):
        renderer.parts(messages)


def test_the_turns_that_are_rendered_grow_with_a_conversation_and_not_with_its_square() -> None:
    counts = []
    for answers in (1_000, 2_000):
        renderer = Counting(TEMPLATE, {})
        assert len(renderer.parts(talk(answers))[0]) == 2 * answers
        counts.append(renderer.turns)
    assert counts[1] < 2.2 * counts[0]
    assert counts[1] < 2_000 * 30


def test_only_a_template_of_ours_is_rendered_in_this_process() -> None:
    assert isinstance(ChatTemplate(chat._CHATML, where="x", tokens={})._renderer, rendering.Renderer)
    assert isinstance(ChatTemplate(chat._CHATML + " ", where="x", tokens={})._renderer, BoundedProcess)


# ---------------------------------------------------------------------------------------------------- learned, and room
def test_an_answer_is_learned_up_to_the_last_token_that_ends_it() -> None:
    """Two ends in one answer, as a template writes them that closes thoughts and turns with the same token; and none."""

    class Ended(Bytes):
        end = property(lambda self: ord("!"))  # type: ignore[assignment]

    source = "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}!{% endif %}{% endfor %}"
    found = rendering.Renderer(source, {})
    template = ChatTemplate(source, where="x", tokens={})
    template.__dict__["_renderer"] = found
    for content, learned in (("a!b", b"a!b!"), ("ab", b"ab!")):
        messages = ({"role": "user", "content": "q"}, {"role": "assistant", "content": content})
        rows = pack([Document("", messages=messages)], Ended(), length=len(learned) + 1, template=template)
        assert bytes(int(label) for label in rows.labels[0] if label != NONE) == learned
    source = "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}!\n{% endif %}{% endfor %}{{ '' }}"
    template.__dict__["_renderer"] = rendering.Renderer(source, {})
    rows = pack([Document("", messages=messages)], Ended(), length=5, template=template)
    assert bytes(int(label) for label in rows.labels[0] if label != NONE) == b"ab!", (
        "a model says no more behind its end"
    )


@pytest.mark.parametrize(
    ("length", "new", "kept", "added"),
    [(100, 30, 70, 30), (100, 80, 50, 80), (100, 200, 50, 99), (3, 2, 1, 2), (2, 9, 1, 1)],
)
def test_a_prompt_keeps_its_end_and_leaves_room_for_what_is_added(length: int, new: int, kept: int, added: int) -> None:
    from mtrain_language.prediction import Prompts
    from mtrain_language.section import GenerateSpec

    prompts = Prompts(["x" * 300 + "end", "ab"], Bytes(), length=length, section=GenerateSpec(tokens=new))
    number, long = prompts.sample(0, 0)
    assert (number, len(long)) == (0, kept)
    assert bytes(long.astype(np.uint8)) == (b"x" * 300 + b"end")[-kept:]
    short = prompts.sample(0, 1)[1]
    assert bytes(short.astype(np.uint8)) == b"ab"[-kept:]
    batch = prompts.collate([prompts.sample(0, 1), prompts.sample(0, 0)])
    assert batch["generate"][:, :2].tolist() == [[min(2, kept), added], [kept, added]]
    assert batch["tokens"][0].tolist() == [*b"ab"[-kept:], *[256] * (batch["tokens"].shape[1] - min(2, kept))]


# ---------------------------------------------------------------------------------------------------------- JSON lines
@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"text": "x", "n": ' + "9" * 5_000 + "}", "no JSON"),
        ("[" * 100_000, "nested too deeply"),
        ('{"text": 1e400}', "a float as field 'text'"),
        ('{"text": "x"} {"text": "y"}', "no JSON"),
    ],
)
def test_a_strange_line_is_named(line: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text('{"text": "fine"}\n' + line + "\n")
    with pytest.raises(DataError, match=rf"train\.jsonl:2: .*{said}") as caught:
        TextFiles().read(SplitRequest(split="train", root=tmp_path))
    one_sentence(caught.value)


@pytest.mark.smoke
@pytest.mark.job
def test_half_a_character_is_a_text_for_every_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text(
        '{"text": "a \\ud800 a", "talk": [{"role": "assistant", "content": "\\udc00"}]}\n'
    )
    (plain,) = TextFiles().read(SplitRequest(split="train", root=tmp_path)).items
    (spoken,) = TextFiles(TextOptions(messages="talk")).read(SplitRequest(split="train", root=tmp_path)).items
    found = tokenizer(tmp_path, pre_tokenizer={"type": "Whitespace"})
    assert found.encode(plain.text).tolist() == [1, 0, 1]
    assert bytes(Bytes().encode(plain.text).astype(np.uint8)) == b"a ? a"
    (tmp_path / "chat.jinja").write_text("{{ messages[0].content }}")
    template = template_of("bytes", str(tmp_path / "chat.jinja"))
    assert template is not None
    assert template.text(spoken.messages) == "\udc00"
