"""Pack documents into rows of one length, so that no token is padding and no document sees another one.

All documents, each with the token that ends it, form one stream, which is cut into rows. A row holds the position of each
token in its document (from 0 again at the start of a row, because the tokens before it are not there) and, as label, the
next token of the same document.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mtrain.errors import DataError
from mtrain_language.chat import ChatTemplate
from mtrain_language.documents import Document
from mtrain_language.tokens import Tokenizer

# Losses of other libraries leave out the same number, so labels can be handed to them.
NONE = -100
"""Label of a token after which nothing is learned."""


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Packed documents."""

    tokens: NDArray[np.int32]
    """(R, L)."""
    positions: NDArray[np.int32]
    """(R, L) place of each token in what the row holds of its document."""
    labels: NDArray[np.int32]
    """(R, L) the token to predict, or ``NONE``."""
    documents: int
    """Number of documents."""
    dropped: int
    """Number of tokens at the end that did not fill a row."""

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def counts(self) -> NDArray[np.int64]:
        """Return (R,) the number of labels in each row."""
        return np.asarray((self.labels != NONE).sum(axis=1), np.int64)


def pack(
    documents: Sequence[Document], tokenizer: Tokenizer, *, length: int, template: ChatTemplate | None = None
) -> Rows:
    """Pack documents into rows of ``length`` tokens. Rows without a label are left out.

    ``template`` renders conversations.

    Raises:
        DataError: There are too few tokens for one row, or no document, or no template for conversations.
    """
    if not documents:
        raise DataError("data: a split has no document; give it files with text, or make the other split smaller")
    tokens, labels, starts = _stream(documents, tokenizer, template)
    count = len(tokens) // length
    if not count:
        raise DataError(
            f"data.length: {length} tokens in a row, but {len(documents)} documents have {len(tokens)}; give a smaller "
            "length, or more text"
        )
    kept = count * length
    begins = np.zeros(len(tokens), dtype=bool)
    begins[starts] = True
    # What stands before the beginning of a row is not there, so positions count anew.
    begins[0:kept:length] = True
    places = np.arange(kept)
    positions = places - np.maximum.accumulate(np.where(begins[:kept], places, 0))
    shape = (count, length)
    rows = labels[:kept].reshape(shape)
    # A row without a label would be a batch without a loss.
    learned = (rows != NONE).any(axis=1)
    if not learned.any():
        raise DataError("data: no document has a token to learn; a text has at least two tokens, or follows a prompt")
    return Rows(
        tokens=tokens[:kept].reshape(shape)[learned],
        positions=positions.reshape(shape)[learned].astype(np.int32),
        labels=rows[learned],
        documents=len(documents),
        dropped=len(tokens) - kept,
    )


def _stream(
    documents: Sequence[Document], tokenizer: Tokenizer, template: ChatTemplate | None
) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int64]]:
    """Return all tokens, their labels, and where documents start."""
    parts: list[NDArray[np.int32]] = []
    targets: list[NDArray[np.int32]] = []
    lengths = []
    texts = [_texts(document, template) for document in documents]
    if template is not None:
        # The process that renders holds memory, which training needs.
        template.close()
    encoded = iter(tokenizer.encode_all([text for pieces in texts for text, _ in pieces]))
    for document, pieces in zip(documents, texts, strict=True):
        tokens, learned = _join(document, [(next(encoded), learned) for _, learned in pieces], end=tokenizer.end)
        label = np.full(len(tokens), NONE, np.int32)
        # The label is the next token, so that the last token of a document has none.
        label[:-1] = np.where(learned[1:], tokens[1:], NONE)
        parts.append(tokens)
        targets.append(label)
        lengths.append(len(tokens))
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]]).astype(np.int64)
    return np.concatenate(parts), np.concatenate(targets), starts


def _texts(document: Document, template: ChatTemplate | None) -> list[tuple[str, bool]]:
    """Return the texts that make up a document, none of them empty, each with whether it is learned."""
    if document.messages and template is None:
        raise DataError(
            "data.options.messages: conversations given, but data.tokenizer brings no chat template; name one with "
            "data.chat_template, or chatml"
        )
    texts = [(document.prompt, False), (document.text, True)]
    if document.messages and template is not None:
        texts = template.parts(document.messages)
    return [(text, learned) for text, learned in texts if text]


def _join(
    document: Document, pieces: Sequence[tuple[NDArray[np.int32], bool]], *, end: int
) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
    """Return the tokens of a document, and which of them are learned; the last one ends it."""
    tokens = np.concatenate([*(piece for piece, _ in pieces), np.zeros(0, np.int32)])
    learned = np.concatenate(
        [*(_mark_learned(piece, end) & is_learned for piece, is_learned in pieces), np.zeros(0, bool)]
    )
    if document.messages and end in pieces[-1][0]:
        return tokens, learned  # templates of many models end a turn with the token that ends a text
    return np.append(tokens, np.int32(end)), np.append(learned, True)


def _mark_learned(tokens: NDArray[np.int32], end: int) -> NDArray[np.bool_]:
    """Return which tokens of an answer are learned: to the one that ends it, behind which a model says no more."""
    ends = np.flatnonzero(tokens == end)
    return np.arange(len(tokens)) <= (ends[-1] if len(ends) else len(tokens))
