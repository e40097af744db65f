"""Folders of models that strangers wrote: refused in one sentence before anything is built, and nothing of them is executed."""

import json
import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mtrain.backends._torch import nn as torch_nn
from mtrain.backends._torch import ops as torch_ops
from mtrain.commands import main
from mtrain.core.binding import bind
from mtrain.core.checkpoint.arrays_file import MAX_HEADER_BYTES, MappedArrays
from mtrain.core.collective import OneRank
from mtrain.core.interfaces import Task
from mtrain.errors import CheckpointError, MtrainError, PluginError, SpecError
from mtrain.tasks.model_config import check_sizes
from mtrain.weights.reading import read
from mtrain_language import base_weights
from mtrain_language.model import HuggingFaceModel, HuggingFaceOptions

TINY = {"model_type": "gpt2", "vocab_size": 257, "n_positions": 32, "n_embd": 8, "n_layer": 1, "n_head": 2}
TASK = Task(
    kind="language", class_names=(), image_size=0, global_batch=2, details={"vocabulary": 257, "end": 256, "length": 32}
)


def header(text: str | bytes, *, length: int | None = None) -> bytes:
    content = text.encode() if isinstance(text, str) else text
    return (len(content) if length is None else length).to_bytes(8, "little") + content


def array(**changes: Any) -> str:
    return json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4], **changes}})


HEADERS: dict[str, bytes] = {
    "nested": header("[" * 200_000),
    "nested objects": header('{"a":' * 200_000),
    "a longer header than is read": header(b" " * 64, length=MAX_HEADER_BYTES + 1),
    "a shape without end": header('{"w": {"dtype": "F32", "shape": [1e400], "data_offsets": [0, 4]}}') + bytes(4),
    "an offset without end": header('{"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 1e400]}}') + bytes(4),
    "a negative offset": header(array(data_offsets=[-100, 4])) + bytes(4),
    "offsets the wrong way round": header(array(data_offsets=[4, 0])) + bytes(4),
    "three offsets": header(array(data_offsets=[0, 2, 4])) + bytes(4),
    "a shape that is a text": header(array(shape="12")) + bytes(4),
    "a fraction": header(array(data_offsets=[0, 4.5])) + bytes(8),
    "an entry that is none": header('{"w": null}'),
    "a list": header("[1]"),
    "digits": header('{"w": ' + "9" * 5_000 + "}"),
    "no UTF-8": header(b'{"\xff": 1}'),
    "cut": header(array())[:-3],
    "nothing": b"",
}


@pytest.mark.parametrize("name", HEADERS)
def test_a_strange_header_is_one_error_for_each_reader(name: str, tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(HEADERS[name])
    with pytest.raises(SpecError, match=r"model\.safetensors"):
        base_weights.digest_of(tmp_path)
    with pytest.raises(ValueError, match=r"\w"):
        MappedArrays(file)
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        read(file)


@pytest.mark.job
def test_a_header_of_the_largest_size_takes_no_gib(tmp_path: Path) -> None:
    """Of empty lists, which take most for their text."""
    import subprocess
    import sys

    text = b'{"a":[' + b"[]," * ((MAX_HEADER_BYTES - 64) // 3) + b"[]]}"
    (tmp_path / "model.safetensors").write_bytes(header(text))
    code = (
        "import sys; from pathlib import Path; from mtrain_language.base_weights import arrays_of\n"
        "from mtrain.errors import SpecError; from mtrain.system.memory import peak_resident_bytes\n"
        "try: arrays_of(Path(sys.argv[1]))\n"
        "except SpecError: print(peak_resident_bytes())"
    )
    limit = (1536 << 20, resource.RLIM_INFINITY)
    told = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_DATA, limit),
    )
    assert int(told.stdout) < 1 << 30


# ------------------------------------------------------------------------------------------------------ configurations
@pytest.mark.parametrize(
    "entry",
    [
        {"n_layer": 10**8}, {"num_hidden_layers": 10**8}, {"decoder_layers": 10**6}, {"num_layers": -1}, {"hidden_size": 0},
        {"n_embd": 0}, {"n_embd": -8}, {"n_embd": 8.5}, {"n_embd": "8"}, {"vocab_size": float("inf")}, {"vocab_size": 0},
        {"hidden_size": 10**12}, {"text_config": {"hidden_size": 0}}, {"n_layer": 0}, {"n_layer": True}, {"n_head": [2]},
    ],
)  # fmt: skip
def test_a_size_that_no_model_has_is_named(entry: dict[str, Any]) -> None:
    with pytest.raises(SpecError, match="given, expected an integer from"):
        check_sizes({**TINY, **entry}, path="x")
    with pytest.raises(SpecError, match="given, expected an integer from"):
        HuggingFaceModel(HuggingFaceOptions(config={**TINY, **entry})).config(vocabulary=257, end=256)


@pytest.mark.parametrize(
    "entries",
    [
        TINY,
        {"num_hidden_layers": 126, "hidden_size": 16384, "vocab_size": 262_208, "num_nextn_predict_layers": 0},
        {
            "time_step_limit": [0.0, float("inf")],
            "layer_types": ["full_attention"],
            "num_kv_shared_layers": 0,
            "n_head": None,
        },
        {"text_config": {"hidden_size": 2560}, "vision_config": {"num_hidden_layers": 27}, "intermediate_size": 0},
    ],
)
def test_the_sizes_of_published_models_are_not_refused(entries: dict[str, Any]) -> None:
    check_sizes(entries, path="x")


