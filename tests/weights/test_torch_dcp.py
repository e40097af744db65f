"""Folders of ``torch.distributed.checkpoint`` that torch wrote on two ranks are read without it, and torch reads those written here."""

import io
import json
import os
import pickle
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from mtrain.commands import main
from mtrain.core.checkpoint.format import Saved, write
from mtrain.core.interfaces import Progress, Published, State
from mtrain.errors import CheckpointError
from mtrain.weights import dcp_pieces
from mtrain.weights.matching import entry_types, match
from mtrain.weights.reading import read
from tests.weights import golden
from tests.weights.audit import audited

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")
ROOT = Path(__file__).parents[2]
STORED = ROOT / "tests" / "data" / "dcp" / "two_ranks_of_fsdp2.tar.xz"
LLAMA = {
    "vocab_size": 257, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 32, "bos_token_id": None, "eos_token_id": 256,
}  # fmt: skip
FORMS = ("plain", "model", "app", "flat", "around", "compiled", "module")


def run_ranks(folder: Path, size: int, *arguments: str) -> None:
    command = [sys.executable, "-m", "tests.weights.dcp_ranks"]
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen([*command, str(rank), str(size), *arguments], cwd=folder, env=environ, stderr=subprocess.PIPE)
        for rank in range(size)
    ]
    for rank in ranks:
        _, told = rank.communicate(timeout=300)
        assert rank.returncode == 0, told.decode()


def save_again(folder: Path) -> None:
    """Write a Llama ``llama``, and ``torch/<form>`` as two ranks of FSDP2 save it: what ``STORED`` holds."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**LLAMA)).save_pretrained(folder / "llama")
    run_ranks(folder, 2, "save", "torch")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what ``save_again`` has written once, under torch 2.13."""
    folder = tmp_path_factory.mktemp("dcp")
    with tarfile.open(STORED) as archive:
        archive.extractall(folder)  # our own file
    return folder


@pytest.mark.job
def test_the_torch_that_is_installed_saves_what_is_stored(saved: Path, tmp_path: Path) -> None:
    save_again(tmp_path)
    for form in FORMS:
        then, now = read(saved / "torch" / form).arrays, read(tmp_path / "torch" / form).arrays
        assert then.keys() == now.keys()
        assert all(np.array_equal(then[name], now[name]) for name in then)


@pytest.fixture(scope="module")
def model(saved: Path) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(saved / "llama", dtype=torch.float32)


def arrays_of(model: torch.nn.Module) -> dict[str, np.ndarray]:
    return {name: x.detach().numpy() for name, x in model.state_dict().items()}


# ---------------------------------------------------------------------------------------------------------------- read
@pytest.mark.parametrize("form", FORMS)
def test_weights_that_two_ranks_saved_fit_the_model_bit_for_bit(form, saved, model):
    file, expected = read(saved / "torch" / form), arrays_of(model)
    found = match(file, entry_types(expected), Published())
    assert found.left_over == found.unused == []
    assert all(np.array_equal(found.matched[name], expected[name]) for name in expected)
    told = "further arrays (of the optimizer, ...) left out" in found.summary()
    assert told == (form in ("model", "app", "flat")), found.summary()


