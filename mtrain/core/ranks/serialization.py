"""Serialise values that ranks exchange, so that a message can carry data but cannot run code.

``pickle`` calls any function that a message names. Here a message may name only types that hold data: numpy's arrays,
plain containers, and the dataclasses, named tuples and enumerations of modules that this rank has imported itself.
"""

import dataclasses
import enum
import io
import pickle
import sys
from typing import Any

from mtrain.errors import TrainingError

_ARRAYS = frozenset({"_reconstruct", "scalar", "_frombuffer", "ndarray", "dtype"})
_ARRAY_MODULES = frozenset(
    {"numpy", "numpy._core.multiarray", "numpy.core.multiarray", "numpy._core.numeric", "numpy.core.numeric"}
)
_CONTAINERS = {
    "builtins": frozenset(
        {"set", "frozenset", "bytearray", "complex", "slice", "range", "int", "float", "str", "list", "dict", "tuple"}
    ),
    "collections": frozenset({"OrderedDict", "Counter", "deque", "defaultdict"}),
}


def pack(value: Any) -> bytes:
    """Return ``value`` as bytes, for ``unpack``."""
    return pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)


def unpack(content: bytes) -> Any:
    """Return the value from which ``pack`` made ``content``.

    Raises:
        TrainingError: ``content`` is damaged, or names something other than data.
    """
    try:
        return _Reader(io.BytesIO(content)).load()
    except TrainingError:
        raise
    except Exception as error:  # Unpickling arbitrary bytes may raise any exception.
        raise TrainingError(f"what another rank sent cannot be read: {type(error).__name__}: {error}") from error


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str, /) -> Any:
        """Return the type that a message names; refuse it unless it holds data."""
        if name in _CONTAINERS.get(module, ()) or (name in _ARRAYS and module in _ARRAY_MODULES):
            return super().find_class(module, name)
        if (module, name) == ("builtins", "getattr"):
            return _member
        kind = getattr(sys.modules.get(module), name, None)
        if isinstance(kind, type) and _holds_data(kind):
            return kind
        raise TrainingError(
            f"another rank sent a value that is made with {module}.{name}; ranks exchange numbers, text, "
            "arrays, plain containers, dataclasses, named tuples and enumerations of modules that both have imported"
        )


def _member(kind: Any, name: Any, /) -> enum.Enum:
    """Return a member of an enumeration: Python 3.11.0 to 3.11.3 make one by ``getattr(Class, "NAME")``."""
    if isinstance(kind, type) and issubclass(kind, enum.Enum) and name in kind.__members__:
        return kind[name]
    raise TrainingError(
        f"another rank sent an attribute of {kind!r:.100}; ranks exchange data and members of enumerations"
    )


def _holds_data(kind: type) -> bool:
    named_tuple = issubclass(kind, tuple) and hasattr(kind, "_fields")
    return dataclasses.is_dataclass(kind) or named_tuple or issubclass(kind, enum.Enum)
