"""Adapters in a process: what is trained, averaged and saved, the digest of a base, blocks that are recomputed."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.language import adapter_jobs

from mtrain.backends._torch import nn as torch_nn
from mtrain.backends._torch import ops as torch_ops
from mtrain.core.binding import bind
from mtrain.core.collective import OneRank
from mtrain.core.interfaces import Rates, Recipe, State, Task
from mtrain.errors import CheckpointError, DataError, SpecError, UsageError
from mtrain.spec import remedies
from mtrain_language import adapters
from mtrain_language.base_weights import BASE, digest_of
from mtrain_language.documents import Document
from mtrain_language.model import HuggingFaceModel, HuggingFaceOptions
from mtrain_language.packing import pack
from mtrain_language.source import RowSource
from mtrain_language.tokens import Bytes
from tests.framework import Framework

TASK = Task(
    kind="language", class_names=(), image_size=0, global_batch=2, details={"vocabulary": 257, "end": 256, "length": 32}
)
RECIPE = Recipe(
    rule="adamw", groups=(("", {"weight_decay": 0.1, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8}),), micro_batch=2,
    own_model=True, seed=3, ema_decay=0.5, ema_ramp=0.0,
)  # fmt: skip
LORA = {"rank": 2, "alpha": 4, "targets": ["c_attn"]}


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("base") / "gpt2"
    adapter_jobs.write_base(folder, seed=1)
    return folder


def plugin_of(base: Path, lora: dict[str, Any] | None = LORA, **options: Any) -> HuggingFaceModel:
    return HuggingFaceModel(HuggingFaceOptions(path=str(base), attention="eager", lora=lora, **options))


def built(plugin: HuggingFaceModel) -> Any:
    bind(torch_nn, torch_ops)
    return plugin.build(plugin.prepare_task(TASK, {}), OneRank())


def batch(number: int) -> dict[str, np.ndarray]:
    source = RowSource(pack([Document(f"text {number} of some words")], Bytes(), length=12))
    return source.collate([source.sample(0, index) for index in range(len(source))])


def trained(framework: Framework, plugin: HuggingFaceModel, recipe: Recipe = RECIPE) -> tuple[Any, State]:
    """Train three updates on one rank; return the module and the state."""
    with framework.solo() as session:
        model, optimizer = session.prepare(
            lambda: plugin.build(plugin.prepare_task(TASK, {}), session.collective), recipe
        )
        for number in range(3):
            with optimizer.micro_batch(last=True):
                optimizer.backward(model(next(session.batches([batch(number)])))["total"])
            optimizer.step(Rates(learning_rates=(0.05,)))
        return model, session.state(model, optimizer)


def test_adapters_alone_are_trained_averaged_and_saved(framework: Framework, base: Path) -> None:
    model, state = trained(framework, plugin_of(base))
    names = {f"transformer.h.{block}.attn.c_attn.lora_{side}.default.weight" for block in (0, 1) for side in "AB"}
    assert set(state.weights) == set(state.ema) == names
    assert set(state.moments) == {f"{moment}/{name}" for moment in ("mean", "square") for name in names}
    before = plugin_of(base, lora=None).module(plugin_of(base).config(vocabulary=257, end=256)).state_dict()
    after = {name.replace(".base_layer", ""): x for name, x in model.named_parameters() if "lora_" not in name}
    assert all(torch.equal(x, before[name]) for name, x in after.items())
    assert len(after) == len(list(before)) - 1, "the last layer shares its weights with the first"
    torch.manual_seed(RECIPE.seed)
    start = built(plugin_of(base)).state_dict()
    for name in names:
        assert not np.array_equal(state.weights[name], start[name].numpy()), f"{name} was not trained"
        assert not np.array_equal(state.ema[name], start[name].numpy()), f"{name} was not averaged"
        assert not np.array_equal(state.ema[name], state.weights[name]), f"{name} was not averaged"


def test_new_adapters_change_nothing(base: Path) -> None:
    tokens = torch.tensor([[*b"some text"]])
    plain, adapted = built(plugin_of(base, lora=None)).eval(), built(plugin_of(base)).eval()
    assert torch.equal(plain(input_ids=tokens).logits, adapted(input_ids=tokens).logits)


@pytest.mark.parametrize(
    ("targets", "layers"),
    [
        ("all-linear", {"attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"}),
        (["mlp.c_proj", "c_fc"], {"mlp.c_proj", "mlp.c_fc"}),
    ],
)
def test_targets_choose_layers(base: Path, targets: Any, layers: set[str]) -> None:
    names = list(built(plugin_of(base, {"targets": targets})).state_dict())
    expected = {f"transformer.h.{block}.{layer}" for block in (0, 1) for layer in layers}
    assert set(adapters.list_adapted_layers(names)) == expected


def test_an_unknown_target_is_named_with_those_that_exist(base: Path) -> None:
    with pytest.raises(SpecError, match=r"no layer is called q_proj; there are .*c_attn"):
        built(plugin_of(base, {"targets": ["c_attn", "q_proj"]}))


@pytest.mark.parametrize("options", [{"config": {"model_type": "gpt2"}}, {"path": "x", "from_scratch": True}])
def test_adapters_need_weights(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="give the folder of a model in path"):
        HuggingFaceOptions(lora={}, **options)


def test_a_folder_of_adapters_is_no_model(base: Path, tmp_path: Path) -> None:
    shutil.copytree(base, tmp_path / "both")
    (tmp_path / "both/adapter_config.json").write_text("{}")
    with pytest.raises(SpecError, match="holds adapters"):
        built(plugin_of(tmp_path / "both", lora=None))


def test_without_peft_its_extra_is_named(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remedies, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"model\.options\.lora needs peft.*language"):
        plugin_of(base).prepare_task(TASK, {})


def test_the_digest_is_of_arrays_and_not_of_files(base: Path, tmp_path: Path) -> None:
    adapter_jobs.write_base(tmp_path / "parts", seed=1, max_shard_size="20KB")
    assert len(list((tmp_path / "parts").glob("*.safetensors"))) > 1
    assert digest_of(tmp_path / "parts") == digest_of(base)
    file = tmp_path / "parts" / sorted(path.name for path in (tmp_path / "parts").glob("*.safetensors"))[-1]
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert digest_of(tmp_path / "parts") != digest_of(base)
    file.write_bytes(content[:-9])
    with pytest.raises(SpecError, match="ends too early"):
        digest_of(tmp_path / "parts")
    file.write_bytes(b"nothing of this kind")
    with pytest.raises(SpecError, match="cannot be read as safetensors"):
        digest_of(tmp_path / "parts")


def test_adapters_of_another_base_are_refused(base: Path) -> None:
    plugin = plugin_of(base)
    details = plugin.prepare_task(TASK, {}).details
    plugin.check_resumed(details, details)
    with pytest.raises(CheckpointError, match=f"other weights .*{details[BASE][:12]}"):
        plugin.check_resumed(details, {**details, BASE: "0" * 64})
    with pytest.raises(CheckpointError, match="of whole models, and the job trains adapters"):
        plugin.check_resumed(details, TASK.details)
    bind(torch_nn, torch_ops)
    with pytest.raises(CheckpointError, match="other weights"):
        plugin.build(replace(TASK, details={**details, BASE: "0" * 64}), OneRank())


def test_ranks_with_different_bases_are_refused(base: Path) -> None:
    class Two(OneRank):
        def all_gather(self, value: Any) -> list[Any]:
            return [value, "another"]

    bind(torch_nn, torch_ops)
    plugin = plugin_of(base)
    with pytest.raises(DataError, match="ranks have read different weights"):
        plugin.build(plugin.prepare_task(TASK, {}), Two())


@pytest.mark.parametrize("lora", [None, {**LORA, "dropout": 0.5}], ids=["whole", "adapters"])
def test_recomputed_blocks_learn_the_same_bits(framework: Framework, base: Path, lora: dict[str, Any] | None) -> None:
    dropout = {"resid_pdrop": 0.3, "embd_pdrop": 0.3, "attn_pdrop": 0.3}
    plugin, calls = plugin_of(base, lora, config=dropout), []
    states = []
    for patterns in ((), plugin.recomputable):
        with counted_blocks(calls):
            states.append(trained(framework, plugin, replace(RECIPE, recompute=patterns))[1])
    kept, recomputed = states
    assert all(np.array_equal(array, recomputed.weights[name]) for name, array in kept.weights.items())
    assert all(np.array_equal(array, recomputed.ema[name]) for name, array in kept.ema.items())
    assert calls[1] > 1.5 * calls[0], "no block was computed twice"


class counted_blocks:
    """Append to ``calls`` how often a block of GPT-2 computes."""

    def __init__(self, calls: list[int]) -> None:
        from transformers.models.gpt2.modeling_gpt2 import GPT2Block

        self._kind: Any = GPT2Block
        self._calls = calls

    def __enter__(self) -> None:
        self._forward, count = self._kind.forward, self._calls
        count.append(0)

        def forward(*arguments: Any, **keywords: Any) -> Any:
            count[-1] += 1
            return self._forward(*arguments, **keywords)

        self._kind.forward = forward

    def __exit__(self, *_: object) -> None:
        self._kind.forward = self._forward
