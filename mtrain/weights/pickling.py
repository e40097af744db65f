"""Write pickles instruction by instruction, so that they can name classes of libraries that are not here."""

import pickle
import pickletools
import struct
from collections.abc import Mapping
from typing import Any

NONE, FALSE, TRUE = b"N", b"\x89", b"\x88"


def plain(value: Any) -> bytes:
    """Return the instructions for a text, a number, a truth, None, or a tuple, list or dictionary of these."""
    return pickletools.optimize(pickle.dumps(value, 2))[2:-1]  # without the instruction for the protocol, and the end


def raw(value: bytes) -> bytes:
    """Return the instruction for bytes."""
    if len(value) < 2**32:
        return b"B" + struct.pack("<I", len(value)) + value
    return b"\x8e" + struct.pack("<Q", len(value)) + value


def row(*parts: bytes) -> bytes:
    """Return the instructions for a tuple of values, each given by its instructions."""
    return b"(" + b"".join(parts) + b"t"


def name(module: str, attribute: str) -> bytes:
    """Return the instruction for a class or function."""
    return f"c{module}\n{attribute}\n".encode()


def call(function: bytes, *arguments: bytes) -> bytes:
    """Return the instructions for what a function returns."""
    return function + row(*arguments) + b"R"


def dictionary(entries: Mapping[bytes, bytes]) -> bytes:
    """Return the instructions for a dictionary."""
    return b"}(" + b"".join(key + value for key, value in entries.items()) + b"u"


def record(kind: bytes, state: bytes) -> bytes:
    """Return the instructions for an object of a class that is made without arguments and then gets its state."""
    return kind + b")\x81" + state + b"b"


def fields(kind: bytes, entries: Mapping[str, bytes]) -> bytes:
    """Return the instructions for an object with attributes."""
    return record(kind, dictionary({plain(key): value for key, value in entries.items()}))


EMPTY = call(name("collections", "OrderedDict"))
"""The instructions for an empty ordered dictionary."""
