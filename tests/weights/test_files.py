"""Files that torch and Paddle write are read without them, and what is written here they read: bit for bit, both ways."""

import contextlib
import importlib.util
import io
import json
import pickle
import re
import struct
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mtrain.core.checkpoint.store import Checkpoints
from mtrain.core.interfaces import Progress, State
from mtrain.errors import CheckpointError
from mtrain.weights.reading import read
from mtrain.weights.writing import check_target, write
from tests.once import once
from tests.starts import starts_processes
from tests.weights import golden
from tests.weights.audit import audited

pytestmark = pytest.mark.smoke

HERE = Path(__file__).parent


def needs(framework):
    return pytest.mark.skipif(importlib.util.find_spec(framework) is None, reason=f"{framework} is not installed")


def run(code, cwd):
    """In an interpreter of its own: no process ever holds two frameworks."""
    command = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


MIXED = {
    "a.weight": np.arange(24, dtype=np.float32).reshape(2, 3, 2, 2),
    "a.bias": np.linspace(-1, 1, 3),
    "half": np.linspace(0, 1, 5).astype(np.float16),
    "count": np.array(2**40, np.int64),
    "flags": np.array([True, False]),
    "small": np.arange(4, dtype=np.uint8),
    "signed": np.arange(-4, 4, dtype=np.int8),
    "empty": np.zeros((0, 4), np.float32),
    "fortran": np.asfortranarray(np.arange(6, dtype=np.float32).reshape(2, 3)),
    "special": np.array([np.nan, np.inf, -0.0, 1e-45], np.float32),
}


@pytest.mark.parametrize("ending", [".pt", ".pth", ".pdparams", ".safetensors"])
def test_what_is_written_is_read_again_bit_for_bit(tmp_path, ending):
    write(tmp_path / f"w{ending}", MIXED)
    golden.equal(read(tmp_path / f"w{ending}").arrays, MIXED)


# ------------------------------------------------------------------------------------------------------------- torch
@pytest.fixture(scope="module")
@starts_processes
def by_torch(tmp_path_factory):
    """Files that torch wrote from the golden YOLOv5 state: plain, in the old format, and a whole pickled model."""
    code = """
import sys, types, numpy as np, torch
from torch import nn
yolo, common = types.ModuleType("models.yolo"), types.ModuleType("models.common")
sys.modules.update({"models": types.ModuleType("models"), "models.yolo": yolo, "models.common": common})
class DetectionModel(nn.Module): pass
class Conv(nn.Module): pass
DetectionModel.__module__, Conv.__module__ = "models.yolo", "models.common"
yolo.DetectionModel, common.Conv = DetectionModel, Conv
shared = nn.SiLU()
def tree(state):
    root = DetectionModel()
    for name, array in state.items():
        *path, leaf = name.split(".")
        module = root
        for part in path:
            if part not in module._modules:
                module.add_module(part, Conv())
                module._modules[part].act = shared
            module = module._modules[part]
        tensor = torch.from_numpy(np.array(array))
        if leaf in ("weight", "bias"): module.register_parameter(leaf, nn.Parameter(tensor))
        else: module.register_buffer(leaf, tensor)
    root.register_buffer("scratch", torch.zeros(3), persistent=False)
    root.names, root.stride, root.yaml = {0: "person"}, torch.tensor([8.0, 16.0, 32.0]), {"nc": 80}
    root.anchor_grid = [torch.ones(1, 3, 1, 1, 2).expand(1, 3, 4, 4, 2)]  # of YOLOv5's last layer, after an evaluation
    return root
state = dict(np.load("state.npz"))
model, ema = tree({n: a * 0 for n, a in state.items()}), tree(state)
torch.save(ema.state_dict(), "state.pt")
torch.save(ema.state_dict(), "legacy.pt", _use_new_zipfile_serialization=False)
torch.save({"module." + n: t for n, t in ema.state_dict().items()}, "wrapped.pt")
torch.save({"state_dict": ema.state_dict(), "epoch": 3}, "nested.pth")
optimizer = torch.optim.SGD(ema.parameters(), 0.1, momentum=0.9)
sum(p.sum() for p in ema.parameters()).backward(); optimizer.step()
ema = tree(state)
extra = {"epoch": 9, "best_fitness": np.float64(0.5), "opt": {"save_dir": __import__("pathlib").Path("x")}, "date": "2024"}
torch.save({**extra, "model": model, "ema": ema.half(), "updates": 5, "optimizer": optimizer.state_dict()}, "yolov5n.pt")
torch.save({**extra, "model": tree(state), "ema": None, "optimizer": None}, "stripped.pt")
running = {**extra, "best_fitness": np.array([0.5]), "updates": 5, "optimizer": optimizer.state_dict()}
torch.save({**running, "model": model, "ema": ema}, "unfinished.pt")
torch.save({**running, "model": ema, "ema": None}, "unfinished_legacy.pt", _use_new_zipfile_serialization=False)
torch.save(tree(state), "module_legacy.pt", _use_new_zipfile_serialization=False)
torch.save({"epoch": 1, "best": torch.zeros(1), "model": {"state_dict": tree(state).state_dict()}}, "twice.pt")
base = torch.arange(12.0).reshape(3, 4)
torch.save({"t": base.t(), "row": base[1], "bf": base.bfloat16(), "scalar": torch.tensor(3), "bool": base > 4}, "views.pt")
torch.save({"a": torch.zeros(1).expand(10)}, "expanded.pt")
torch.save({"a": torch.zeros(3).to_sparse()}, "sparse.pt")
torch.save([1, 2], "list.pt")
DetectionModel.forward_fuse = lambda self: None
ema.forward = ema.forward_fuse
torch.save({"model": ema}, "fused.pt")
"""

    def save(folder):
        np.savez(folder / "state.npz", **golden.yolov5("n"))
        run(code, folder)

    return once(tmp_path_factory, "by_torch", save)


