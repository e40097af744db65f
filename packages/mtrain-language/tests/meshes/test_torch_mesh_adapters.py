"""Adapters that a mesh has trained, exported and loaded by peft's own loader: they give the logits of mtrain's model."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.language.adapter_jobs import arrays_of
from tests.meshes.mesh_jobs import prepare, train

from mtrain.backends._torch import nn as torch_nn
from mtrain.backends._torch import ops as torch_ops
from mtrain.core.binding import bind
from mtrain.core.collective import OneRank
from mtrain.core.interfaces import SplitRequest, Task
from mtrain_language.model import HuggingFaceModel, HuggingFaceOptions
from mtrain_language.packing import NONE, pack
from mtrain_language.readers.text import TextFiles, TextOptions
from mtrain_language.tokens import Bytes
from tests.own_model.runs import command

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # peft asks transformers so
TASK = Task(
    kind="language", class_names=(), image_size=0, global_batch=2, details={"vocabulary": 257, "end": 256, "length": 24}
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    here = tmp_path_factory.mktemp("mesh-adapters")
    prepare(here, updates=8)
    return here


def _model_of_mtrain(here: Path, run: str) -> Any:
    """Return mtrain's model on one rank with the averaged adapters of a run's checkpoint."""
    bind(torch_nn, torch_ops)
    lora = {"rank": 4, "alpha": 6}
    plugin = HuggingFaceModel(HuggingFaceOptions(path=str(here / "base"), attention="sdpa", lora=lora))
    model: Any = plugin.build(plugin.prepare_task(TASK, {}), OneRank())
    averages = arrays_of(here, run, "ema")
    assert averages
    with torch.no_grad():
        for name, x in averages.items():
            model.get_parameter(name).copy_(x)
    return model.eval()


def _loaded_by_peft(here: Path, adapters: Path) -> Any:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(here / "base", attn_implementation="sdpa")
    return PeftModel.from_pretrained(base, adapters).eval()


@pytest.mark.job
@pytest.mark.parametrize(
    "mesh",
    [
        "tensor 2",
        *(
            pytest.param(mesh, marks=pytest.mark.slow)
            for mesh in ("tensor 2, sequence", "shard 2 x tensor 2", "pipeline 2")
        ),
    ],
)
@torch.no_grad()
def test_peft_reads_the_adapters_of_a_mesh(folder: Path, mesh: str) -> None:
    """Logits are those of mtrain's model, and their perplexity is that which the mesh itself found when it evaluated."""
    name = mesh.replace(" ", "-").replace(",", "")
    words = ["optimizer.learning_rate=0.03", "evaluate.every_updates=8"]
    summary = train(folder, name, "lora", mesh, *(word for value in words for word in ("-o", value)))
    exported = command(folder, "weights", "export", f"runs/{name}", "--to", f"adapters-{name}")
    assert exported.returncode == 0, exported.stdout + exported.stderr
    loaded, expected = _loaded_by_peft(folder, folder / f"adapters-{name}"), _model_of_mtrain(folder, name)
    documents = TextFiles(TextOptions(text="a", prompt="q")).read(SplitRequest(split="all", root=folder / "texts"))
    rows = pack(documents.divide(0.2, seed=0)[1].items, Bytes(), length=24)
    tokens, positions, labels = (torch.from_numpy(x).long() for x in (rows.tokens, rows.positions, rows.labels))
    asked = {"input_ids": tokens, "position_ids": positions, "use_cache": False}
    logits = loaded(**asked).logits
    with loaded.disable_adapter():
        assert float((loaded(**asked).logits - logits).abs().max()) > 0.1, "the adapters do something"
    difference = float((expected(**asked).logits - logits).abs().max())
    loss = torch.nn.functional.cross_entropy(logits.double().flatten(0, 1), labels.flatten(), ignore_index=NONE)
    perplexity, found = float(loss.exp()), summary["best"]["perplexity"]
    print(f"{mesh}: logits {difference:.1e}, perplexity {perplexity:.6f} by peft and {found:.6f} by the mesh")
    assert difference < 1e-5
    assert perplexity == pytest.approx(found, rel=1e-5)
