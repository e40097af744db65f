"""Pickles are data: a file of weights cannot make anything be imported, called, opened or started, and memory is
bounded."""

import collections
import contextlib
import os
import pickle
import pickletools
import posixpath
import struct
import subprocess
import sys
from io import BytesIO

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from mtrain.weights.pickles import Inert, Refused, load
from mtrain.weights.vocabulary import WeightsVocabulary
from tests.weights.audit import audited

pytestmark = pytest.mark.smoke

ARRAYS = {
    "conv.weight": np.arange(24, dtype=np.float32).reshape(2, 3, 2, 2),
    "half": np.linspace(0, 1, 5).astype(np.float16),
    "count": np.array(7, np.int64),
    "flags": np.array([True, False]),
    "big_endian": np.arange(3, dtype=">f8"),
    "fortran": np.asfortranarray(np.arange(6, dtype=np.float64).reshape(2, 3)),
    "empty": np.zeros((0, 4), np.float32),
}


def read(content):
    return load(BytesIO(content), WeightsVocabulary())


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_arrays_of_every_protocol_are_read_as_numpy_reads_them(protocol):
    value = {"a": ARRAYS, "more": [1, 2.5, None, True, "text", b"bytes", (1, 2), {3}, 2**70, np.float64(0.5)]}
    actual = read(pickle.dumps(value, protocol=protocol))
    for name, array in ARRAYS.items():
        got = actual["a"][name].array()
        assert got.dtype == array.dtype
        np.testing.assert_array_equal(got, array)
    assert actual["more"][:9] == [1, 2.5, None, True, "text", b"bytes", (1, 2), [3], 2**70]
    assert actual["more"][9] == 0.5


def test_objects_become_records_without_behaviour():
    content = b"\x80\x02cmodels.yolo\nDetectionModel\n)\x81}X\x01\x00\x00\x00aK\x05sb."
    actual = read(content)
    assert isinstance(actual, Inert)
    assert (str(actual.kind), actual.state) == ("models.yolo.DetectionModel", {"a": 5})


class Evil:
    def __init__(self, function, *arguments):
        self.reduced = (function, arguments)

    def __reduce__(self):
        return self.reduced


