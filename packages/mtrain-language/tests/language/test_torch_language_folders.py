"""Folders from which a language model would start otherwise than their owner means are refused, each with what to do."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mtrain.backends._torch import nn as torch_nn
from mtrain.backends._torch import ops as torch_ops
from mtrain.commands import main
from mtrain.core.binding import bind
from mtrain.core.collective import OneRank
from mtrain.core.interfaces import Task
from mtrain.errors import PluginError, SpecError
from mtrain_language import known_types
from mtrain_language.loading import array_by_array
from mtrain_language.model import HuggingFaceModel, HuggingFaceOptions

TINY = {"model_type": "gpt2", "vocab_size": 257, "n_positions": 32, "n_embd": 8, "n_layer": 1, "n_head": 2}
TASK = Task(
    kind="language",
    class_names=(),
    image_size=0,
    global_batch=2,
    details={"vocabulary": 257, "end": 256, "length": 32},
)


@pytest.fixture(autouse=True)
def _bound() -> None:
    bind(torch_nn, torch_ops)


def built(path: Path | str, **options: object) -> torch.nn.Module:
    return HuggingFaceModel(HuggingFaceOptions(path=str(path), **options)).build(TASK, OneRank())  # type: ignore[arg-type]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = {name: value for name, value in TINY.items() if name != "model_type"}
    GPT2LMHeadModel(GPT2Config(**config)).save_pretrained(tmp_path / "gpt2")
    return tmp_path / "gpt2"


def test_a_name_on_the_hub_is_no_folder() -> None:
    with pytest.raises(SpecError, match=r"Qwen/Qwen3-0\.6B: no such folder, and nothing is downloaded.*--local-dir"):
        built("Qwen/Qwen3-0.6B")


def test_a_folder_without_a_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"has no config\.json"):
        built(tmp_path)


def test_weights_that_are_not_read_do_not_become_random_ones(folder: Path) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    built(folder)  # which has both
    (folder / "model.safetensors").unlink()
    with pytest.raises(SpecError, match=r"its weights are in pytorch_model\.bin, and only \.safetensors are read"):
        built(folder)
    built(folder, from_scratch=True)


def test_a_model_that_predicts_no_next_token_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "vit", "architectures": ["ViTForImageClassification"]})
    )
    with pytest.raises(SpecError) as told:
        built(tmp_path)
    assert "'vit' (ViTForImageClassification) is no causal language model" in str(told.value)
    assert "own-model.md" in str(told.value)
    assert len(str(told.value)) < 400


def test_arrays_that_the_weights_lack_do_not_start_at_random(folder: Path) -> None:
    arrays = load_file(folder / "model.safetensors")
    arrays.pop("transformer.h.0.mlp.c_fc.weight")
    save_file(arrays, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(PluginError, match=r"1 arrays of the model are not in its weights.*c_fc\.weight"):
        built(folder)


def weightless(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def pointer(folder: Path) -> None:
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:12\nsize 7\n")


def cut(folder: Path) -> None:
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[:-7])


def list_header(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"[]")


def half(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    places = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))


def no_json(folder: Path) -> None:
    (folder / "config.json").write_text("{")


def no_type(folder: Path) -> None:
    (folder / "config.json").write_text("{}")


def adapted(folder: Path) -> None:
    (folder / "adapter_config.json").write_text("{}")


def few_tokens(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({**TINY, "vocab_size": 255}))


def short_rows(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({**TINY, "n_positions": 8}))


def text_only(folder: Path) -> None:
    (folder / "config.json").write_text('["gpt2"]')


def unknown_type(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({**TINY, "model_type": "gtp2"}))


def of_images(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({**TINY, "model_type": "vit", "architectures": ["ViTModel"]}))


def numbered_type(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({**TINY, "model_type": 2}))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (text_only, "config.json is no configuration"),
        (unknown_type, "gpt2: 'gtp2' is no type of model of the installed transformers; did you mean 'gpt2'"),
        (of_images, "gpt2: 'vit' (ViTModel) is no causal language model, and hf trains these alone"),
        (numbered_type, "config.json has no model_type"),
        (shutil.rmtree, "no such folder"),
        (weightless, "its weights are in pytorch_model.bin"),
        (pointer, "cannot be read as safetensors: a header of"),
        (cut, "bytes are fewer than its arrays take"),
        (list_header, "cannot be read as safetensors"),
        (half, "names are not there: model-00002-of-00002.safetensors; copy the whole folder"),
        (no_json, "config.json cannot be read"),
        (no_type, "config.json has no model_type"),
        (adapted, "holds adapters"),
        (few_tokens, "the model has 255 tokens, and data.tokenizer 257"),
        (short_rows, "data.length: 16 tokens, and the model takes at most 8"),
    ],
)
def test_a_folder_that_cannot_be_trained_is_refused_before_there_is_a_run_folder(
    folder: Path,
    damage: Callable[[Path], None],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(folder.parent)
    Path("texts").mkdir()
    Path("texts/train.txt").write_text("one and one make two. " * 40)
    options = {"path": "gpt2"}
    data = {"format": "text", "root": "texts", "length": 16, "split": None}
    spec = {"model": {"name": "hf", "options": options}, "data": data, "train": {"updates": 2, "batch_size": 2}}
    Path("job.yml").write_text(json.dumps({**spec, "evaluate": {"enabled": False}, "backend": {"name": "solo"}}))
    HuggingFaceModel(HuggingFaceOptions(path="gpt2")).prepare_task(TASK, {})  # a whole folder is not refused
    damage(folder)
    assert main(["train", "-c", "job.yml", "--quiet"]) == 2
    assert said in capsys.readouterr().err
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("kind", "said"), [("lama", "did you mean 'llama'"), (3, "has no model_type"), ("vit", "no causal")]
)
def test_a_configuration_without_a_folder_is_refused_before_there_is_a_run_folder(
    kind: object, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.txt").write_text("one and one make two. " * 40)
    model = {"name": "hf", "options": {"config": {"model_type": kind}}}
    data = {"format": "text", "root": ".", "length": 16, "split": None}
    spec = {"model": model, "data": data, "train": {"updates": 2, "batch_size": 2}, "evaluate": {"enabled": False}}
    Path("job.yml").write_text(json.dumps({**spec, "backend": {"name": "solo"}}))
    assert main(["train", "-c", "job.yml", "--quiet"]) == 2
    assert said in capsys.readouterr().err
    assert not Path("runs").exists()


@pytest.mark.job
def test_types_of_models_are_read_as_transformers_has_them_without_importing_it() -> None:
    """A table that is no longer found would let every type through."""
    from transformers.models.auto.auto_mappings import CONFIG_MAPPING_NAMES
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    assert known_types._table(*known_types.CAUSAL) == dict(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    assert (known_types._table(*known_types.TYPES) or {}).keys() <= CONFIG_MAPPING_NAMES.keys()
    line = "import sys; from mtrain_language.known_types import check; check({'model_type': 'gpt2'}, path='x'); "
    line += "assert not {'torch', 'transformers'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", line], check=True)


def test_a_table_that_transformers_does_not_have_refuses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SpecError, match="'gtp2'"):
        known_types.check({"model_type": "gtp2"}, path="x")
    monkeypatch.setattr(known_types, "CAUSAL", ("modeling_auto.py", "NO_SUCH_TABLE"))
    known_types.check({"model_type": "gtp2"}, path="x")
    monkeypatch.setattr(known_types, "CAUSAL", ("no_such_file.py", "X"))
    known_types.check({"model_type": "gtp2"}, path="x")


def test_a_tied_output_layer_is_not_missing(folder: Path) -> None:
    assert "lm_head.weight" not in load_file(folder / "model.safetensors")
    module = built(folder)
    state = module.state_dict()
    name = next(name for name in state if name.endswith("wte.weight"))
    assert torch.equal(state[name], load_file(folder / "model.safetensors")["transformer.wte.weight"])


def test_other_releases_of_transformers_open_files_as_they_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """An old one names no way to read, and safetensors of its time knows none; another one may not open files there at all."""
    from transformers import modeling_utils

    monkeypatch.setattr(modeling_utils, "safe_open", lambda *words, **options: (words, options))
    with array_by_array():
        assert modeling_utils.safe_open("file", framework="pt") == (("file",), {"framework": "pt"})
        assert modeling_utils.safe_open("file", backend="mmap") == (("file",), {"backend": "pread"})
    assert modeling_utils.safe_open("file", backend="mmap") == (("file",), {"backend": "mmap"})
    monkeypatch.delattr(modeling_utils, "safe_open")
    with array_by_array():
        assert not hasattr(modeling_utils, "safe_open")
    assert not hasattr(modeling_utils, "safe_open")
