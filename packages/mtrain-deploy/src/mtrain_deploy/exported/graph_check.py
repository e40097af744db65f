"""Check the graph of an ONNX file before ONNX Runtime opens it. Only the protobuf encoding is read; nothing is imported.

A file may come from anybody. ONNX Runtime computes whatever a graph says: a loop that never ends, weights in other files,
arrays of any declared size. ``mtrain export`` writes none of these.

The field numbers are those of https://github.com/onnx/onnx/blob/main/onnx/onnx.proto, the encoding is described at
https://protobuf.dev/programming-guides/encoding.
"""

import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import TypeAlias

from mtrain.errors import CheckpointError
from mtrain.spec.files import open_file

MAX_DEPTH = 16
"""Deepest nesting of graphs in the branches of ``If``."""
# A node has about ten fields, and a model a few thousand nodes.
MAX_FIELDS = 3_000_000
"""Most fields of a file, without those that are passed over."""
MAX_AXES = 64
DOMAINS = ("", "ai.onnx", "com.microsoft")
"""Sets of operators that compute with arrays; trees and texts of ``ai.onnx.ml`` are not among them."""
# Each graph of an `If` is computed once at most; those of loops may run without end.
BRANCHES = "If"
"""The only operator that may hold graphs."""
# A packed list of zeros has one byte for each.
_SMALLEST_BITS = 2
"""Bits of a number of the smallest type (``INT2``)."""
_MODEL_GRAPH, _MODEL_FUNCTIONS = 7, 25
_GRAPH_NODE, _GRAPH_INITIALIZER, _GRAPH_SPARSE = 1, 5, 15
_NODE_OPERATOR, _NODE_ATTRIBUTE, _NODE_DOMAIN = 4, 5, 7
_ATTRIBUTE_TENSORS, _ATTRIBUTE_GRAPHS, _ATTRIBUTE_SPARSE = (5, 10), (6, 11), (22, 23)
_TENSOR_DIMS, _TENSOR_EXTERNAL, _TENSOR_LOCATION = 1, 13, 14

Content: TypeAlias = "mmap.mmap | bytes"
Span: TypeAlias = tuple[int, int]
"""Begin and end of an embedded message in the file."""


def check_graph(path: Path) -> None:
    """Check that a file holds one graph whose size and time its own bytes bound.

    Raises:
        CheckpointError: It holds a loop or functions, names other files, declares weights that it does not hold, or is
            damaged.
    """
    try:
        with open_file(path) as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            _Check(path, content).model((0, len(content)))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from None
    except ValueError as error:  # also of mmap, for an empty file
        raise CheckpointError(
            f"{path}: cannot be loaded as an ONNX file; it is damaged or of another kind ({error})"
        ) from None


