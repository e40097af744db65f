"""The page of the specs and models that come with mtrain, made from the specs and the networks."""

import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

INTRODUCTION = """# Shipped specs and models

Made from the specs and the networks of this version. `mtrain -c NAME` trains a spec, `mtrain config show -c NAME` prints it,
and `_BASE_: NAME` is the first line of one that is laid over it. Parameters are those that are trained, in millions.
"""
SPECS = """## Specs

A data set that is not embedded is named by `-o data.root=FOLDER` ([your own data](data.md)). Parameters are counted with the classes
of that column; other classes change them a little. A spec without a measurement was never trained to its end here: none was trained
on COCO, VOC or ImageNet ([status](versions.md)).
"""
MODELS = """## Models

`model.name` takes any of these; `mtrain plugins show NAME` lists the options of one. The side of the images changes the parameters of
vision transformers alone, which learn a vector for each patch.
"""
SPECS_HEAD = """| spec | model | parameters | side, px | classes | epochs x batch | measured |
|---|---|--:|--:|--:|--:|---|"""
MODELS_HEAD = """| model | parameters | classes | side, px | what it is |
|---|--:|--:|--:|---|"""
STANDARD = {"detection": (80, 640), "classification": (1000, 224), "segmentation": (21, 512)}
"""Task -> classes and side of the set on which its models are usually measured: COCO, ImageNet, Pascal VOC."""
LANGUAGE = "language"
"""The task whose models have tokens in place of classes and images."""
CLASSES = {"coco": 80, "image_folder": 1000, "voc_masks": 21, "digits": 10, "digits_classes": 10}
"""Data format -> number of classes where the spec does not name them."""
INK_AND_BACKGROUND, DIGITS_AND_BACKGROUND = 2, 11


@dataclass(frozen=True)
class Measured:
    """What a spec reached, and the document with the run."""

    text: str
    document: str
    """Path below docs, with an anchor."""


MEASURED: Mapping[str, Measured] = {
    "digits": Measured("AP 0.58, AP50 0.94", "notebook/results.md#the-embedded-demo"),
    "yolov5n_bccd": Measured("AP 0.516, AP50 0.865", "notebook/results.md#blood-cells-bccd-from-scratch"),
    "yolov5n_bccd_reference": Measured(
        "three seeds: AP .398, AP50 .707", "notebook/results.md#with-yolov5s-own-recipe"
    ),
    "yolov5n_small_data": Measured(
        "BCCD, 160 px, 520 updates: AP .385, AP50 .668", "notebook/results.md#a-recipe-for-small-data-sets"
    ),
    "ppyoloe_s_bccd": Measured("14 epochs, 256 px: AP 0.485", "notebook/results.md#pp-yoloe-on-two-stacks"),
    "gpt_docs": Measured("perplexity 8.31 a byte", "language.md#language-models-of-hugging-face"),
    "vit_digits": Measured("accuracy 0.972", "notebook/results.md#torch-and-paddle-compared"),
    "unet_digits": Measured("mean IoU 0.914", "data.md#images-with-a-class-for-each-pixel"),
    "unet_ten_digits": Measured("one rank: mean IoU 0.297", "data.md#images-with-a-class-for-each-pixel"),
}


def page() -> str:
    """Return the Markdown of the page."""
    from mtrain.spec import config

    parts = [INTRODUCTION]
    for heading, head, rows in (
        (SPECS, SPECS_HEAD, [_spec_row(name) for name in config.shipped_names()]),
        (MODELS, MODELS_HEAD, _model_rows()),
    ):
        parts.append(heading)
        for task in (*STANDARD, LANGUAGE):
            found = [row for kind, row in rows if kind == task]
            parts.append("\n".join([f"### {task.capitalize()}\n", head, *found]) + "\n")
    return "\n".join(parts)


