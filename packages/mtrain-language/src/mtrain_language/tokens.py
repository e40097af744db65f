"""Turn text into tokens and back: by bytes, or by a ``tokenizer.json`` as Hugging Face's models have."""

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from mtrain.errors import DataError
from mtrain.spec.bounded_process import BoundedProcess, Failed
from mtrain.spec.bounds import limit_of
from mtrain.spec.files import parse_json, read_bytes
from mtrain_language.section import BYTES, LanguageDataSpec
from mtrain_language.tokenizer_library import Library, open_tokenizer

Tokens = NDArray[np.int32]
FILE = "tokenizer.json"
CONFIG = "tokenizer_config.json"
MAX_CONFIG_BYTES = 4 << 20
"""Largest ``tokenizer_config.json`` that is read."""
_SECONDS, _BYTES_PER_S = 60, 50_000
"""Processor time that a call may take, and how many bytes of texts add a second to it."""
_CALL_BYTES = 1 << 20
"""Bytes of texts that a process receives at once."""
_USUAL_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>")
"""Tokens that end a document in the tokenizers of published models, for files that do not name theirs."""


class Bytes:
    """A tokenizer that needs no file: token ``b`` is the byte ``b`` of UTF-8, and 256 ends a document."""

    @property
    def size(self) -> int:
        """Number of different tokens."""
        return 257

    @property
    def end(self) -> int:
        """The token after each document."""
        return 256

    def encode(self, text: str) -> Tokens:
        """Return the tokens of a text, int32 (T,), without one that begins or ends it."""
        return np.frombuffer(text.encode("utf-8", errors="replace"), np.uint8).astype(np.int32)

    def encode_all(self, texts: Sequence[str]) -> list[Tokens]:
        """Return the tokens of each text."""
        return list(map(self.encode, texts))

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens; what is no text becomes a replacement character."""
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

    @property
    def library(self) -> Any:
        """The tokenizer as the library has it, in this process."""
        return open_tokenizer(self.path)

    @cached_property
    def _process(self) -> BoundedProcess:
        size = self.path.stat().st_size if self.path.is_file() else 0
        worker = f"{Library.__module__}:Library"
        return BoundedProcess(worker, str(self.path), limit_bytes=limit_of(size), seconds=_SECONDS)

    def _ask_tokenizer(self, method: str, *arguments: Any, texts: Sequence[bytes] = ()) -> tuple[Any, list[bytes]]:
        size = sum(map(len, texts))
        # Long texts may take long; a short one that takes long is meant to.
        limit, seconds = limit_of(size), _SECONDS + size // _BYTES_PER_S
        try:
            return self._process.call(method, *arguments, payloads=texts, limit_bytes=limit, seconds=seconds)
        except Failed as error:
            raise DataError(
                f"data.tokenizer: {self.path}: {error}; give a {FILE} of a model, a folder with one, or `bytes`"
            ) from error

    @cached_property
    def size(self) -> int:
        """Return the number of different tokens."""
        return int(self._ask_tokenizer("size")[0])

    @cached_property
    def end(self) -> int:
        """Return the token after each document.

        Raises:
            DataError: The files do not say it, or the tokenizer has no such token.
        """
        named = self._end_token or self._named_end()
        names = [named] if named else list(_USUAL_ENDS)
        found = next((place for place in self._ask_tokenizer("places", names)[0] if place is not None), None)
        if found is None:
            why = f"has no token {named!r}" if named else "does not say which token ends a document"
            raise DataError(f"data.tokenizer: {self.path} {why}; name one of its tokens with data.end_token")
        return int(found)

    def _named_end(self) -> str | None:
        """Return the token that ``tokenizer_config.json`` beside the file names; None: there is no such file."""
        found = read_config(self.path.parent).get("eos_token")
        found = found.get("content") if isinstance(found, dict) else found
        if found is not None and not isinstance(found, str):
            raise DataError(
                f"data.tokenizer: {self.path.parent / CONFIG}: eos_token is no text; name a token with data.end_token"
            )
        return found

    def encode(self, text: str) -> Tokens:
        """Return the tokens of a text, int32 (T,), without one that begins or ends it."""
        return self.encode_all([text])[0]

    def encode_all(self, texts: Sequence[str]) -> list[Tokens]:
        """Return the tokens of each text."""
        found: list[Tokens] = []
        for part in _parts(texts):
            lengths, (content,) = self._ask_tokenizer("encode", texts=part)
            found += np.split(np.frombuffer(content, np.int32), np.cumsum(lengths)[:-1])
        self._process.close()  # a rank trains for days, and the process may hold much
        return found

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens; what is no text becomes a replacement character."""
        return str(self._ask_tokenizer("decode", [int(token) for token in tokens])[0])


Tokenizer: TypeAlias = Bytes | FromFile


def _parts(texts: Sequence[str]) -> Iterator[list[bytes]]:
    """Yield the texts in UTF-8, as many at once as a process receives."""
    part: list[bytes] = []
    size = 0
    for text in texts:
        if part and size > _CALL_BYTES:
            yield part
            part, size = [], 0
        part.append(text.encode("utf-8", errors="replace"))
        size += len(part[-1])
    if part:
        yield part


def read_config(folder: Path) -> Mapping[str, Any]:
    """Return the entries of ``tokenizer_config.json`` in the folder of a tokenizer; none where there is no such file.

    Raises:
        DataError: It cannot be read.
    """
    file = folder / CONFIG
    if not file.is_file():
        return {}
    try:
        found = parse_json(read_bytes(file, limit=MAX_CONFIG_BYTES))
    except (OSError, ValueError) as error:
        raise DataError(f"data.tokenizer: {file} cannot be read: {error}; copy it again") from error
    if not isinstance(found, dict):
        raise DataError(f"data.tokenizer: {file} is no configuration (JSON with keys and values); copy it again")
    return found


def tokenizer_of(section: LanguageDataSpec) -> Tokenizer:
    """Return the tokenizer that the data section of a spec names."""
    if section.tokenizer == BYTES:
        return Bytes()
    return FromFile(Path(section.tokenizer).expanduser(), end_token=section.end_token)


def facts(tokenizer: Tokenizer, section: LanguageDataSpec) -> dict[str, int]:
    """Return what a model has to know of the tokens: their number ``vocabulary``, the ``end`` of a document, and the
    ``length`` of a row."""
    return {"vocabulary": tokenizer.size, "end": tokenizer.end, "length": section.length}
