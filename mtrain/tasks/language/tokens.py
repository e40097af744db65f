"""Turn text into tokens and back: by bytes, or by a ``tokenizer.json`` as Hugging Face's models have."""

import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from mtrain.errors import DataError
from mtrain.spec.files import parse_json, read_bytes
from mtrain.tasks.language.section import BYTES, LanguageDataSpec

Tokens = NDArray[np.int32]
FILE = "tokenizer.json"
MAX_BYTES = 256 << 20
"""Largest ``tokenizer.json`` that is read."""
_USUAL_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>")
"""Tokens that end a document in the tokenizers of published models, for files that do not name theirs."""


class Tokenizer(Protocol):
    """Turns text into tokens and back."""

    @property
    def size(self) -> int:
        """Number of different tokens."""
        ...

    @property
    def end(self) -> int:
        """The token after each document."""
        ...

    def encode(self, text: str) -> Tokens:
        """Return the tokens of a text, int32 (T,), without one that begins or ends it."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens; what is no text becomes a replacement character."""
        ...


class Bytes:
    """A tokenizer that needs no file: token ``b`` is the byte ``b`` of UTF-8, and 256 ends a document."""

    @property
    def size(self) -> int:
        """See ``Tokenizer.size``."""
        return 257

    @property
    def end(self) -> int:
        """See ``Tokenizer.end``."""
        return 256

    def encode(self, text: str) -> Tokens:
        """See ``Tokenizer.encode``."""
        return np.frombuffer(text.encode("utf-8", errors="replace"), np.uint8).astype(np.int32)

    def decode(self, tokens: Sequence[int]) -> str:
        """See ``Tokenizer.decode``."""
        return bytes(token for token in tokens if token < self.end).decode("utf-8", errors="replace")


class FromFile:
    """The tokenizer of a ``tokenizer.json``."""

    def __init__(self, path: Path, *, end_token: str | None) -> None:
        """Read the file.

        Raises:
            DataError: It cannot be read, or does not say which token ends a document.
        """
        self.path = path / FILE if path.is_dir() else path
        self._end_token = end_token

    @cached_property
    def library(self) -> Any:
        """The tokenizer as the library has it."""
        from tokenizers import Tokenizer as Library

        try:
            text = read_bytes(self.path, limit=MAX_BYTES).decode("utf-8")
            found = Library.from_str(text)
        except OSError as error:
            raise DataError(
                f"data.tokenizer: {self.path}: {error.strerror}; give a {FILE}, a folder with one, or `bytes`"
            ) from error
        except Exception as error:  # the library raises Exception itself
            raise DataError(f"data.tokenizer: {self.path} is no {FILE} that can be read: {error}") from error
        found.no_truncation()
        found.no_padding()
        return found

    @property
    def size(self) -> int:
        """Return the number of different tokens."""
        return int(self.library.get_vocab_size(with_added_tokens=True))

    @cached_property
    def end(self) -> int:
        """Return the token after each document.

        Raises:
            DataError: The files do not say it, or the tokenizer has no such token.
        """
        named = self._end_token or self._named_end()
        names = [named] if named else list(_USUAL_ENDS)
        found = next((token for name in names if (token := self.library.token_to_id(name)) is not None), None)
        if found is None:
            why = f"has no token {named!r}" if named else "does not say which token ends a document"
            raise DataError(f"data.tokenizer: {self.path} {why}; name one of its tokens with data.end_token")
        return int(found)

    def _named_end(self) -> str | None:
        """Return the token that ``tokenizer_config.json`` beside the file names; None: there is no such file."""
        beside = self.path.parent / "tokenizer_config.json"
        if not beside.is_file():
            return None
        try:
            found: Any = parse_json(read_bytes(beside, limit=MAX_BYTES)).get("eos_token")
        except (OSError, ValueError, AttributeError, json.JSONDecodeError) as error:
            raise DataError(f"data.tokenizer: {beside} cannot be read: {error}") from error
        return found.get("content") if isinstance(found, dict) else found

    def encode(self, text: str) -> Tokens:
        """See ``Tokenizer.encode``."""
        return np.asarray(self.library.encode(text, add_special_tokens=False).ids, np.int32)

    def decode(self, tokens: Sequence[int]) -> str:
        """See ``Tokenizer.decode``."""
        return str(self.library.decode([int(token) for token in tokens], skip_special_tokens=True))


def tokenizer_of(section: LanguageDataSpec) -> Tokenizer:
    """Return the tokenizer that the data section of a spec names."""
    if section.tokenizer == BYTES:
        return Bytes()
    return FromFile(Path(section.tokenizer).expanduser(), end_token=section.end_token)


def facts(tokenizer: Tokenizer, section: LanguageDataSpec) -> dict[str, int]:
    """Return what a model has to know of the tokens: their number ``vocabulary``, the ``end`` of a document, and the
    ``length`` of a row."""
    return {"vocabulary": tokenizer.size, "end": tokenizer.end, "length": section.length}