@needs("torch")
@pytest.mark.parametrize("name", ["state.pt", "legacy.pt", "nested.pth", "stripped.pt", "module_legacy.pt", "twice.pt"])
def test_torch_files_hold_the_published_names_shapes_and_types(by_torch, name):
    golden.equal(read(by_torch / name).arrays, golden.yolov5("n"))


@needs("torch")
@pytest.mark.parametrize("is_archive", [True, False])
def test_buffers_that_a_module_does_not_save_are_none_of_its_weights(tmp_path, is_archive):
    import torch
    from torch import nn

    module = nn.Sequential(nn.Sequential(nn.Linear(3, 2)), nn.BatchNorm1d(2))
    module[0].register_buffer("grid", torch.ones(2), persistent=False)
    module[0].register_buffer("scale", torch.ones(2))
    torch.save({"model": module}, tmp_path / "module.pt", _use_new_zipfile_serialization=is_archive)
    golden.equal(read(tmp_path / "module.pt").arrays, {name: x.numpy() for name, x in module.state_dict().items()})


@needs("torch")
def test_of_several_modules_of_a_checkpoint_the_averaged_one_is_taken(tmp_path):
    import torch
    from torch import nn

    model, ema = nn.Linear(3, 2), nn.Linear(3, 2)
    torch.save({"best": torch.zeros(1), "model": model, "ema": ema}, tmp_path / "both.pt")
    found = read(tmp_path / "both.pt")
    golden.equal(found.arrays, {name: x.numpy() for name, x in ema.state_dict().items()})
    assert found.description == "torch, a checkpoint, averaged weights (`ema`)"


@needs("torch")
def test_of_a_yolov5_checkpoint_the_averaged_weights_are_taken_and_it_is_said(by_torch):
    found = read(by_torch / "yolov5n.pt")
    halved = {n: a.astype(np.float16) if a.dtype.kind == "f" else a for n, a in golden.yolov5("n").items()}
    golden.equal(found.arrays, halved)
    assert found.description == "torch, a checkpoint, averaged weights (`ema`)"
    assert found.labels == {"class_names": ["person"]}


@needs("torch")
@pytest.mark.parametrize("name", ["unfinished.pt", "unfinished_legacy.pt"])
def test_of_a_checkpoint_of_a_run_that_has_not_ended_the_weights_are_taken_and_not_its_best_fitness(by_torch, name):
    found = read(by_torch / name)
    assert set(found.arrays) == set(golden.yolov5("n"))
    assert found.description.startswith("torch, a checkpoint, ")


