"""Refuse folders of models from which training would not start as their owner means it."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from mtrain.errors import PluginError, SpecError
from mtrain.tasks.model_config import CONFIG, MAX_INDEX_BYTES, check_sizes, read_entries
from mtrain_language.base_weights import arrays_of, weight_files

UNREAD = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.h5", "*.msgpack", "*.gguf")
"""Files in which other programs keep weights, and which mtrain does not read."""
GENERATION = "generation_config.json"
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
"""The weights in one file, and the list of the files that hold them, which counts where there is no such file."""
SAY_N_POSITIONS = ("gpt2", "gptj", "openai-gpt", "codegen", "ctrl")
"""Types of models whose configuration calls the longest row so."""
_ONE_FILE = re.compile(r"[\w.-]+\.safetensors")
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


def read_config(path: str, *, from_scratch: bool) -> dict[str, Any]:
    """Return the entries of a model's config.json, after a look at its files without transformers: see ``check`` too.

    Raises:
        SpecError: It is no model, its config.json is no JSON, or its weights are damaged or not all there.
    """
    check(path, from_scratch=from_scratch)
    given = Path(path).expanduser()
    entries = read_entries(given if given.is_file() else given / CONFIG)
    check_sizes(entries, path=path)
    folder = given.parent if given.is_file() else given
    if not from_scratch:
        if (folder / GENERATION).is_file():
            read_entries(folder / GENERATION)  # transformers reads it without a limit
        if not (folder / SINGLE).is_file() and (folder / INDEX).is_file():
            parts = read_entries(folder / INDEX, limit=MAX_INDEX_BYTES).get("weight_map")
            _check_parts(folder, parts if isinstance(parts, dict) else {})
        arrays_of(folder)
    return entries


def check_typed(entries: Mapping[str, Any], *, path: str) -> None:
    """Refuse a configuration that does not say which type of model it is.

    Raises:
        SpecError: It does not.
    """
    if not isinstance(entries.get("model_type"), str):
        raise SpecError(
            f"model.options.path: {path}: its {CONFIG} has no model_type; give the folder of a model of transformers, or name the type "
            "in model.options.config.model_type"
        )


def longest(entries: Mapping[str, Any]) -> Any:
    """Return the longest row that a configuration says the model takes; None if it says it in words of its own."""
    name = "n_positions" if entries.get("model_type") in SAY_N_POSITIONS else "max_position_embeddings"
    return entries.get(name)


def _check_parts(folder: Path, places: Mapping[str, Any]) -> None:
    """Refuse a folder whose index names files that are missing, lie elsewhere, or are none of safetensors, which torch would unpickle."""
    if odd := sorted({str(name) for name in places.values() if not _ONE_FILE.fullmatch(str(name))}):
        raise SpecError(
            f"model.options.path: {folder}: {INDEX} names {ascii(odd[0])[:80]}, and only .safetensors in the folder itself are read; "
            "convert them (load with transformers, then save_pretrained), or set from_scratch: true to start from random ones"
        )
    if missing := sorted({str(name) for name in places.values() if not (folder / str(name)).is_file()}):
        raise SpecError(
            f"model.options.path: {folder}: {len(missing)} files of weights that {INDEX} names are not there: "
            f"{', '.join(missing[:SHOWN])}; copy the whole folder"
        )


def check_type(kind: str, architectures: Any, *, path: str) -> None:
    """Refuse a type of model of which transformers has no causal language model.

    Raises:
        SpecError: It is such a type.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        refuse_type(kind, architectures, path=path)


def refuse_type(kind: str, architectures: Any, *, path: str) -> NoReturn:
    """Refuse a type of model that is no causal language model; ``architectures``: those that its configuration names.

    Raises:
        SpecError: Always.
    """
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
    if missing := sorted(str(name) for name in told.get("missing_keys", ())):
        raise PluginError(
            f"model.options.path: {path}: {len(missing)} arrays of the model are not in its weights, and would start at random: "
            f"{', '.join(missing[:SHOWN])}; give the folder of the whole causal language model, or set from_scratch: true"
        )