class _Check:
    """Goes through the messages of one file."""

    def __init__(self, path: Path, content: Content) -> None:
        self._path, self._content = path, content
        self._seen = 0

    def model(self, span: Span) -> None:
        """Check the whole file."""
        graphs = 0
        for number, value in self._fields(span):
            if number == _MODEL_FUNCTIONS:
                raise self._refusal("defines operators of its own (functions)")
            if number == _MODEL_GRAPH:
                graphs += 1
                self._graph(_message(value), depth=0)
        if graphs != 1:
            raise ValueError(f"{graphs} graphs, expected 1")

    def _graph(self, span: Span, *, depth: int) -> None:
        if depth > MAX_DEPTH:
            raise self._refusal(f"nests graphs deeper than {MAX_DEPTH}")
        for number, value in self._fields(span):
            if number == _GRAPH_NODE:
                self._node(_message(value), depth=depth)
            elif number == _GRAPH_INITIALIZER:
                self._tensor(_message(value))
            elif number == _GRAPH_SPARSE:
                raise self._refusal("has sparse weights")

    def _node(self, span: Span, *, depth: int) -> None:
        found = list(self._fields(span))
        operator, domain = (self._text(found, number) for number in (_NODE_OPERATOR, _NODE_DOMAIN))
        if domain not in DOMAINS:
            raise self._refusal(f"has the operator {operator} of {domain}")
        for number, value in found:
            if number == _NODE_ATTRIBUTE:
                self._attribute(_message(value), operator, depth=depth)

    def _attribute(self, span: Span, operator: str, *, depth: int) -> None:
        for number, value in self._fields(span):
            if number in _ATTRIBUTE_TENSORS:
                self._tensor(_message(value))
            elif number in _ATTRIBUTE_SPARSE:
                raise self._refusal("has sparse weights")
            elif number in _ATTRIBUTE_GRAPHS:
                if operator != BRANCHES:
                    raise self._refusal(f"has the operator {operator}, which may run without end")
                self._graph(_message(value), depth=depth + 1)

    def _tensor(self, span: Span) -> None:
        elements, axes = 1, 0
        for number, value in self._fields(span):
            if number == _TENSOR_EXTERNAL or (number == _TENSOR_LOCATION and value != 0):
                raise self._refusal("has weights in other files")
            if number == _TENSOR_DIMS:
                for size in [value] if isinstance(value, int) else _numbers(self._content, value):
                    elements, axes = elements * size, axes + 1
                    if axes > MAX_AXES:
                        raise self._refusal(f"has weights of more than {MAX_AXES} axes")
        if elements * _SMALLEST_BITS > 8 * (span[1] - span[0]):
            raise self._refusal(f"declares weights of {elements} numbers, which it does not hold")

    def _fields(self, span: Span) -> Iterator[tuple[int, int | Span]]:
        for field in fields(self._content, span):
            self._seen += 1
            if self._seen > MAX_FIELDS:
                raise self._refusal(f"has more than {MAX_FIELDS} fields")
            yield field

    def _text(self, found: list[tuple[int, int | Span]], wanted: int) -> str:
        """Return the last text of a field as printable characters; empty without one."""
        spans = [_message(value) for number, value in found if number == wanted]
        start, end = spans[-1] if spans else (0, 0)
        content = bytes(self._content[start : min(end, start + 60)])
        return ascii(content.decode("utf-8", "replace"))[1:-1]

    def _refusal(self, what: str) -> CheckpointError:
        return CheckpointError(
            f"{self._path}: {what}; `mtrain export` writes no such files, so it is not opened; export the model again"
        )


def fields(content: Content, span: Span) -> Iterator[tuple[int, int | Span]]:
    """Yield number and value of each field of a message: an integer, or the span of bytes, text or a message.

    Numbers of a fixed size are passed over.

    Raises:
        ValueError: The encoding is damaged.
    """
    position, end = span
    while position < end:
        key, position = _varint(content, position, end)
        number, kind = key >> 3, key & 7
        if kind == 0:
            value, position = _varint(content, position, end)
            yield number, value
        elif kind == 2:
            length, position = _varint(content, position, end)
            if length > end - position:
                raise ValueError(f"a field ends beyond byte {end}")
            yield number, (position, position + length)
            position += length
        elif kind in (1, 5):
            position += 8 if kind == 1 else 4
        else:
            raise ValueError(f"an unknown kind of field at byte {position}")
    if position != end:
        raise ValueError(f"a field ends beyond byte {end}")


def _varint(content: Content, position: int, end: int) -> tuple[int, int]:
    """Return the number at ``position``, without a sign, and the position after it."""
    value = 0
    for shift in range(0, 70, 7):
        if position >= end:
            break
        byte = content[position]
        position += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, position
    raise ValueError(f"a damaged number before byte {position}")


def _numbers(content: Content, span: Span) -> Iterator[int]:
    position, end = span
    while position < end:
        value, position = _varint(content, position, end)
        yield value


def _message(value: int | Span) -> Span:
    if isinstance(value, int):
        raise ValueError("a number in place of a message")
    return value
