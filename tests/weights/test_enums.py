"""Members of enumerations, which Python 3.11.0 to 3.11.3 pickle as ``getattr(Class, "NAME")``, and others as ``Class(value)``.

``enums/`` holds, of both kinds, a folder that ``torch.distributed.checkpoint`` saved, and a file of ``torch.save`` with the stage of
DeepSpeed's ZeRO.
"""

import enum
import pickle
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest

from mtrain.core.ranks import serialization
from mtrain.errors import TrainingError
from mtrain.weights.dcp import DescriptionVocabulary
from mtrain.weights.pickles import Inert, Refused, load
from mtrain.weights.reading import read
from mtrain.weights.vocabulary import WeightsVocabulary
from tests.weights.audit import audited

SAVED = sorted((Path(__file__).parent / "enums").iterdir())
ENCODING = b"ctorch.distributed.checkpoint.metadata\n_MEM_FORMAT_ENCODING\n"
STAGE = b"cdeepspeed.runtime.zero.config\nZeroStageEnum\n"
ARGUMENTS = {
    "a dotted name": b"X\x05\0\0\0a.b.c",
    "a private name": b"X\x08\0\0\0__init__",
    "no text": b"K\0",
    "an empty name": b"X\0\0\0\0",
    "bytes": b"C\x01A",
}


@pytest.mark.parametrize("folder", SAVED, ids=lambda folder: folder.name)
def test_folders_and_files_of_both_kinds_are_read(folder: Path) -> None:
    assert (b"getattr" in (folder / ".metadata").read_bytes()) == (folder.name == "python3.11.2")
    whole, alone = read(folder).arrays, read(folder / "deepspeed.pt").arrays
    assert np.array_equal(whole["w"], np.arange(6, dtype=np.float32).reshape(2, 3))
    assert whole["b"].tolist() == [1.5]
    assert alone["w"].tolist() == [0, 1, 2]


def made(kind: bytes, name: bytes, module: bytes = b"builtins") -> bytes:
    return b"\x80\x02c" + module + b"\ngetattr\n" + kind + name + b"\x86R."


@pytest.mark.parametrize("module", [b"builtins", b"__builtin__"])
@pytest.mark.parametrize(
    ("kind", "vocabulary"), [(ENCODING, DescriptionVocabulary()), (STAGE, WeightsVocabulary())], ids=["dcp", "weights"]
)
def test_a_plain_name_in_a_listed_enumeration_is_all_that_is_read(
    kind: bytes, vocabulary: WeightsVocabulary | DescriptionVocabulary, module: bytes
) -> None:
    assert isinstance(load(BytesIO(made(kind, b"X\x01\0\0\0A", module)), vocabulary), Inert)
    other = STAGE if kind is ENCODING else ENCODING
    others = [b"ctorch\nSize\n", b"ccollections\nOrderedDict\n", b"X\x01\0\0\0x", b"}", b"N", other]
    hostile = [made(each, b"X\x01\0\0\0A", module) for each in others]
    hostile += [made(kind, name, module) for name in ARGUMENTS.values()]
    call = b"\x80\x02c" + module + b"\ngetattr\n"
    hostile += [call + b")R.", call + kind + b"\x85R.", call + kind + b"X\x01\0\0\0A" * 2 + b"\x87R."]
    for content in hostile:
        with audited() as events, pytest.raises(Refused, match=r"the name "):
            load(BytesIO(content), vocabulary)
        assert events == []


class Stage(enum.Enum):
    FIRST = 1

    def __reduce_ex__(self, protocol: object) -> tuple[object, tuple[object, ...]]:
        """As Python 3.11.2 does it."""
        return getattr, (type(self), self.name)


class Attribute:
    def __init__(self, *arguments: object) -> None:
        self.arguments = arguments

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return getattr, self.arguments


def test_ranks_on_such_a_python_exchange_enumerations() -> None:
    content = serialization.pack({"stage": [Stage.FIRST]})
    assert b"getattr" in content
    assert serialization.unpack(content) == {"stage": [Stage.FIRST]}
    for hostile in ((Stage, "__init__"), (Stage, "mro"), ({}, "get"), (dict, "fromkeys"), (Stage, ["FIRST"])):
        with pytest.raises(TrainingError, match="another rank sent"):
            serialization.unpack(pickle.dumps(Attribute(*hostile)))
