"""Read folders of DeepSpeed's ``save_checkpoint`` without torch: float32 weights, put together from the parts of all ranks.

``mp_rank_00_model_states.pt`` holds the module, in the precision of training; under ZeRO 3 each rank has a file of its own,
whose parameters are empty. With ZeRO, ``*_optim_states.pt`` of each rank has its part of the float32 weights, laid end to
end (https://www.deepspeed.ai/tutorials/zero/#extracting-weights).
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mtrain.core.interfaces import Array
from mtrain.errors import CheckpointError
from mtrain.spec.files import open_file, read_text
from mtrain.weights.arrays import Leaf, TorchTensor, check_growth, dimensions
from mtrain.weights.pickles import Refused
from mtrain.weights.torch_files import read_zip

_MODULES, _PARTS = "*_model_states.pt", "*_optim_states.pt"
_RANK = re.compile(r"(?:bf16_)?(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_(?:model|optim)_states")
_MAX_GROUPS, _MAX_TAG_BYTES = 100_000, 4096


def folder_of(path: Path) -> Path | None:
    """Return the folder of DeepSpeed's checkpoint that ``path`` is, holds or lies in; None if there is none."""
    if path.is_file():
        is_part = path.match(_PARTS) or (path.match(_MODULES) and any(path.parent.glob(_PARTS)))
        return path.parent if is_part and any(path.parent.glob(_MODULES)) else None
    if any(path.glob(_MODULES)):
        return path
    latest = path / "latest"
    tag = _tag(latest) if latest.is_file() else ""
    inside = path / tag
    return inside if tag and Path(tag).name == tag and any(inside.glob(_MODULES)) else None


def _tag(latest: Path) -> str:
    try:
        return read_text(latest, limit=_MAX_TAG_BYTES).strip()
    except (OSError, ValueError):  # It is somebody else's.
        return ""


def read_folder(folder: Path) -> tuple[dict[str, Array], str]:
    """Return the weights in a checkpoint of DeepSpeed by name, and a description of it.

    Raises:
        CheckpointError: A file of a rank is missing or damaged, or the ranks divided layers among them.
        Refused: A file holds something else than DeepSpeed writes.
    """
    modules, parts = (_by_rank(folder, pattern) for pattern in (_MODULES, _PARTS))
    contents = [_content(file) for file in modules]
    module = _mapping(contents[0].get("module"), "module")
    if not parts:
        leaves = {name: leaf for name, leaf in module.items() if isinstance(leaf, TorchTensor)}
        return _read(leaves, modules), "DeepSpeed, its `module`"
    states = [_mapping(_content(file).get("optimizer_state_dict"), "optimizer_state_dict") for file in parts]
    is_divided = "fp32_flat_groups" in states[0]
    count = states[0].get("partition_count")
    ranks = max(count) if isinstance(count, list) and count else count
    if len(parts) != ranks:
        raise CheckpointError(
            f"{folder}: files of {len(parts)} ranks ({_PARTS}), written by {ranks}; copy those of all"
        )
    key = "fp32_flat_groups" if is_divided else "single_partition_of_fp32_groups"
    flat = [_flat(state.get(key)) for state in states]
    shapes = [_mapping(group, "param_shapes") for group in contents[0].get("param_shapes") or ()]
    arrays = _of_stage_3(flat, shapes) if is_divided else _of_groups(flat, shapes)
    arrays |= _frozen(contents, divided=is_divided)
    arrays |= _others(module, arrays)
    shared = contents[0].get("shared_params") or ()
    for alias, name in shared.items() if isinstance(shared, dict) else shared:
        if name in arrays:
            arrays[alias] = arrays[name]
    order = {name: place for place, name in enumerate(module)}
    return dict(sorted(arrays.items(), key=lambda item: order.get(item[0], len(order)))), (
        f"DeepSpeed, float32 weights of ZeRO {'3' if is_divided else '1 or 2'} on {ranks} ranks"
    )


def _by_rank(folder: Path, pattern: str) -> list[Path]:
    """Return the files of all ranks, in their order."""
    found: dict[int, Path] = {}
    for file in folder.glob(pattern):
        match = _RANK.match(file.name)
        if match is None or int(match[2]):
            raise CheckpointError(
                f"{file}: of a job that divided layers or experts among ranks; give a checkpoint whose ranks hold all layers, or "
                "let DeepSpeed join it"
            )
        found[int(match[1] or 0)] = file
    return [found[rank] for rank in sorted(found)]