def folder_with(folder: Path, config: str | dict[str, Any] = TINY) -> Path:
    (folder / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    return folder


def pipe(folder: Path) -> None:
    (folder / "config.json").unlink()
    os.mkfifo(folder / "config.json")


def device(folder: Path) -> None:
    (folder / "config.json").unlink()
    (folder / "config.json").symlink_to("/dev/zero")


def indexed(name: Any) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / "model-1.safetensors").write_bytes(header("{}"))
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": name}}))
        torch.save({"w": torch.zeros(1)}, folder / "pytorch_model.bin")

    return write


def text_of(name: str, content: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / name).write_text(content)

    return write


FOLDERS: dict[str, tuple[Callable[[Path], None], str]] = {
    "a pipe": (pipe, "has no config.json"),
    "a device": (device, "has no config.json"),
    "nested": (text_of("config.json", '{"a":' * 200_000), "nested too deeply"),
    "60 MB": (text_of("config.json", '{"a": "' + "x" * 60_000_000 + '"}'), "more than the"),
    "digits": (text_of("config.json", '{"n_layer": ' + "9" * 5_000 + "}"), "cannot be read"),
    "1e400": (text_of("config.json", json.dumps(TINY).replace("257", "1e400")), "vocab_size: inf given"),
    "layers": (text_of("config.json", json.dumps({**TINY, "n_layer": 10**8})), "n_layer: 100000000 given"),
    "nothing": (text_of("config.json", json.dumps({**TINY, "n_embd": 0})), "n_embd: 0 given"),
    "an index of a pickle": (indexed("pytorch_model.bin"), "names 'pytorch_model.bin', and only .safetensors"),
    "an index that leads out": (indexed("../model-1.safetensors"), "only .safetensors in the folder itself"),
    "an index of lists": (indexed(["x"]), "only .safetensors in the folder itself"),
    "an index that is nested": (
        lambda folder: (indexed("x")(folder), text_of("model.safetensors.index.json", "[" * 10**5)(folder))[0],
        "nested too deeply",
    ),
    "settings of generation": (text_of("generation_config.json", "[" * 10**5), "generation_config.json cannot be read"),
    "large settings": (text_of("generation_config.json", '"' + "x" * 5_000_000 + '"'), "more than the"),
}


@pytest.mark.parametrize("name", FOLDERS)
def test_a_strange_folder_is_refused_before_there_is_a_run_folder(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    damage, said = FOLDERS[name]
    damage(folder_with(tmp_path))
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("a pickle was read"))
    with pytest.raises(SpecError) as caught:
        HuggingFaceModel(HuggingFaceOptions(path=str(tmp_path))).prepare_task(TASK, {})
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600


def test_what_leads_transformers_elsewhere_is_left_out(tmp_path: Path) -> None:
    away = {
        "transformers_weights": "x.bin",
        "attn_implementation": "somebody/kernel",
        "auto_map": {"AutoConfig": "x--y.Z"},
    }
    found = HuggingFaceModel(HuggingFaceOptions(path=str(folder_with(tmp_path, {**TINY, **away})))).config(
        vocabulary=257, end=256
    )
    assert not {"transformers_weights", "auto_map"} & found.to_dict().keys()
    assert found._attn_implementation_internal is None


def test_a_model_that_fits_no_memory_is_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    from mtrain_language import model

    bind(torch_nn, torch_ops)
    monkeypatch.setattr(model, "memory_limit", lambda: 256 << 20)
    large = HuggingFaceModel(HuggingFaceOptions(config={**TINY, "n_embd": 1 << 14, "n_head": 2}))
    with pytest.raises(PluginError, match="transformers cannot build it"):
        large.build(TASK, OneRank())


def test_a_model_without_parameters_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    bind(torch_nn, torch_ops)
    plugin = HuggingFaceModel(HuggingFaceOptions(config=TINY))

    class Nothing(torch.nn.Module):
        def forward(self, input_ids: Any = None, position_ids: Any = None, use_cache: bool = False) -> Any:
            return None

    monkeypatch.setattr(HuggingFaceModel, "module", lambda *_: Nothing())
    with pytest.raises(MtrainError, match="has no parameter to train"):
        plugin.build(TASK, OneRank())


# ---------------------------------------------------------------------------------------------------------------- plan
@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("nowhere", "no such folder"),
        ("/dev", "has no config.json"),
        ("/dev/zero", "has no config.json"),
        ("https://example.org/model", "no such folder"),
        ("somebody/model", "no such folder"),
        (".", "has no config.json"),
        ("damaged", "cannot be read"),
    ],
)
def test_a_plan_names_a_model_that_cannot_be_read(
    path: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "damaged").mkdir()
    folder_with(tmp_path / "damaged", "{")
    words = [
        "plan",
        "-o",
        "model.name=hf",
        "-o",
        f"model.options.path={path}",
        "-o",
        "data.format=python_docs",
        "--backend",
        "solo",
    ]
    assert main(words) == 2
    assert said in capsys.readouterr().err
    assert main([*words, "--ips", "10.1.1.1,10.1.1.2", "--backend", "ddp", "--cluster", "manual"]) == 0
    told = capsys.readouterr()
    assert said in told.out + told.err, "other hosts may have it"


def test_a_plan_of_a_detector_names_a_configuration_that_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = [
        "plan",
        "-c",
        "digits",
        "-o",
        "model.name=rt_detr",
        "-o",
        "model.options.path=nowhere",
        "--backend",
        "solo",
    ]
    assert main(words) == 2
    assert "nowhere/config.json cannot be read" in capsys.readouterr().err