@needs("torch")
def test_views_strides_and_bfloat16_are_resolved(by_torch):
    found, base = read(by_torch / "views.pt").arrays, np.arange(12, dtype=np.float32).reshape(3, 4)
    golden.equal(found, {"t": base.T, "row": base[1], "bf": base, "scalar": np.array(3), "bool": base > 4})


@needs("torch")
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("expanded.pt", "larger than its storage"),
        ("sparse.pt", "the name torch._utils._rebuild_sparse_tensor"),
        ("list.pt", "no dictionary of arrays"),
        (
            "fused.pt",
            r"getattr \(a model after YOLOv5's `model.fuse\(\)` is saved so; give the file that training saved",
        ),
    ],
)
def test_what_torch_saves_beside_plain_tensors_is_refused(by_torch, name, message):
    with pytest.raises(CheckpointError, match=f"nothing of it was executed: .*{message}"):
        read(by_torch / name)


@pytest.mark.job
@needs("torch")
def test_torch_reads_what_is_written_here_with_weights_only(tmp_path):
    state = golden.yolov5("n") | {"odd": np.arange(3, dtype=np.int16)}
    write(tmp_path / "w.pt", state)
    np.savez(tmp_path / "expected.npz", **state)
    code = """
import numpy as np, torch
expected = np.load("expected.npz")
for options in ({}, {"mmap": True}):
    found = torch.load("w.pt", weights_only=True, **options)
    assert type(found).__name__ == "OrderedDict" and list(found) == expected.files
    for name, tensor in found.items():
        assert tensor.numpy().dtype == expected[name].dtype and tensor.shape == expected[name].shape, name
        assert tensor.numpy().tobytes() == expected[name].tobytes() and tensor.data_ptr() % 16 == 0, name
"""
    run(code, tmp_path)


# ------------------------------------------------------------------------------------------------------------ Paddle
@pytest.fixture(scope="module")
@starts_processes
def by_paddle(tmp_path_factory):
    code = """
import numpy as np, paddle
paddle.seed(1)
net = paddle.nn.Sequential(paddle.nn.Conv2D(2, 3, 1), paddle.nn.BatchNorm2D(3), paddle.nn.Linear(3, 2))
np.savez("expected.npz", **{n: t.numpy() for n, t in net.state_dict().items()})
for protocol in (2, 3, 4): paddle.save(net.state_dict(), f"{protocol}.pdparams", protocol=protocol)
paddle.save({"model": net.state_dict(), "epoch": 3}, "nested.pdparams")
paddle.save({"a": paddle.to_tensor([1.5, -2.0, 3.0]).astype("bfloat16")}, "bfloat16.pdparams")
"""
    return once(tmp_path_factory, "by_paddle", lambda folder: run(code, folder))


@needs("paddle")
@pytest.mark.parametrize("name", ["2", "3", "4", "nested"])
def test_paddle_files_of_every_protocol_and_layout_are_read(by_paddle, name):
    golden.equal(read(by_paddle / f"{name}.pdparams").arrays, dict(np.load(by_paddle / "expected.npz")))


@needs("paddle")
def test_paddles_bfloat16_becomes_float32(by_paddle):
    assert read(by_paddle / "bfloat16.pdparams").arrays["a"].tolist() == [1.5, -2.0, 3.0]


def test_arrays_that_old_paddle_cut_into_slices_are_joined(tmp_path):
    whole = np.arange(12, dtype=np.float32)
    entry = {"OriginShape": (3, 4), "slices": ["w@@.0", "w@@.1"]}
    content = {"w@@.0": whole[:8], "w@@.1": whole[8:], "b": whole[:2], "UnpackBigParamInfor@@": {"w": entry}}
    (tmp_path / "w.pdparams").write_bytes(pickle.dumps(content, protocol=2))
    golden.equal(read(tmp_path / "w.pdparams").arrays, {"w": whole.reshape(3, 4), "b": whole[:2]})
    entry["slices"] = ["w@@.0", "w@@.0"]
    (tmp_path / "w.pdparams").write_bytes(pickle.dumps(content, protocol=2))
    with pytest.raises(CheckpointError, match="an entry with an unknown content"):
        read(tmp_path / "w.pdparams")