@pytest.mark.parametrize("outer", ["", "net.", "module.", "_orig_mod."])
def test_a_folder_is_imported_as_a_model_that_mtrain_knows(outer, tmp_path, capsys):
    """With the number of classes that its shapes tell, however the names begin."""
    state = golden.yolov5("n")
    tensors = {outer + name: torch.from_numpy(np.array(array)) for name, array in state.items()}
    dcp.save({"model": tensors}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    target = tmp_path / "w.safetensors"
    assert main(["weights", "import", str(tmp_path / "dcp"), "--model", "yolov5n", "--to", str(target)]) == 0
    assert "yolov5n with 80 classes: 349 of 349 arrays taken" in capsys.readouterr().out
    found = read(target).arrays
    assert all(np.array_equal(found[name], array) for name, array in state.items())


@pytest.mark.job
@pytest.mark.smoke
def test_nothing_of_a_folder_is_unpickled_and_no_framework_is_needed(saved):
    code = f"""
import sys
from mtrain.weights.reading import read
from pathlib import Path
found = read(Path({str(saved / "torch/model")!r}))
assert len(found.arrays) == 21, len(found.arrays)
assert not {{"torch", "paddle"}} & set(sys.modules)
"""
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_a_job_starts_from_such_a_folder(saved, tmp_path, capsys, monkeypatch):
    """Its first loss is that of a job which starts from the folder of transformers."""
    monkeypatch.chdir(tmp_path)
    for split in ("train", "val"):
        (tmp_path / f"{split}.txt").write_text("some words that come again and again, and again\n" * 10)
    common = ["data.format=text", f"data.root={tmp_path}", "data.length=16", "train.updates=1", "train.batch_size=2"]
    starts = {
        "theirs": [f"model.options.path={saved / 'llama'}"],
        "ours": [f"model.options.path={saved / 'llama/config.json'}", f"model.weights={saved / 'torch/app'}"],
    }
    losses = {}
    for name, start in starts.items():
        pairs = [part for pair in ("model.name=hf", *common, *start) for part in ("-o", pair)]
        assert main(["train", "--backend", "solo", "--devices", "cpu", "--name", name, *pairs]) == 0, (
            capsys.readouterr().err
        )
        lines = [json.loads(line) for line in (tmp_path / f"runs/{name}/metrics.jsonl").read_text().splitlines()]
        losses[name] = next(line["losses"] for line in lines if line["kind"] == "update")
    assert losses["ours"] == losses["theirs"]


def test_of_the_optimizer_alone_it_is_said_that_there_are_no_weights(saved):
    with pytest.raises(CheckpointError, match="no weights in it"):
        read(saved / "torch/optimizer")


def test_the_folder_around_folders_says_which_to_give(saved):
    with pytest.raises(
        CheckpointError, match=r"holds folders of torch\.distributed\.checkpoint; give one of them, such as"
    ):
        read(saved / "torch")


def test_types_and_shapes_of_all_kinds_are_read(tmp_path):
    state = {
        "bf": torch.tensor([1.5, -2.0]).bfloat16(), "half": torch.tensor([0.1]).half(), "double": torch.tensor([[0.1]]).double(),
        "count": torch.tensor(2**40), "flags": torch.tensor([True, False]), "empty": torch.zeros(0, 3),
        "strided": torch.arange(6.0).reshape(2, 3).t(),
    }  # fmt: skip
    dcp.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    found = read(tmp_path / "dcp").arrays
    assert {name: (x.dtype.name, x.shape) for name, x in found.items()} == {
        "bf": ("float32", (2,)), "half": ("float16", (1,)), "double": ("float64", (1, 1)), "count": ("int64", ()),
        "flags": ("bool", (2,)), "empty": ("float32", (0, 3)), "strided": ("float32", (3, 2)),
    }  # fmt: skip
    for name, x in state.items():
        assert np.array_equal(found[name], x.float().numpy() if name == "bf" else x.numpy())


# ------------------------------------------------------------------------------------------------- damaged and hostile
@pytest.fixture
def folder(saved, tmp_path) -> Path:
    return Path(shutil.copytree(saved / "torch/model", tmp_path / "copy"))


def refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """What the command says, in one line."""
    capsys.readouterr()
    assert main(["weights", "show", str(folder)]) == 2
    told = capsys.readouterr().err
    assert told.startswith("error: ")
    assert told.count("\n") == 1
    return told


def test_a_file_that_is_missing_is_named(folder, capsys):
    (folder / "__1_0.distcp").unlink()
    assert "__1_0.distcp missing, of 2 files with its weights" in refused(folder, capsys)


def test_a_file_that_ends_too_early_is_named(folder, capsys):
    file = folder / "__0_0.distcp"
    os.truncate(file, 5000)
    assert "__0_0.distcp: ends too early, 5000 bytes of at least" in refused(folder, capsys)


def test_a_file_with_other_bytes_is_named(folder, capsys):
    file = folder / "__0_0.distcp"
    file.write_bytes(bytes(file.stat().st_size))
    assert "__0_0.distcp: damaged: no tensor at byte 0" in refused(folder, capsys)


def test_a_folder_whose_description_is_missing_is_an_unfinished_save(folder, capsys):
    (folder / ".metadata").unlink()
    assert "without .metadata, which is written last: the save was not finished" in refused(folder, capsys)


def test_a_description_that_ends_too_early_is_damaged(folder, capsys):
    os.truncate(folder / ".metadata", 700)
    assert "a damaged pickle" in refused(folder, capsys)


def test_a_folder_without_any_of_it_is_none(tmp_path, capsys):
    (tmp_path / "notes.txt").write_text("x")
    assert "a folder of torch.distributed.checkpoint" in refused(tmp_path, capsys)


class Hostile:
    def __reduce__(self):
        return os.system, ("touch executed",)


@pytest.mark.parametrize("place", ["instead", "planner_data", "storage_meta", "key"])
def test_a_hostile_description_is_refused_and_not_executed(place, folder, capsys, monkeypatch):
    monkeypatch.chdir(folder)
    described = pickle.loads((folder / ".metadata").read_bytes())
    if place == "key":
        described.storage_data[Hostile()] = None
    elif place != "instead":
        setattr(described, place, Hostile())
    (folder / ".metadata").write_bytes(pickle.dumps(Hostile() if place == "instead" else described))
    with audited() as events:
        told = refused(folder, capsys)
    assert not [event for event in events if event.startswith(("os.system", "subprocess", "import posix"))]
    assert "refused, nothing of it was executed: the name posix.system" in told
    assert not (folder / "executed").exists()


@pytest.mark.job
@pytest.mark.smoke
@pytest.mark.parametrize("field", ["size", "offsets", "sizes"])
def test_a_place_that_is_nested_without_end_is_refused(field, tmp_path):
    """A hash or a comparison of such a tuple overflows the stack of C, so it is tried in a process of its own."""
    folder = described_as(tmp_path / "dcp", (4,), ((0,), (4,)))
    described = pickle.loads((folder / ".metadata").read_bytes())
    entry = described.state_dict_metadata["w"]
    object.__setattr__(entry if field == "size" else entry.chunks[0], field, "PLACE")
    content = pickle.dumps(described, protocol=2)
    assert content.count(b"X\x05\0\0\0PLACE") == 1
    (folder / ".metadata").write_bytes(content.replace(b"X\x05\0\0\0PLACE", b")" + b"\x85" * 400_000))
    shown = subprocess.run(
        [sys.executable, "-m", "mtrain", "weights", "show", str(folder)], capture_output=True, text=True, check=False
    )
    assert shown.returncode == 2, shown.stderr
    assert "refused, nothing of it was executed" in shown.stderr


def test_a_view_does_not_keep_its_storage(tmp_path, capsys):
    """One piece of 4 MiB, of which an array names one number."""
    folder = described_as(tmp_path / "dcp", (1,), ((0,), (1,)))
    buffer = io.BytesIO()
    torch.save(torch.zeros(1 << 20)[:1], buffer)
    (folder / "__0_0.distcp").write_bytes(buffer.getvalue())
    change(folder, lambda index, place: _StorageInfo(place.relative_path, 0, len(buffer.getvalue())))
    assert read(folder).arrays["w"].flags.owndata


def test_pieces_that_lie_on_each_other_in_their_file_are_refused(tmp_path, capsys):
    folder = described_as(tmp_path / "dcp", (8,), ((4,), (4,)), ((0,), (4,)))
    assert "so some lie on each other" in refused(folder, capsys)


def test_a_hostile_piece_is_refused_and_not_executed(folder, capsys, monkeypatch):
    monkeypatch.chdir(folder)
    buffer = io.BytesIO()
    torch.save(Hostile(), buffer)
    file = folder / "__0_0.distcp"
    content = buffer.getvalue()
    file.write_bytes(content + bytes(file.stat().st_size))
    hostile = iter([_StorageInfo(file.name, 0, len(content))])
    change(folder, lambda index, place: next(hostile, place))
    assert "the name posix.system" in refused(folder, capsys)
    assert not (folder / "executed").exists()


def change(folder: Path, place) -> None:
    """Write the description anew, with other places of what lies in the first file."""
    described = pickle.loads((folder / ".metadata").read_bytes())
    described.storage_data = {
        index: place(index, old) if old.relative_path == "__0_0.distcp" else old
        for index, old in described.storage_data.items()
    }
    (folder / ".metadata").write_bytes(pickle.dumps(described))


@pytest.mark.parametrize("name", ["../../secret", "/etc/passwd", ".."])
def test_a_file_outside_of_the_folder_is_not_opened(name, folder, capsys):
    change(folder, lambda index, old: _StorageInfo(name, old.offset, old.length))
    assert "which is not in the folder itself" in refused(folder, capsys)


def test_compressed_pieces_are_refused_in_one_sentence(folder, capsys):
    change(folder, lambda index, old: _StorageInfo(old.relative_path, old.offset, old.length, ("stream.zstd",)))
    assert "compressed or encrypted by an extension" in refused(folder, capsys)


def described_as(folder: Path, shape, *chunks, dtype=torch.float32) -> Path:
    """A folder of one array of 4 numbers in a file, described otherwise."""
    dcp.save({"w": torch.ones(4, dtype=dtype)}, checkpoint_id=folder, no_dist=True)
    described = pickle.loads((folder / ".metadata").read_bytes())
    place = next(iter(described.storage_data.values()))
    entry = TensorStorageMetadata(
        TensorProperties(dtype),
        torch.Size(shape),
        [ChunkStorageMetadata(torch.Size(o), torch.Size(s)) for o, s in chunks],
    )
    changed = Metadata({"w": entry}, {"w": ("w",)}, {MetadataIndex("w", o): place for o, _ in chunks})
    (folder / ".metadata").write_bytes(pickle.dumps(changed))
    return folder


@pytest.mark.parametrize(
    ("shape", "chunks"),
    [
        ((8,), [((0,), (4,))]),  # a half is missing
        ((8,), [((0,), (4,)), ((2,), (4,))]),  # on each other
        ((4,), [((2,), (4,))]),  # outside
        ((4,), [((0, 0), (4, 1))]),  # another number of axes
        ((2**40,), [((0,), (2**40,))]),  # larger than the file
        ((), [((0,), (4,))]),
    ],
)
def test_pieces_that_do_not_make_up_their_array_are_refused(shape, chunks, tmp_path, capsys):
    refused(described_as(tmp_path / "dcp", shape, *chunks), capsys)


@pytest.mark.parametrize(
    ("begins", "ends", "expected"),
    [([0, 2], [4, 6], True), ([0, 4], [4, 8], False), ([4, 0, 3], [8, 3, 4], False), ([4, 0, 3], [8, 4, 4], True)],
)
def test_boxes_that_have_an_element_in_common_lie_on_each_other(begins, ends, expected):
    assert dcp_pieces._overlap(np.array(begins)[:, None], np.array(ends)[:, None]) is expected


def test_pieces_that_make_up_their_array_are_read(tmp_path):
    folder = described_as(tmp_path / "dcp", (8,), ((4,), (4,)), ((0,), (4,)))
    file = folder / "__0_0.distcp"
    content = file.read_bytes()
    file.write_bytes(content + content)
    change(folder, lambda index, old: _StorageInfo(old.relative_path, old.length * (index.offset[0] == 4), old.length))
    assert np.array_equal(read(folder).arrays["w"], np.ones(8, np.float32))


def test_a_type_that_numpy_lacks_is_named(tmp_path, capsys):
    folder = described_as(tmp_path / "dcp", (4,), ((0,), (4,)), dtype=torch.float8_e4m3fn)
    assert "numbers of type float8_e4m3fn" in refused(folder, capsys)


def test_one_piece_is_in_memory_besides_the_array(folder, monkeypatch):
    """Pieces are read when they are put into the array, and arrays of the optimizer not at all."""
    keys, opened = [], []
    original, array = dcp_pieces.SavedPiece.read, dcp_pieces.SplitTensor.array
    monkeypatch.setattr(dcp_pieces.SavedPiece, "read", lambda self: opened.append(keys[-1]) or original(self))
    monkeypatch.setattr(dcp_pieces.SplitTensor, "array", lambda self: keys.append(self.key) or array(self))
    read(folder)
    assert len(keys) == 21
    assert all(key.startswith("model.") for key in keys)
    assert opened == [key for key in keys for _ in range(opened.count(key))]


# ---------------------------------------------------------------------------------------------------------------- write
@pytest.fixture
def run(model, tmp_path, saved) -> Path:
    """A run of the Llama."""
    spec = {"model": {"name": "hf", "options": {"path": str(saved / "llama/config.json")}}}
    folder = tmp_path / "runs/llama/checkpoints"
    folder.mkdir(parents=True)
    state = State(weights=arrays_of(model), ema={}, moments={}, counters={})
    write(
        folder / "step-00000004",
        Saved(state=state, progress=Progress(update=4), spec=spec, meta={"extra": {"native": True}}),
    )
    return tmp_path / "runs/llama"


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_torch_loads_the_folder_on_any_number_of_ranks(ranks, run, saved, model, tmp_path, capsys):
    target = tmp_path / "out"
    assert main(["weights", "export", str(run), "--format", "dcp", "--to", str(target)]) == 0, capsys.readouterr().err
    shutil.copytree(saved / "llama", tmp_path / "llama")
    run_ranks(tmp_path, ranks, "load", str(target))
    logits = model(input_ids=torch.arange(8)[None]).logits
    assert torch.equal(torch.load(tmp_path / "logits.pt"), logits)


def test_the_folder_is_read_again_and_holds_all_types(tmp_path):
    from mtrain.weights.dcp_writing import write_folder
    from tests.weights.test_files import MIXED

    write_folder(tmp_path / "dcp", MIXED)
    found = read(tmp_path / "dcp").arrays
    state = {name: torch.zeros(x.shape, dtype=torch.from_numpy(np.array(x)).dtype) for name, x in MIXED.items()}
    dcp.load(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    for name, array in MIXED.items():
        assert found[name].dtype == array.dtype
        assert found[name].tobytes() == array.tobytes(), name
        assert state[name].numpy().tobytes() == array.tobytes(), name


def test_torch_makes_a_file_of_the_folder(run, model, tmp_path, capsys):
    """Its converter takes names and nesting from the description alone."""
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    assert main(["weights", "export", str(run), "--format", "dcp", "--to", str(tmp_path / "out")]) == 0
    dcp_to_torch_save(tmp_path / "out", tmp_path / "w.pt")
    found = torch.load(tmp_path / "w.pt", weights_only=True)
    assert all(torch.equal(found[name], x) for name, x in model.state_dict().items())


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--to", "out.pt"], "--format dcp writes a folder; give a name without .pt"),
        (["--to", "full"], "is not empty; give --force"),
        (["--to", "out", "--merge"], "--merge: writes a folder for transformers"),
    ],
)
def test_targets_that_are_no_new_folder_are_refused(flags, said, run, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full/x").write_text("x")
    assert main(["weights", "export", str(run), "--format", "dcp", *flags]) == 2
    assert said in capsys.readouterr().err


def test_force_replaces_what_another_save_left(run, folder, model, capsys):
    assert main(["weights", "export", str(run), "--format", "dcp", "--to", str(folder), "--force"]) == 0
    assert {file.name for file in folder.iterdir()} == {".metadata", "__0_0.distcp"}
    assert set(read(folder).arrays) == set(arrays_of(model))


def test_a_former_folder_stays_whole_until_the_new_one_is(folder, tmp_path):
    from mtrain.weights.dcp_writing import write_folder

    before = read(folder).arrays
    with pytest.raises(CheckpointError, match="uint32"):
        write_folder(folder, {"a": np.zeros(2, np.float32), "w": np.zeros(2, np.uint32)})
    assert set(read(folder).arrays) == set(before)


def test_a_module_that_is_called_as_an_optimizer_keeps_its_weights(tmp_path):
    from mtrain.weights.dcp_writing import write_folder

    arrays = {"optim.weight": np.ones(2, np.float32), "head.weight": np.zeros(2, np.float32)}
    write_folder(tmp_path / "dcp", arrays)
    assert set(read(tmp_path / "dcp").arrays) == set(arrays)


def test_a_run_that_also_holds_such_a_folder_is_read_as_a_run(run, model, capsys):
    assert main(["weights", "export", str(run), "--format", "dcp", "--to", str(run / "dcp")]) == 0
    assert set(read(run).arrays) == set(arrays_of(model))


@pytest.mark.parametrize("moment", ["description", "pieces", "removed"])
def test_a_save_that_ends_early_over_a_former_one_is_never_read_as_a_whole_one(moment, folder, monkeypatch):
    """The former description does not fit the new pieces: where the save ends before its own, there is none."""
    from mtrain.weights import dcp_writing

    before = read(folder).arrays

    def stop(*_: object) -> None:
        raise OSError(28, "No space left on device")

    if moment == "description":
        monkeypatch.setattr(dcp_writing, "_description", stop)
    elif moment == "removed":
        monkeypatch.setattr(Path, "glob", stop)
    else:
        monkeypatch.setattr(dcp_writing, "tensor_bytes", stop)
    with pytest.raises(CheckpointError, match="No space left"):
        dcp_writing.write_folder(folder, {"w": np.arange(3, dtype=np.float32)})
    monkeypatch.undo()
    if moment == "pieces":
        assert set(read(folder).arrays) == set(before), (
            "nothing of the former save is touched until the new pieces are there"
        )
        return
    with pytest.raises(CheckpointError, match=r"without \.metadata"):
        read(folder)
    dcp_writing.write_folder(folder, {"w": np.arange(3, dtype=np.float32)})
    assert read(folder).arrays["w"].tolist() == [0, 1, 2]


def test_a_folder_whose_new_description_was_not_written_has_none(tmp_path, monkeypatch):
    from mtrain.weights import dcp_writing

    def stop(*_: object) -> None:
        raise OSError(28, "No space left on device")

    dcp_writing.write_folder(tmp_path / "dcp", {"w": np.arange(3, dtype=np.float32)})
    monkeypatch.setattr(dcp_writing, "_description", stop)
    with pytest.raises(CheckpointError, match="No space left"):
        dcp_writing.write_folder(tmp_path / "dcp", {"w": np.arange(4, dtype=np.float32)})
    with pytest.raises(CheckpointError, match=r"without \.metadata"):
        read(tmp_path / "dcp")
