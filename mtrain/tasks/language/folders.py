"""Refuse folders of models from which training would not start as their owner means it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mtrain.errors import PluginError, SpecError
from mtrain.tasks.language.base_weights import weight_files

CONFIG = "config.json"
UNREAD = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.h5", "*.msgpack", "*.gguf")
"""Files in which other programs keep weights, and which mtrain does not read."""
SHOWN = 3
"""Names that a message lists."""


def check(path: str, *, from_scratch: bool) -> None:
    """Refuse a path that holds no model, or weights in files that would be passed over for random ones.

    Raises:
        SpecError: It is such a path.
    """
    given = Path(path).expanduser()
    if not given.exists():
        raise SpecError(
            f"model.options.path: {path}: no such folder, and nothing is downloaded; give the folder of a model (hf download NAME "
            "--local-dir FOLDER makes one)"
        )
    if given.is_file():
        return
    if not (given / CONFIG).is_file():
        raise SpecError(
            f"model.options.path: {path}: has no {CONFIG}; give the folder that transformers' save_pretrained has written"
        )
    others = sorted(file.name for pattern in UNREAD for file in given.glob(pattern) if file.name != "training_args.bin")
    if others and not from_scratch and not weight_files(given):
        raise SpecError(
            f"model.options.path: {path}: its weights are in {', '.join(others[:SHOWN])}, and only .safetensors are read; convert them "
            "(load with transformers, then save_pretrained), or set from_scratch: true to start from random ones"
        )


def check_type(kind: str, architectures: Any, *, path: str) -> None:
    """Refuse a type of model of which transformers has no causal language model.

    Raises:
        SpecError: It is such a type.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    if kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return
    known = isinstance(architectures, list) and all(isinstance(name, str) for name in architectures)
    names = f" ({', '.join(architectures)})" if known and architectures else ""
    raise SpecError(
        f"model.options: {path}: {kind!r}{names} is no causal language model, and hf trains these alone; train it as a class of your "
        "own: model: {name: ./nets.py:MyNet} (docs/own-model.md)"
    )


def check_loaded(told: Mapping[str, Any], *, path: str) -> None:
    """Refuse a folder whose weights are not all of the model's: transformers fills up with random ones.

    Raises:
        PluginError: Some are missing.
    """
    missing = sorted(str(name) for name in told.get("missing_keys", ()))
    if missing:
        raise PluginError(
            f"model.options.path: {path}: {len(missing)} arrays of the model are not in its weights, and would start at random: "
            f"{', '.join(missing[:SHOWN])}; give the folder of the whole causal language model, or set from_scratch: true"
        )