HOSTILE = {
    "posix.system": pickle.dumps(Evil(os.system, "touch owned")),
    "subprocess.Popen": pickle.dumps(Evil(subprocess.Popen, ["touch", "owned"])),
    "builtins.eval": pickle.dumps({"a": Evil(eval, "1")}),
    "builtins.exec": pickle.dumps(Evil(exec, "1"), protocol=2).replace(b"__builtin__", b"builtins"),
    "builtins.getattr": pickle.dumps([Evil(getattr, "", "join")]),
    "builtins.open": b"\x80\x02c__builtin__\nopen\nX\x01\x00\x00\x00x\x85R.".replace(b"__builtin__", b"builtins"),
    "os.system": b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c\x01x\x85R.",
    "posixpath.join": pickle.dumps(Evil(posixpath.join, "a", "b")),
    "operator.methodcaller": b"\x80\x02coperator\nmethodcaller\nX\x01\x00\x00\x00x\x85R.",
    "functools.partial": b"\x80\x02cfunctools\npartial\n)R.",
    "importlib.import_module": b"\x80\x02cimportlib\nimport_module\nX\x02\x00\x00\x00os\x85R.",
    "numpy.load": b"\x80\x02cnumpy\nload\nX\x01\x00\x00\x00x\x85R.",
    "numpy.fromfile": b"\x80\x02cnumpy\nfromfile\nX\x01\x00\x00\x00x\x85R.",
    "torch.load": b"\x80\x02ctorch\nload\nX\x01\x00\x00\x00x\x85R.",
    "torch.hub.load": b"\x80\x02ctorch.hub\nload\nX\x01\x00\x00\x00x\x85R.",
    "torch.nn.modules.module.torch.os.system": b"\x80\x04\x8c\x17torch.nn.modules.module\x8c\x0ftorch.os.system\x93.",
    "models.yolo.os.system": b"\x80\x04\x8c\x0bmodels.yolo\x8c\x09os.system\x93\x8c\x01x\x85R.",
    "torch.nn.modules.__init__.x.y": b"\x80\x04\x8c\x19torch.nn.modules.__init__\x8c\x03x.y\x93.",
    "collections.OrderedDict.fromkeys": b"\x80\x04\x8c\x0bcollections\x8c\x14OrderedDict.fromkeys\x93.",
    "copyreg._reconstructor": b"\x80\x02ccopyreg\n_reconstructor\n.",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_name_that_is_not_listed_is_refused_and_named(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with audited() as events, pytest.raises(Refused) as caught:
        read(HOSTILE[name])
    assert str(caught.value) == f"the name {name}"
    assert events == []
    assert list(tmp_path.iterdir()) == []


def array_state(shape, dtype=b"X\x02\x00\x00\x00f4", content=b"C\x04abcd"):
    """A pickle of one numpy array in parts that a test may falsify."""
    made = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\nK\x00\x85C\x01btR"
    typed = b"cnumpy\ndtype\n(" + dtype + b"\x89\x88tR"
    return b"\x80\x04" + made + b"(K\x01" + shape + typed + b"\x89" + content + b"tb."


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\x80\x02\x82\x01.", "EXT1"),
        (b"\x80\x02\x83\x01\x00.", "EXT2"),
        (b"\x80\x02\x84\x01\x00\x00\x00.", "EXT4"),
        (b"(S'x'\nios\nsystem\n.", "STRING"),
        (b"\x80\x02(ios\nsystem\n.", "INST"),
        (b"\x80\x02(cmodels.yolo\nModel\no.", "OBJ"),
        (b"\x80\x04cmodels.yolo\nModel\n)}\x92.", "NEWOBJ_EX"),
        (b"\x80\x02Pkey\n.", "PERSID"),
        (b"\x80\x02X\x01\x00\x00\x00kQ.", "persistent id"),
        (b"\x80\x05\x97.", "NEXT_BUFFER"),
        (b"\x80\x02X\x01\x00\x00\x00x)R.", "which is no name"),
        (b"\x80\x02cmodels.yolo\nModel\n)R)R.", "which is no name"),
        (b"\x80\x02]}b.", "state for a value of type list"),
        (b"\x80\x02cmodels.yolo\nModel\n}b.", "state for models.yolo.Model"),
        (b"\x80\x02ccollections\nOrderedDict\n]\x85R.", "with content"),
        (b"\x80\x02cmodels.yolo\nModel\nK\x01a.", "items for models.yolo.Model"),
        (b"\x80\x02}]K\x01s.", "a dictionary key"),
        (b"\x80\x02}\x8b\x09\x00\x00\x00" + b"\x01" * 9 + b"K\x01s.", "a dictionary key"),
        (b"\x80\x02.", "damaged"),
        (b"\x80\x02t.", "damaged"),
        (b"\x80\x02(K\x01K\x02u.", "damaged"),
        (b"\x80\x02K\x01", "damaged"),
        (b"\x80\x02h\x07.", "damaged"),
        (b"", "damaged"),
        (b"\xff\xff\xff", "damaged"),
        (b"\x80\x04\x8e" + struct.pack("<Q", 2**63 - 1) + b"x.", "damaged"),
        (b"\x80\x04\x8d" + struct.pack("<Q", 2**40) + b"x.", "damaged"),
        (b"\x80\x02cnumpy\ndtype\nX\x01\x00\x00\x00O\x85R.", "the array type 'O'"),
        (b"\x80\x02cnumpy\ndtype\nX\x02\x00\x00\x00V8\x85R.", "the array type 'V8'"),
        (b"\x80\x02cnumpy\ndtype\nX\x05\x00\x00\x00f4,i4\x85R.", "the array type 'f4,i4'"),
        (array_state(b"K\x02\x85"), "a numpy array of shape (2,) with 4 bytes"),
        (array_state(b"J\xff\xff\xff\xff\x85"), "a shape with a size"),
        (array_state(b"(K\x01K\x00\x8a\x09\x00\x00\x00\x00\x00\x00\x00\x00\x01t"), "a shape with a size"),
        (array_state(b"K\x01\x85", content=b"]"), "whose content is of type list"),
        (b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n(K\x01K\x00))\x89NtR.", "a tensor without storage"),
        (b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n)R.", "with arguments that it does not take"),
        (b"\x80\x02ctorch._utils\n_rebuild_qtensor\n)R.", "the name torch._utils._rebuild_qtensor"),
        (b"\x80\x02c_codecs\nencode\nX\x01\x00\x00\x00xX\x03\x00\x00\x00hex\x86R.", "_codecs.encode"),
    ],
)
def test_tricks_of_the_protocol_are_refused(content, message):
    with audited() as events, pytest.raises(Refused, match=message.replace("(", r"\(").replace(")", r"\)")):
        read(content)
    assert events == []


def test_a_refusal_shows_no_control_characters_of_the_file():
    with pytest.raises(Refused) as caught:
        read(b"\x80\x04\x8c\x06\x1b[31mx\x8c\x01y\x93.")
    assert str(caught.value).isprintable()


LIMITED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_AS, (limit := 2 << 30, limit))
sys.path.insert(0, {root!r})
from io import BytesIO
from mtrain.weights.pickles import Refused, load
from mtrain.weights.vocabulary import WeightsVocabulary
try:
    load(BytesIO({content}), WeightsVocabulary())
