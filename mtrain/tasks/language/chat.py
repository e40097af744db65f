"""Conversations as text: a chat template, in Jinja as models of Hugging Face bring it, renders turns with their marks.

Nothing a template says is trusted: it runs in Jinja's sandbox, where it can read what it is given and change nothing.
"""

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

from mtrain.errors import DataError
from mtrain.spec import remedies
from mtrain.spec.files import parse_json, read_bytes, read_text
from mtrain.tasks.language.section import BYTES

Message: TypeAlias = Mapping[str, str]
"""A turn of a conversation: ``role`` and ``content``."""
ASSISTANT = "assistant"
"""The role whose turns are learned."""
CHATML = "chatml"
"""Name of the template that needs no file."""
FILE = "chat_template.jinja"
MAX_BYTES = 4 << 20
"""Largest template that is read."""
_CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")
"""Tokens of ``tokenizer_config.json`` that a template may name."""


class ChatTemplate:
    """Turns conversations into text."""

    def __init__(self, source: str, *, where: str, tokens: Mapping[str, str]) -> None:
        """Take a template.

        Args:
            source: Its text.
            where: Where it comes from, for messages.
            tokens: Special tokens that it may name.
        """
        self.source = source
        self._where = where
        self._tokens = tokens

    @cached_property
    def _compiled(self) -> Any:
        remedies.need(["jinja2"], what="data.chat_template", extra="language")
        from jinja2 import TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_generation_tag(), "jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _as_json
        environment.globals["raise_exception"] = _refuse
        # `strftime_now` is left out: templates that tell the day then name a fixed one, so samples are the same tomorrow.
        try:
            return environment.from_string(self.source)
        except TemplateError as error:
            raise DataError(f"data.chat_template: {self._where} is no template: {error}") from error

    def text(self, messages: Sequence[Message], *, asks: bool = False) -> str:
        """Return the text of a conversation; with ``asks`` it ends with what begins an answer.

        Raises:
            DataError: The template refuses the conversation.
        """
        from jinja2 import TemplateError

        given = {**self._tokens, "messages": [dict(message) for message in messages], "add_generation_prompt": asks}
        try:
            return str(self._compiled.render(**given))
        except (TemplateError, TypeError, ValueError) as error:
            raise DataError(f"data.chat_template: {self._where} does not take a conversation: {error}") from error

    def parts(self, messages: Sequence[Message]) -> list[tuple[str, bool]]:
        """Divide the text of a conversation, to its last answer, into (text, whether it is learned).

        What is learned is what the assistant says and what the template puts behind it.

        Raises:
            DataError: The template shows earlier turns otherwise once there are later ones, so what a model would have
                answered to is another text.
        """
        answers = [place for place, message in enumerate(messages) if message["role"] == ASSISTANT]
        whole = self.text(messages[: answers[-1] + 1])
        found, done = [], 0
        for place in answers:
            before, after = self.text(messages[:place], asks=True), self.text(messages[: place + 1])
            if not (whole.startswith(after) and after.startswith(before)):
                raise DataError(
                    f"data.chat_template: {self._where} shows turn {place + 1} of a conversation otherwise than alone (some "
                    "leave thoughts out); give conversations with one answer, or another template"
                )
            found += [(whole[done : len(before)], False), (whole[len(before) : len(after)], True)]
            done = len(after)
        return found


def _generation_tag() -> Any:
    """Return the extension for a tag that Jinja does not know: ``{% generation %}`` around what an assistant says.

    What is learned is found by comparing texts, in templates without the tag too.
    """
    from jinja2 import nodes
    from jinja2.ext import Extension

    class Generation(Extension):
        tags = {"generation"}  # noqa: RUF012 - the library declares it so

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            inside = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(inside, lineno=line)

    return Generation


def template_of(tokenizer: str, chat_template: str | None) -> ChatTemplate | None:
    """Return the template that a spec names, else that of the tokenizer's folder; None: there is none.

    Args:
        tokenizer: ``data.tokenizer``.
        chat_template: ``data.chat_template``.

    Raises:
        DataError: It cannot be read.
    """
    folder = Path(tokenizer).expanduser()
    folder = folder if folder.is_dir() else folder.parent
    config = {} if tokenizer == BYTES else _read_config(folder)
    tokens = {name: text for name in _SPECIAL if (text := _text_of(config.get(name)))}
    if chat_template == CHATML:
        return ChatTemplate(_CHATML, where=CHATML, tokens=tokens)
    file = folder / FILE if chat_template is None else Path(chat_template).expanduser()
    if chat_template is None and (tokenizer == BYTES or not file.is_file()):
        source = _in_config(config.get("chat_template"))
        return None if source is None else ChatTemplate(source, where=str(folder), tokens=tokens)
    try:
        return ChatTemplate(read_text(file, limit=MAX_BYTES), where=str(file), tokens=tokens)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise DataError(
            f"data.chat_template: {file}: {why}; give a file with a template in Jinja, or chatml"
        ) from error


def _read_config(folder: Path) -> Mapping[str, Any]:
    file = folder / "tokenizer_config.json"
    if not file.is_file():
        return {}
    try:
        found = parse_json(read_bytes(file, limit=MAX_BYTES))
    except (OSError, ValueError) as error:
        raise DataError(f"data.tokenizer: {file} cannot be read: {error}") from error
    return found if isinstance(found, Mapping) else {}


def _text_of(token: Any) -> str | None:
    """Return a token of ``tokenizer_config.json``, which has it as text or as an object."""
    token = token.get("content") if isinstance(token, Mapping) else token
    return token if isinstance(token, str) else None


def _in_config(found: Any) -> str | None:
    """Return the template of ``tokenizer_config.json``, where several may stand by name."""
    if isinstance(found, list):
        found = next((each.get("template") for each in found if each.get("name") == "default"), None)
    return found if isinstance(found, str) else None


def _as_json(value: Any, indent: int | None = None, **_: Any) -> str:
    """Write JSON as it is, without the escapes that Jinja adds for web pages."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(message: str) -> None:
    from jinja2 import TemplateError

    raise TemplateError(message)
