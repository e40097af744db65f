"""The tokenizers of Hugging Face's library, as a ``BoundedProcess`` uses them: a stranger's file decides what they compute."""

import itertools
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mtrain.spec.files import read_bytes

MAX_BYTES = 256 << 20
"""Largest ``tokenizer.json`` that is read."""


def open_tokenizer(path: str | Path) -> Any:
    """Return the tokenizer of a file, which neither cuts texts nor fills them up."""
    from tokenizers import Tokenizer

    found: Any = Tokenizer.from_str(read_bytes(Path(path), limit=MAX_BYTES).decode("utf-8"))
    # Files of published models often cut at the length that they were trained with.
    found.no_truncation()
    found.no_padding()
    return found


class Library:
    """A tokenizer; see ``tokens.FromFile``. Texts come as UTF-8, and tokens go as int32, one text behind the other."""

    def __init__(self, path: str) -> None:
        self._tokenizer = open_tokenizer(path)

    def size(self, _: Sequence[bytes]) -> tuple[int, list[bytes]]:
        """Return the number of different tokens."""
        return int(self._tokenizer.get_vocab_size(with_added_tokens=True)), []

    def places(self, names: Sequence[str], _: Sequence[bytes]) -> tuple[list[int | None], list[bytes]]:
        """Return the number of each token; None: there is no such token."""
        return [self._tokenizer.token_to_id(name) for name in names], []

    def encode(self, texts: Sequence[bytes]) -> tuple[list[int], list[bytes]]:
        """Return the number of tokens of each text, and the tokens."""
        rows = [self._tokenizer.encode(text.decode(), add_special_tokens=False).ids for text in texts]
        return [len(row) for row in rows], [array("i", itertools.chain.from_iterable(rows)).tobytes()]

    def decode(self, tokens: Sequence[int], _: Sequence[bytes]) -> tuple[str, list[bytes]]:
        """Return the text of tokens."""
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True)), []