@pytest.mark.parametrize("length", [0x80, 0x280, 0x480, 0x1F80, 0x7980])
def test_safetensors_whose_header_is_as_long_as_a_pickle_begins_are_read(tmp_path, length):
    # 0x80 is the first byte of a pickle, and of every 32nd length that is a multiple of 8.
    entries = {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}
    header = json.dumps(entries).encode().ljust(length)
    values = np.array([1.5, -2], np.float32)
    (tmp_path / "a.safetensors").write_bytes(struct.pack("<Q", length) + header + values.tobytes())
    np.testing.assert_array_equal(read(tmp_path / "a.safetensors").arrays["a"], values)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_a_pickle_with_a_brace_where_safetensors_have_one_is_no_such_file(tmp_path, protocol):
    for count in range(12):
        content = pickle.dumps({"x" * count + "{": np.zeros(1, np.float32)}, protocol=protocol)
        spread = content[:8] + b"{" + content[9:]
        (tmp_path / "a.pdparams").write_bytes(spread)
        try:
            found = read(tmp_path / "a.pdparams").description
        except CheckpointError as error:
            found = str(error)
        assert "safetensors" not in found


def test_pairs_of_name_and_array_are_read(tmp_path):
    (tmp_path / "w.pdparams").write_bytes(pickle.dumps({"w": ("conv2d_0.w_0", np.ones(2)), "n": "text"}))
    golden.equal(read(tmp_path / "w.pdparams").arrays, {"w": np.ones(2)})


@pytest.mark.job
@needs("paddle")
def test_paddle_reads_what_is_written_here(tmp_path):
    state = golden.ppyoloe("s")
    write(tmp_path / "w.pdparams", state)
    np.savez(tmp_path / "expected.npz", **state)
    code = """
import numpy as np, paddle
expected, found = np.load("expected.npz"), paddle.load("w.pdparams")
assert list(found) == expected.files
for name, tensor in found.items():
    array = tensor.numpy()
    assert array.dtype == expected[name].dtype and array.shape == expected[name].shape, name
    assert array.tobytes() == expected[name].tobytes(), name
"""
    run(code, tmp_path)


# ---------------------------------------------------------------------------------------------- folders and bad files
@pytest.fixture
def trained(tmp_path):
    """A run folder with three checkpoints: the second is the best."""
    store = Checkpoints(tmp_path / "run" / "checkpoints", keep_last=3, keep_best=1, asynchronous=False)
    for update, score in ((1, 0.1), (2, 0.9), (3, 0.2)):
        state = State(weights={"w": np.full(2, update), "n": np.array(update)}, ema={"w": np.full(2, -update)})
        spec = {"model": {"name": "yolov5n", "options": {"autobalance": True}}}
        store.save(state, Progress(update=update), score=score, spec=spec, extra={})
    return tmp_path / "run"


def test_a_run_is_its_best_checkpoint_and_a_checkpoint_its_averaged_weights(trained):
    found = read(trained)
    assert {name: array.tolist() for name, array in found.arrays.items()} == {"w": [-2, -2], "n": 2}
    assert (found.model, found.description) == ("yolov5n", "checkpoint of mtrain at update 2, averaged weights")
    assert read(trained / "checkpoints" / "step-00000003").arrays["n"] == 3


def test_a_damaged_best_checkpoint_is_passed_over_and_a_damaged_one_that_is_named_is_refused(trained):
    (trained / "checkpoints" / "step-00000002" / "ema.safetensors").write_bytes(b"{}")
    assert read(trained).arrays["n"] == 3
    with pytest.raises(CheckpointError, match=r"ema\.safetensors: 2 bytes, expected"):
        read(trained / "checkpoints" / "step-00000002")


def test_safetensors_may_hold_bfloat16(tmp_path):
    header = b'{"a":{"dtype":"BF16","shape":[2],"data_offsets":[0,4]}}'
    (tmp_path / "w").write_bytes(struct.pack("<Q", len(header)) + header + b"\x80\x3f\x00\xc0")
    golden.equal(read(tmp_path / "w").arrays, {"a": np.array([1, -2], np.float32)})


def zipped(entries, compression=zipfile.ZIP_STORED):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as archive:
        for name, content in entries.items():
            archive.writestr(name, content)
    return buffer.getvalue()