def _content(file: Path) -> Mapping[Any, Any]:
    with open_file(file) as opened:
        return _mapping(read_zip(opened.read()), file.name)


def _mapping(value: object, what: str) -> Mapping[Any, Any]:
    if not isinstance(value, dict):
        raise Refused(f"{what} that is no dictionary; expected a checkpoint of DeepSpeed")
    return value


def _read(leaves: Mapping[str, Leaf], files: Sequence[Path]) -> dict[str, Array]:
    check_growth(leaves.values(), file_bytes=sum(file.stat().st_size for file in files))
    return {name: leaf.array() for name, leaf in leaves.items()}


def _array(value: object) -> Array:
    if not isinstance(value, TorchTensor):
        raise Refused("a part of the weights that is no tensor")
    check_growth([value], file_bytes=value.storage.length * value.storage.itemsize)
    return value.array()


def _flat(groups: object) -> list[Array]:
    """Return the part of each group of parameters that a rank has."""
    if not isinstance(groups, list) or len(groups) > _MAX_GROUPS:
        raise Refused("the optimizer's state has no float32 weights; was it saved by ZeRO?")
    return [_array(group).reshape(-1) for group in groups]


def _sizes(shapes: Mapping[Any, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    for name, shape in shapes.items():
        if not isinstance(name, str):
            raise Refused("the shape of a parameter without its name")
        yield name, dimensions(shape)


def _of_groups(flat: Sequence[Sequence[Array]], shapes: Sequence[Mapping[Any, Any]]) -> dict[str, Array]:
    """Return the parameters of ZeRO 1 and 2: each group, end to end, was cut into one piece for each rank."""
    arrays: dict[str, Array] = {}
    for number, group in enumerate(shapes):
        if any(number >= len(parts) for parts in flat):
            raise Refused("fewer groups of float32 weights than of parameters")
        whole = np.concatenate([parts[number] for parts in flat])
        start = 0
        for name, shape in _sizes(group):
            arrays[name] = _cut(whole, start, math.prod(shape), name).reshape(shape)
            start += math.prod(shape)
    return arrays


def _of_stage_3(flat: Sequence[Sequence[Array]], shapes: Sequence[Mapping[Any, Any]]) -> dict[str, Array]:
    """Return the parameters of ZeRO 3: each parameter was cut into one piece for each rank, the last one filled up."""
    wholes = [np.concatenate(parts) for parts in flat]
    arrays: dict[str, Array] = {}
    start = 0
    for group in shapes:
        for name, shape in _sizes(group):
            size = math.prod(shape)
            each = -(-size // len(wholes))
            arrays[name] = np.concatenate([_cut(whole, start, each, name) for whole in wholes])[:size].reshape(shape)
            start += each
    return arrays


def _cut(whole: Array, start: int, size: int, name: str) -> Array:
    part = whole[start : start + size]
    if part.size != size:
        raise Refused(f"{name[:80]}: the parts of the ranks end before it does")
    return part


def _others(module: Mapping[Any, Any], arrays: Mapping[str, Array]) -> dict[str, Array]:
    """Return what the module has besides its parameters: buffers, and second names of parameters."""
    tensors = {name: leaf for name, leaf in module.items() if isinstance(leaf, TorchTensor) and isinstance(name, str)}
    places = {(id(leaf.storage), leaf.offset, leaf.shape): name for name, leaf in tensors.items() if name in arrays}
    others = {}
    for name, leaf in tensors.items():
        # Under ZeRO 3 a parameter is empty here.
        if name not in arrays and 0 not in leaf.shape:
            first = places.get((id(leaf.storage), leaf.offset, leaf.shape))
            others[name] = _array(leaf) if first is None else arrays[first]
    return others


def _frozen(contents: Sequence[Mapping[Any, Any]], *, divided: bool) -> dict[str, Array]:
    """Return the parameters that were not trained, of which no optimizer has a part; ``divided``: each rank has a piece."""
    arrays = {}
    for name, shape in _sizes(contents[0].get("frozen_param_shapes") or {}):
        ranks = contents if divided else contents[:1]
        pieces = [_array((each.get("frozen_param_fragments") or {}).get(name)).reshape(-1) for each in ranks]
        arrays[name] = _cut(np.concatenate(pieces), 0, math.prod(shape), name).reshape(shape)
    return arrays
