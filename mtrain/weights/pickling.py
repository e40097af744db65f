"""Write pickles instruction by instruction, so that they can name classes of libraries that are not here."""

import struct
from collections.abc import Mapping

NONE, FALSE = b"N", b"\x89"


def text(value: str) -> bytes:
    """Return the instruction for a text."""
    encoded = value.encode()
    return b"X" + struct.pack("<I", len(encoded)) + encoded


def number(value: int) -> bytes:
    """Return the instruction for an integer."""
    if -(2**31) <= value < 2**31:
        return b"J" + struct.pack("<i", value)
    encoded = value.to_bytes(9, "little", signed=True)
    return b"\x8a" + bytes([len(encoded)]) + encoded


def raw(value: bytes) -> bytes:
    """Return the instruction for bytes."""
    if len(value) < 2**32:
        return b"B" + struct.pack("<I", len(value)) + value
    return b"\x8e" + struct.pack("<Q", len(value)) + value


def row(*parts: bytes) -> bytes:
    """Return the instructions for a tuple of values, each given by its instructions."""
    return b"(" + b"".join(parts) + b"t"


def numbers(values: tuple[int, ...]) -> bytes:
    """Return the instructions for a tuple of integers."""
    return row(*map(number, values))


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
    return record(kind, dictionary({text(key): value for key, value in entries.items()}))
