"""Render conversations with a chat template in Jinja's sandbox, where it can read what it is given and change nothing.

A template may still ask for any time and memory, so one that mtrain did not write is rendered in a ``BoundedProcess``.
"""

import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, TypeAlias

Message: TypeAlias = Mapping[str, str]
"""A turn of a conversation: ``role`` and ``content``."""
ASSISTANT = "assistant"
"""The role whose turns are learned."""
_EXACT = 16
"""Answers of a conversation up to which each is compared with the whole conversation before it."""
_MAX_CHARACTERS = 1 << 26
"""Longest text of a conversation."""


class Renderer:
    """A template, compiled. Every method raises ``ValueError`` where the template does not take a conversation."""

    def __init__(self, source: str, tokens: Mapping[str, str]) -> None:
        """Compile ``source``; ``tokens``: special tokens that it may name."""
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_generation_tag(), "jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _as_json
        environment.globals["raise_exception"] = _refuse
        # `strftime_now` is left out: templates that tell the day then name a fixed one, so samples are the same tomorrow.
        try:
            self._compiled = environment.from_string(source)
        except MemoryError:
            raise
        except Exception as error:  # of Jinja, and of Python's own compiler
            raise ValueError(f"is no template: {error}") from error
        self._tokens = tokens

    def text(self, messages: Sequence[Message], asks: bool, _: Any = ()) -> tuple[str, list[bytes]]:  # noqa: FBT001
        """Return the text of a conversation; with ``asks`` it ends with what begins an answer."""
        return self._text(messages, asks=asks), []

    def parts(self, messages: Sequence[Message], _: Any = ()) -> tuple[list[tuple[str, bool]], list[bytes]]:
        """Divide the text of a conversation, to its last answer, into (text, whether it is learned).

        What is learned is what the assistant says and what the template puts behind it.
        """
        answers = [place for place, message in enumerate(messages) if message["role"] == ASSISTANT]
        whole = self._text(messages[: answers[-1] + 1])
        if not whole:
            raise ValueError("shows nothing of a conversation; give another template")
        spans = self._by_exchange(messages, answers, whole) if len(answers) > _EXACT else None
        found, done = [], 0
        for before, after in spans or [self._span(messages, place, whole) for place in answers]:
            found += [(whole[done:before], False), (whole[before:after], True)]
            done = after
        return found, []

    def _span(self, messages: Sequence[Message], place: int, whole: str) -> tuple[int, int]:
        """Return where in the whole text an answer begins and ends."""
        before, after = self._text(messages[:place], asks=True), self._text(messages[: place + 1])
        if not (whole.startswith(after) and after.startswith(before)):
            raise ValueError(
                f"shows turn {place + 1} of a conversation otherwise than alone (some leave thoughts out); give conversations with one "
                "answer, or another template"
            )
        return len(before), len(after)

    def _by_exchange(
        self, messages: Sequence[Message], answers: Sequence[int], whole: str
    ) -> list[tuple[int, int]] | None:
        """Return the spans of all answers in a time that grows with the conversation, not with its square; None: unknown.

        What follows an answer is rendered behind the first answer in the place of the whole conversation before it. These texts
        must make up the whole one, and some answers are compared with all that is before them, so a template that counts turns,
        or shows earlier ones otherwise, is noticed.
        """
        head = messages[: answers[0] + 1]
        begin = self._text(head)
        spans, end = [self._span(messages, answers[0], whole)], len(begin)
        for number, (former, place) in enumerate(pairwise(answers), start=1):
            exchange = [*head, *messages[former + 1 : place + 1]]
            before, after = self._text(exchange[:-1], asks=True), self._text(exchange)
            new = after[len(begin) :]
            if not (before.startswith(begin) and after.startswith(before) and whole.startswith(new, end)):
                return None
            spans.append((end + len(before) - len(begin), end + len(new)))
            end += len(new)
            if number & (number - 1) == 0 and self._span(messages, place, whole) != spans[-1]:
                return None
        return spans if end == len(whole) else None

    def _text(self, messages: Sequence[Message], *, asks: bool = False) -> str:
        given = {**self._tokens, "messages": [dict(message) for message in messages], "add_generation_prompt": asks}
        try:
            text = str(self._compiled.render(**given))
        except (MemoryError, RecursionError):
            raise
        except Exception as error:  # a template computes, so anything can go wrong in it
            raise ValueError(f"does not take a conversation: {error}") from error
        if len(text) > _MAX_CHARACTERS:
            raise ValueError(f"makes {len(text)} characters of a conversation, more than {_MAX_CHARACTERS}")
        return text


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


def _as_json(value: Any, indent: int | None = None, **_: Any) -> str:
    """Write JSON as it is, without the escapes that Jinja adds for web pages."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(message: str) -> None:
    from jinja2 import TemplateError

    raise TemplateError(message)
