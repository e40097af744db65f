"""Files that a leader sends to every host, compressed where that makes them smaller.

The spec of a job names all of its hosts, so that what all hosts together receive grows with the square of their number.
Compressed, a host takes about three bytes of it.
"""

import base64
import zlib
from collections.abc import Mapping
from typing import Any

LEAST_BYTES = 2048
"""Smaller files are sent as they are, which people can read in a message."""
KEY = "zlib"


def pack(files: Mapping[str, str]) -> dict[str, Any]:
    """Return files by name as values of a message."""
    return {name: _pack(text) for name, text in files.items()}


def unpack(files: Mapping[str, Any]) -> dict[str, str]:
    """Return the texts of the files that ``pack`` has packed."""
    return {name: _unpack(value) for name, value in files.items()}


def _pack(text: str) -> Any:
    content = text.encode("utf-8", "surrogateescape")
    if len(content) < LEAST_BYTES:
        return text
    return {KEY: base64.b64encode(zlib.compress(content, 9)).decode("ascii")}


def _unpack(value: Any) -> str:
    if isinstance(value, str):
        return value
    return zlib.decompress(base64.b64decode(value[KEY])).decode("utf-8", "surrogateescape")