def tensor(length, shape, strides):
    """A state dict of one tensor of doubles as torch pickles it, claimed to be of any size."""

    def numbers(*values):
        sizes = [(value.bit_length() + 8) // 8 for value in values]
        pairs = zip(values, sizes, strict=True)
        return b"".join(b"\x8b" + struct.pack("<i", n) + value.to_bytes(n, "little") for value, n in pairs)

    storage = b"(X\x07\0\0\0storagectorch\nDoubleStorage\nX\x01\0\0\x000X\x03\0\0\0cpu" + numbers(length) + b"tQ"
    arguments = b"(" + storage + numbers(0) + b"(" + numbers(*shape) + b"t(" + numbers(*strides) + b"t\x89Nt"
    return b"\x80\x02}(X\x01\0\0\0actorch._utils\n_rebuild_tensor_v2\n" + arguments + b"Ru."


def torch_file(length, shape, strides, content=bytes(8)):
    return zipped({"a/data.pkl": tensor(length, shape, strides), "a/data/0": content})


def legacy_file(length):
    start = [pickle.dumps(value, 2) for value in (0x1950A86A20F9469CFC6C, 1001, {})]
    listed = pickle.dumps(["0"], 2) + struct.pack("<q", length) + bytes(8)
    return b"".join([*start, tensor(length, (1,), (1,)), listed])


def safetensors_file(shape, *, size, names=("a",)):
    entries = {
        n: {"dtype": "F32", "shape": shape, "data_offsets": [i * size, (i + 1) * size]} for i, n in enumerate(names)
    }
    header = json.dumps(entries).encode()
    return struct.pack("<Q", len(header)) + header + bytes(size * len(names))


def slices_of_nothing(shape):
    entry = {"OriginShape": shape, "slices": ["a@@.0"]}
    return pickle.dumps({"a@@.0": np.zeros(0, np.float32), "UnpackBigParamInfor@@": {"a": entry}}, protocol=2)


def test_the_tensors_of_the_bad_files_are_sound_but_for_their_sizes(tmp_path):
    (tmp_path / "w.pt").write_bytes(torch_file(1, (1,), (1,), struct.pack("<d", 2.5)))
    golden.equal(read(tmp_path / "w.pt").arrays, {"a": np.array([2.5])})
    (tmp_path / "w.pt").write_bytes(legacy_file(1))
    golden.equal(read(tmp_path / "w.pt").arrays, {"a": np.array([0.0])})
    (tmp_path / "w.pt").write_bytes(safetensors_file([1], size=4))
    golden.equal(read(tmp_path / "w.pt").arrays, {"a": np.zeros(1, np.float32)})


HUGE = 2**61
BAD = {
    "text": (b"weights: yes", "not a file of weights"),
    "nothing": (b"", "not a file of weights"),
    "half a safetensors file": (struct.pack("<Q", 999) + b'{"a":', "cannot be read as safetensors"),
    "a zip of text": (zipped({"readme.txt": "x"}), "without data.pkl"),
    "two pickles": (zipped({"a/data.pkl": b"x", "b/data.pkl": b"x"}), "without data.pkl"),
    "a zip bomb": (zipped({"a/data.pkl": b"0" * 10**8}, zipfile.ZIP_DEFLATED), "a compressed zip archive"),
    "a path upwards": (zipped({"../../data.pkl": b"\x80\x02N."}), "no dictionary of arrays"),
    "big-endian": (zipped({"a/data.pkl": b"\x80\x02N.", "a/byteorder": b"big"}), "big-endian"),
    "an empty state": (pickle.dumps({}), "no weights in it (it holds: nothing)"),
    "an optimizer": (pickle.dumps({"LR_Scheduler": {"last_lr": 0.1}}), "it holds: 'LR_Scheduler'"),
    "a hidden name": (pickle.dumps({"\x1b[2J": np.zeros(1)}), "expected printable names"),
    "objects in an array": (pickle.dumps({"a": np.array([None, {}])}), "refused"),
    "a length of 6000 digits": (torch_file(10**6000, (1,), (1,)), "damaged"),
    "an endless stride": (torch_file(1, (1,), (HUGE,)), "damaged"),
    "nothing, but large": (torch_file(1, (0, HUGE, HUGE), (1, 1, 1)), "damaged"),
    "more than can be addressed": (legacy_file(2**62), "damaged"),
    "slices of nothing": (slices_of_nothing((0, HUGE, HUGE)), "damaged"),
    "safetensors of nothing": (safetensors_file([0, HUGE, HUGE], size=0), "damaged"),
    "70 axes": (safetensors_file([1] * 70, size=4), "damaged"),
    "one name twice": (safetensors_file([1], size=4, names=("a", "/a")), "the same name"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_file_is_refused_in_one_line(tmp_path, name):
    content, told = BAD[name]
    (tmp_path / "w.pt").write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        read(tmp_path / "w.pt")
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)


def overlapping():
    """An archive whose directory lists one entry's bytes under many names."""
    content = bytearray(zipped({"a/data.pkl": b"\x80\x02N.", "a/data/0": b"0" * 4000}))
    at, end = content.rindex(b"PK\x01\x02"), content.rindex(b"PK\x05\x06")
    listed = bytes(content[at:end])
    copies = b"".join(listed.replace(b"a/data/0", b"a/data/%d" % i) for i in range(1, 9))
    content[end:end] = copies
    tail = content.rindex(b"PK\x05\x06")
    size = struct.unpack_from("<I", content, tail + 12)[0]
    struct.pack_into("<HHI", content, tail + 8, 10, 10, size + len(copies))
    return bytes(content)


def test_an_archive_that_promises_more_than_its_size_is_refused(tmp_path):
    (tmp_path / "w.pt").write_bytes(overlapping())
    with pytest.raises(CheckpointError, match="its entries are larger than the file"):
        read(tmp_path / "w.pt")


@pytest.fixture(scope="module")
def seeds(tmp_path_factory):
    folder = tmp_path_factory.mktemp("seeds")
    for ending in (".pt", ".pdparams", ".safetensors"):
        write(folder / f"w{ending}", MIXED)
    return [(folder / f"w{ending}").read_bytes() for ending in (".pt", ".pdparams", ".safetensors")]


@settings(max_examples=500, deadline=None)
@given(data=st.data())
def test_damaged_files_are_read_or_refused_and_nothing_happens(seeds, tmp_path_factory, data):
    content = bytearray(data.draw(st.sampled_from(seeds)))
    for _ in range(data.draw(st.integers(1, 6))):
        at = data.draw(st.integers(0, max(len(content) - 1, 0)))
        kind = data.draw(st.sampled_from(["change", "insert", "cut"]))
        if kind == "change":
            content[at] = data.draw(st.integers(0, 255))
        elif kind == "insert":
            content[at:at] = data.draw(st.binary(max_size=8))
        else:
            del content[at : at + data.draw(st.integers(1, 9))]
    path = tmp_path_factory.getbasetemp() / "damaged"
    path.write_bytes(content)
    with audited() as events, contextlib.suppress(CheckpointError):
        read(path)
    # The file itself is opened, a reader is put around its descriptor, and this process bounds its memory by that of the host.
    memory = r"'/(proc/(meminfo|self/\w+)|sys/fs/cgroup/[\w./]+)', 'r'"
    opened = re.compile(rf"open \(('{re.escape(str(path))}'|\d+, 'r'|{memory})|resource\.setrlimit ")
    assert [event for event in events if not opened.match(event)] == []


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("w.npz", "unknown ending '.npz'; expected .safetensors, .pdparams, .pt, .pth"),
        ("w.pdparam", "did you mean .pdparams?"),
        ("absent/w.pt", "absent does not exist; make it first"),
        ("here.pt", "exists already; give --force"),
        ("folder.pt", "is a folder"),
    ],
)
def test_a_target_that_cannot_be_written_is_refused(tmp_path, name, message):
    (tmp_path / "here.pt").touch()
    (tmp_path / "folder.pt").mkdir()
    with pytest.raises(CheckpointError) as caught:
        check_target(tmp_path / name, force=name == "folder.pt")
    assert message in str(caught.value)


@pytest.mark.parametrize("length", [0x80, 0x280, 0x480])
def test_safetensors_are_read_though_the_length_of_their_header_begins_like_a_pickle(tmp_path, length):
    header = json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode().ljust(length)
    content = struct.pack("<Q", length) + header + struct.pack("<f", 1.5)
    assert content.startswith(b"\x80")
    (tmp_path / "w.safetensors").write_bytes(content)
    assert read(tmp_path / "w.safetensors").arrays["w"].tolist() == [1.5]
