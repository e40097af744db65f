"""Conversations as text: a chat template, in Jinja as models of Hugging Face bring it, renders turns with their marks.

Nothing a template says is trusted: see ``rendering``.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from mtrain.errors import DataError
from mtrain.spec import remedies
from mtrain.spec.bounded_process import BoundedProcess, Failed
from mtrain.spec.bounds import limit_of
from mtrain.spec.files import read_text
from mtrain_language.rendering import Message, Renderer
from mtrain_language.section import BYTES
from mtrain_language.tokens import read_config

CHATML = "chatml"
"""Name of the template that needs no file."""
FILE = "chat_template.jinja"
MAX_BYTES = 4 << 20
"""Largest template that is read."""
_SECONDS, _CHARACTERS_PER_S = 20, 100_000
"""Processor time that a conversation may take, and how many of its characters add a second to it."""
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
    def _renderer(self) -> Renderer | BoundedProcess:
        remedies.require(["jinja2"], what="data.chat_template", extra="mtrain-language")
        if self.source == _CHATML:
            return Renderer(self.source, self._tokens)
        return BoundedProcess(
            f"{Renderer.__module__}:Renderer",
            self.source,
            dict(self._tokens),
            limit_bytes=limit_of(0),
            seconds=_SECONDS,
        )

    def text(self, messages: Sequence[Message], *, asks: bool = False) -> str:
        """Return the text of a conversation; with ``asks`` it ends with what begins an answer.

        Raises:
            DataError: The template refuses the conversation.
        """
        return str(self._render("text", messages, asks))

    def parts(self, messages: Sequence[Message]) -> list[tuple[str, bool]]:
        """Divide the text of a conversation, to its last answer, into (text, whether it is learned); see ``Renderer.parts``.

        Raises:
            DataError: The template refuses the conversation, shows nothing of it, or shows earlier turns otherwise once there are
                later ones, so what a model would have answered to is another text.
        """
        return [(text, learned) for text, learned in self._render("parts", messages)]

    def close(self) -> None:
        """End the process that renders, if there is one; the next conversation starts another."""
        if isinstance(self._renderer, BoundedProcess):
            self._renderer.close()

    def _render(self, method: str, messages: Sequence[Message], *more: Any) -> Any:
        size = sum(len(text) for message in messages for text in message.values())
        try:
            if isinstance(self._renderer, Renderer):
                return getattr(self._renderer, method)(messages, *more)[0]
            seconds = _SECONDS + size // _CHARACTERS_PER_S
            return self._renderer.call(method, messages, *more, limit_bytes=limit_of(size), seconds=seconds)[0]
        except (Failed, ValueError) as error:
            raise DataError(f"data.chat_template: {self._where} {error}") from error


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
    config = {} if tokenizer == BYTES else read_config(folder)
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


def _text_of(token: Any) -> str | None:
    """Return a token of ``tokenizer_config.json``, which has it as text or as an object."""
    token = token.get("content") if isinstance(token, Mapping) else token
    return token if isinstance(token, str) else None


def _in_config(found: Any) -> str | None:
    """Return the template of ``tokenizer_config.json``, where several may stand by name."""
    if isinstance(found, list):
        named = [each for each in found if isinstance(each, Mapping)]
        found = next((each.get("template") for each in named if each.get("name") == "default"), None)
    return found if isinstance(found, str) else None