def _spec_row(name: str) -> tuple[str, str]:
    """Return the task of a spec, and its row."""
    from mtrain.spec import config

    spec = config.load({"_BASE_": name}, environ={}).spec
    found = MEASURED.get(name)
    measured = f"[{found.text}]({found.document})" if found else ""
    if spec.model.name == "hf":
        cells = [f"`{name}`", "`hf`", _rounded(_language_millions(spec)), "-", "-", f"{spec.train.updates} updates x"]
        cells[-1] += f" {spec.train.batch_size}"
        return LANGUAGE, f"| {' | '.join([*cells, measured])} |"
    classes = classes_of(spec)
    kind, millions = counted(spec.model.name, spec.model.options, classes=classes, side=spec.data.image_size)
    cells = [
        f"`{name}`",
        f"`{spec.model.name}`",
        _rounded(millions),
        str(spec.data.image_size),
        str(classes),
        f"{spec.train.epochs} x {spec.train.batch_size}",
        measured,
    ]
    return kind, f"| {' | '.join(cells)} |"


def classes_of(spec: Any) -> int:
    """Return the number of classes of a shipped spec, background included."""
    if spec.data.names:
        return len(spec.data.names)
    if spec.data.format == "digits_masks":
        return INK_AND_BACKGROUND if spec.data.options["classes"] == "ink" else DIGITS_AND_BACKGROUND
    return CLASSES[spec.data.format]


def _model_rows() -> list[tuple[str, str]]:
    """Return the task and the row of each model."""
    from mtrain.spec import plugins

    rows = []
    for entry in plugins.names("models"):
        if not entry.is_own or entry.name == "own":
            continue
        if entry.name == "hf":
            rows.append((LANGUAGE, f"| `hf` | as its config says | - | - | {entry.summary} |"))
            continue
        kind, _ = counted(entry.name, {}, classes=2, side=160)
        classes, side = STANDARD[kind]
        _, millions = counted(entry.name, {}, classes=classes, side=side)
        what = re.sub(r", [\d.]+ M parameters|; [\d.]+ M parameters as it comes", "", entry.summary)
        rows.append((kind, f"| `{entry.name}` | {_rounded(millions)} | {classes} | {side} | {what} |"))
    return rows


def _language_millions(spec: Any) -> float:
    """Return the trained parameters, in millions, of a language model that learns bytes. No array is allocated."""
    import torch
    from transformers import AutoModelForCausalLM

    from mtrain_language.model import HuggingFaceModel, HuggingFaceOptions
    from mtrain_language.tokens import Bytes

    config = HuggingFaceModel(HuggingFaceOptions(**spec.model.options)).config(vocabulary=Bytes().size, end=Bytes().end)
    with torch.device("meta"):
        network = AutoModelForCausalLM.from_config(config)
    return sum(each.numel() for each in network.parameters()) / 1e6


def counted(name: str, options: Mapping[str, Any], *, classes: int, side: int) -> tuple[str, float]:
    """Return the task of a model, and its trained parameters in millions. No array is allocated."""
    import torch

    from mtrain.core.interfaces import Task
    from mtrain.spec.registry import Registry

    _bind()
    plugin = Registry.read().make("models", name, dict(options), path="")
    names = tuple(f"class {number}" for number in range(classes))
    task = Task(kind=plugin.kind, class_names=names, image_size=side, global_batch=8)
    with _quiet(), torch.device("meta"):
        network = plugin.build(plugin.prepare_task(task, {}), None)
    return plugin.kind, sum(each.numel() for each in network.parameters() if each.requires_grad) / 1e6


@contextmanager
def _quiet() -> Iterator[None]:
    """Hold back mtrain's warnings: they are about a training, and these networks are only counted."""
    logger = logging.getLogger("mtrain")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


@cache
def _bind() -> None:
    from mtrain.backends._torch import nn, ops
    from mtrain.core import binding

    binding.bind(nn, ops)


def _rounded(millions: float) -> str:
    return f"{millions:.1f}" if millions >= 1 else f"{millions:.2f}" if millions >= 0.1 else f"{millions:.3f}"