except Refused as error:
    print("refused:", str(error)[:60])
else:
    print("read")
"""


@pytest.mark.job
@pytest.mark.parametrize(
    "content",
    [
        "b'\\x80\\x02Nr\\xff\\xff\\xff\\x7f.'",  # a memo index of 2 ** 31
        "b'\\x80\\x02' + b']' * (3 * 10**5) + b'a' * (3 * 10**5 - 1) + b'.'",  # lists nested very deep
        "b'\\x80\\x02' + b')' + b'\\x85' * 3 * 10**5 + b'.'",  # tuples nested very deep
        "b'\\x80\\x02}' + b')' + b'\\x85' * 3 * 10**5 + b'K\\x01s.'",  # and one as a dictionary key
        "b'\\x80\\x02(' + b'N' * 10**6 + b'tq\\x00' + b'c__builtin__\\ntuple\\nq\\x01' + b'h\\x01h\\x00\\x85R' * 10**5 + b'.'",
        "b'\\x80\\x02X\\x40\\x42\\x0f\\x00' + b'x' * 10**6 + b'q\\x00c_codecs\\nencode\\nq\\x01' + b'h\\x01h\\x00\\x85R' * 10**5 + b'.'",
        "b'\\x80\\x02cmodels.yolo\\nModel\\n)R}b' + b'cmodels.yolo\\nModel\\n)R}X\\x08\\x00\\x00\\x00_modulesb' * 10 + b'.'",
    ],
    ids=["memo index", "deep lists", "deep tuples", "deep key", "copies of a list", "copies of a text", "modules"],
)
def test_small_files_cannot_take_much_memory_or_the_stack(content):
    root = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))
    code = LIMITED.format(root=root, content=content)
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert process.returncode == 0, process.stderr
    assert process.stdout.startswith(("refused", "read"))


# ---------------------------------------------------------------------------------------------------------- generated
SEEDS = [pickle.dumps(ARRAYS, protocol=p) for p in (2, 3, 4, 5)] + [
    pickle.dumps(collections.OrderedDict(a=np.float32(1), b=[{1, 2}, (3, b"x")]), protocol=2),
    *HOSTILE.values(),
]
WORDS = [
    b"cos\nsystem\n", b"cbuiltins\neval\n", b"cmodels.yolo\nModel\n", b"ccollections\nOrderedDict\n", b"cnumpy\ndtype\n",
    b"cnumpy.core.multiarray\n_reconstruct\n", b"ctorch._utils\n_rebuild_tensor_v2\n", b"c_codecs\nencode\n",
    b"cbuiltins\ngetattr\n", b"X\x02\x00\x00\x00f4", b"X\x06\x00\x00\x00system", b"C\x04abcd", b"K\x01", b"J\xff\xff\xff\xff",
    b"q\x00", b"h\x00", b"r\xff\xff\xff\x7f", b"\x94",
]  # fmt: skip
CODES = [operation.code.encode("latin-1") for operation in pickletools.opcodes]


def try_to_read(content):
    with audited() as events, contextlib.suppress(Refused):
        read(content)
    assert events == []


@settings(max_examples=600, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.sampled_from(SEEDS), st.data())
def test_damaged_pickles_are_read_or_refused_and_nothing_happens(seed, data):
    content = bytearray(seed)
    for _ in range(data.draw(st.integers(1, 8))):
        at = data.draw(st.integers(0, len(content)))
        kind = data.draw(st.sampled_from(["change", "insert", "cut", "word"]))
        if kind == "change" and at < len(content):
            content[at] = data.draw(st.integers(0, 255))
        elif kind == "insert":
            content[at:at] = data.draw(st.binary(max_size=6))
        elif kind == "word":
            content[at:at] = data.draw(st.sampled_from(WORDS))
        else:
            del content[at : at + data.draw(st.integers(1, 20))]
    try_to_read(bytes(content))


@settings(max_examples=1000, deadline=None)
@given(st.lists(st.one_of(st.sampled_from(WORDS), st.sampled_from(CODES), st.binary(max_size=3)), max_size=40))
@example([b"cbuiltins\neval\n", b"X\x01\x00\x00\x001", b"\x85", b"R"])
def test_generated_pickles_are_read_or_refused_and_nothing_happens(parts):
    try_to_read(b"\x80\x04" + b"".join(parts) + b".")


def test_the_audit_sees_what_a_real_unpickler_does():
    with audited() as events:
        pickle.loads(pickle.dumps(Evil(os.getpid)))
    assert any(event.startswith("pickle.find_class") for event in events)
