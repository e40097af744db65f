"""Continue the texts of files: the data of a job that predicts."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from mtrain.core.interfaces import Array, Evaluator, HostBatch, Task
from mtrain.core.record_files import write_json
from mtrain.data import reading
from mtrain.errors import DataError
from mtrain.spec.model import Spec
from mtrain_language.chat import template_of
from mtrain_language.section import GenerateSpec, data_of, has_conversations
from mtrain_language.tokens import Tokenizer, facts, tokenizer_of

MAX_BYTES = 16 << 20
"""Largest file with a text to continue."""


def text_of(file: Path) -> str:
    """Return the text of a file.

    Raises:
        DataError: It cannot be read, or holds no text.
    """
    text = reading.text_of(file, expected="a text to continue", limit=MAX_BYTES)
    if not text.strip():
        raise DataError(f"{file}: empty; expected a text to continue")
    return text.removesuffix("\n")  # editors end the last line


class Prompts:
    """Texts of files as samples, of which the last ``data.length`` tokens are read. Implements ``Source``."""

    def __init__(self, texts: Sequence[str], tokenizer: Tokenizer, *, length: int, section: GenerateSpec) -> None:
        self._tokens = tokenizer.encode_all(texts)
        # A prompt leaves room for what is added: a model has a longest input.
        self._room = max(length - section.tokens, length // 2, 1)
        self._end = tokenizer.end
        self._new = min(section.tokens, length - 1)
        self._section = section

    def __len__(self) -> int:
        return len(self._tokens)

    def sample(self, epoch: int, index: int, *, update: int = 0) -> tuple[int, Array]:
        """Return the number of a text and its last tokens."""
        return index, self._tokens[index][-self._room :]

    def collate(self, samples: Sequence[tuple[int, Array]]) -> dict[str, Array]:
        """Join samples: ``tokens`` int64 (B, L), filled up on the right, and ``generate``; see ``network.continue_texts``."""
        longest = max(len(tokens) for _, tokens in samples)
        rows = np.full((len(samples), longest), self._end, np.int64)
        settings = []
        for row, (_, tokens) in zip(rows, samples, strict=True):
            row[: len(tokens)] = tokens
            drawing = [round(self._section.temperature * 1e6), round(self._section.top_p * 1e6)]
            settings.append([len(tokens), self._new, self._end, *drawing])
        return {
            "tokens": rows,
            "generate": np.array(settings, np.int64),
            "index": np.array([index for index, _ in samples], np.int64),
        }


class TextCollector:
    """Keeps the tokens that continue each text. Implements ``Evaluator`` without metrics."""

    metrics: ClassVar[Sequence[str]] = ()
    headline: ClassVar[Sequence[str]] = ()

    def __init__(self) -> None:
        self._tokens: dict[int, list[int]] = {}

    def add(self, batch: HostBatch, predictions: Sequence[Any]) -> None:
        """Add the tokens of one micro batch."""
        for index, tokens in zip(batch["index"], predictions, strict=True):
            self._tokens.setdefault(int(index), tokens)

    def partial(self) -> dict[int, list[int]]:
        """Return the tokens by number of the text."""
        return self._tokens

    def result(self, partials: Sequence[Any]) -> dict[str, float]:
        """Return no metrics: there is no truth."""
        return {}

    def remarks(self) -> list[str]:
        """Return nothing."""
        return []


class LanguageTexts:
    """The texts of files, to be continued. Implements ``ImageData`` of ``core.interfaces``."""

    def __init__(self, spec: Spec, files: Sequence[Path]) -> None:
        self._spec, self._files, self._section = spec, files, data_of(spec)
        self._texts = [text_of(file) for file in files]
        self._tokenizer = tokenizer_of(self._section)
        section = self._section
        template = template_of(section.tokenizer, section.chat_template) if has_conversations(section) else None
        # A model that has learned to answer is asked; what a file holds is what a user says.
        self._prompts = [
            text if template is None else template.text([{"role": "user", "content": text}], asks=True)
            for text in self._texts
        ]

    def task(self) -> Task:
        """Return the facts from which the model is built."""
        details = facts(self._tokenizer, self._section)
        return Task(kind="language", class_names=(), image_size=0, global_batch=1, details=details)

    def statistics(self) -> Mapping[str, Any]:
        """Return nothing; see ``LanguageTask.statistics``."""
        return {}

    def sources(self) -> Mapping[str, Any]:
        """Return the texts as split ``val``."""
        generate: Any = getattr(self._spec, "generate", GenerateSpec())
        return {"val": Prompts(self._prompts, self._tokenizer, length=self._section.length, section=generate)}

    def length(self, split: str) -> int:
        """Return the number of texts."""
        return len(self._files) if split == "val" else 0

    def evaluator(self) -> Evaluator:
        """Return an empty collector."""
        return TextCollector()

    def write(
        self, partial: Any, out: Path, *, confidence: float, draw: bool, names: Mapping[Path, str] | None = None
    ) -> None:
        """Write ``predictions.json``: for each file its ``file_name``, ``prompt`` and ``text``, the continuation."""
        entries = [
            {
                "file_name": (names or {}).get(file, str(file)),
                "prompt": self._texts[number],
                "text": self._tokenizer.decode([token for token in partial[number] if token != self._tokenizer.end]),
            }
            for number, file in enumerate(self._files)
        ]
        write_json(out / "predictions.json", entries)
