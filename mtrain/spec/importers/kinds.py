"""Say what a file is that somebody gives as a spec and that no importer turns into one, and what to do instead."""

from collections.abc import Mapping, Sequence
from pathlib import Path as FilePath
from typing import Any

from mtrain.errors import SpecError
from mtrain.spec.importers.documents import Document
from mtrain.spec.sources import display

_WEIGHTS = "a file of weights: --weights {file} starts from it, and -c takes the spec of the model"
NAMES: Mapping[str, str] = {
    ".py": "Python, as a script or a config of OpenMMLab is, which would have to be executed: a script is started by `mtrain run "
    "{file}`; instead of a config take a spec of `mtrain config list` and give it the data",
    ".toml": "TOML, as torchtitan's job configs are; `mtrain run` takes the script that reads it",
    ".ipynb": "a notebook; save its code as a script: mtrain run train.py",
    ".sh": "a shell script; `mtrain run` takes the Python script that it starts",
    **dict.fromkeys((".pt", ".pth", ".pdparams", ".safetensors", ".onnx", ".ckpt"), _WEIGHTS),
}
"""Words for a file by the end of its name, where ``{file}`` is the file."""
KEYS: Sequence[tuple[Sequence[str], str]] = (
    (("images", "annotations", "categories"), "COCO's annotations: -o data.format=coco data.train={file}"),
    (
        ("trainer", "model"),
        "the YAML of Lightning's command line, which names classes; a training of theirs becomes a loop in a script for `mtrain run` "
        "(docs/coming-from.md)",
    ),
    (("seed_everything",), "the YAML of Lightning's command line; `mtrain run` takes a script (docs/coming-from.md)"),
    (
        ("model_type",),
        "the config.json of a model of Hugging Face: a spec names it as model.options.path, with model.name rt_detr, d_fine, or "
        "causal_lm of mtrain-language",
    ),
    (
        ("__include__",),
        "a YAML of RT-DETR's repository for PyTorch; PaddleDetection's file of the same network is imported: "
        "configs/rtdetr/rtdetr_r50vd_6x_coco.yml",
    ),
    (("MODEL", "SOLVER"), "a config of Detectron2; take a spec of `mtrain config list` and give it the data"),
    (("Global", "Arch"), "PaddleClas's YAML; take a spec of `mtrain config list` and give it the data"),
    (
        ("imgsz", "task"),
        "the settings of an Ultralytics run; their flags are taken too: mtrain --data DATA.yaml --cfg yolov5s.yaml --img 640",
    ),
    (("apiVersion", "kind"), "an object of Kubernetes; `mtrain submit -c SPEC` writes one"),
)
"""Keys that a kind of file has all of, and words for it."""


def check_name(file: FilePath) -> None:
    """Refuse a file whose name says what it is.

    Raises:
        SpecError: it is no YAML.
    """
    words = NAMES.get(file.suffix.lower())
    if words is not None:
        raise SpecError(f"{display(file)}: is {words.format(file=display(file))}")


def check_keys(document: Document) -> None:
    """Refuse a file of a kind that is known by its keys, and that no importer takes.

    Raises:
        SpecError: it is one.
    """
    values: Mapping[str, Any] = document.values
    if isinstance(values.get("model"), dict) and "name" in values["model"]:
        return  # a spec with a mistake
    words = next((words for keys, words in KEYS if all(key in values for key in keys)), None)
    if words is not None:
        raise SpecError(f"{document.name}: is {words.format(file=document.name)}")
