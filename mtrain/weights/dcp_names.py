"""The names that the description of a ``torch.distributed.checkpoint`` folder may mention; any other one is refused."""

import re
from dataclasses import dataclass
from typing import Any

from mtrain.weights.arrays import dimensions
from mtrain.weights.pickles import MEMBER, Inert, Key, Name, Refused, member

_OWN = "torch.distributed.checkpoint"
_SIZE = Name("torch", "Size")
_INDEX = Name(f"{_OWN}.metadata", "MetadataIndex")
_PROPERTIES = Name(f"{_OWN}.metadata", "TensorProperties")
_ENUMS = frozenset({Name(f"{_OWN}.metadata", "_MEM_FORMAT_ENCODING")})
_DICTIONARY = Name("collections", "OrderedDict")
_LISTED = re.compile(
    r"torch\.distributed\.checkpoint\.metadata "
    r"(Metadata|MetadataIndex|StorageMeta|(Tensor|Bytes|Chunk)StorageMetadata|TensorProperties|_MEM_FORMAT_ENCODING)"
    r"|torch\.distributed\.checkpoint\.filesystem _StorageInfo"
    r"|torch (Size|u?int\d+|b?float\d+(_\w+)?|bool|complex\d+|q?u?int\d+(x\d+)?)"
    r"|torch\.serialization _get_layout"
    r"|collections OrderedDict"
    r"|pathlib(\._local)? (Pure)?(Posix|Windows)?Path"
)
"""Matches ``module name``."""


@dataclass(slots=True, eq=False)
class Index(Key):
    """A pickled ``MetadataIndex``: the key of an array and the place of a piece in it."""

    key: str = ""
    offset: tuple[int, ...] | None = None

    def build(self, state: object) -> None:
        """Apply the stored attributes."""
        if not isinstance(state, dict) or not isinstance(state.get("fqn"), str):
            raise Refused("the place of a piece without the name of its array")
        self.key, self.offset = state["fqn"], state.get("offset")
        if self.offset is not None:
            self.offset = dimensions(self.offset)


@dataclass(slots=True, eq=False)
class Properties:
    """Pickled ``TensorProperties``, of which the type matters."""

    dtype: str = ""
    """torch's name of the type, such as ``bfloat16``."""

    def build(self, state: object) -> None:
        """Apply ``(type, layout, requires_grad, memory format, pinned)``."""
        if not isinstance(state, tuple) or not state or not isinstance(state[0], Name):
            raise Refused("the properties of an array without its type")
        self.dtype = state[0].name


class DescriptionVocabulary:
    """The ``pickles.Vocabulary`` of ``.metadata``: torch's own records of a checkpoint, and nothing else."""

    def check(self, name: Name) -> None:
        """Refuse names that are not listed."""
        if name not in MEMBER and not _LISTED.fullmatch(f"{name.module} {name.name}"):
            raise Refused(f"the name {name}", name=name)

    def make(self, name: Name, arguments: tuple[Any, ...]) -> Any:
        """Return shapes as tuples, and records without behaviour for everything else."""
        if name in MEMBER:
            return member(name, arguments, of=_ENUMS)
        if name == _SIZE:
            return dimensions(arguments[0] if arguments else ())
        if name == _INDEX:
            return Index()
        if name == _PROPERTIES:
            return Properties()
        return {} if name == _DICTIONARY and not arguments else Inert(name)
