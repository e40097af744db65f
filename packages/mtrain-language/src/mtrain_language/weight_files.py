"""Write arrays as safetensors: one file, or above a size several with an index, as Hugging Face's libraries read them."""

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path

from mtrain.core.interfaces import Array
from mtrain.spec import outputs

WEIGHTS = "model.safetensors"
INDEX = f"{WEIGHTS}.index.json"
_ONE_OF_SEVERAL = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")


def write_model(folder: Path, arrays: Mapping[str, Array], *, max_bytes: float) -> None:
    """Write the weights of a model into ``folder``, and remove those that it had; a larger array has a file of its own.

    An index is written last: a folder with it has all files.
    """
    files = divide_files(arrays, max_bytes=max_bytes)
    former = {
        file.name for file in folder.iterdir() if file.name in (WEIGHTS, INDEX) or _ONE_OF_SEVERAL.fullmatch(file.name)
    }
    # A kill from here on leaves no index that names files of two models.
    (folder / INDEX).unlink(missing_ok=True)
    for name, of_file in files.items():
        write_arrays(folder / name, of_file)
    if len(files) > 1:
        places = {name: file for file, of_file in files.items() for name in of_file}
        total = sum(array.nbytes for array in arrays.values())
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
        outputs.write_text(folder / INDEX, json.dumps(index, indent=2) + "\n")
    for name in former - {*files, INDEX}:
        (folder / name).unlink()


def divide_files(arrays: Mapping[str, Array], *, max_bytes: float) -> dict[str, dict[str, Array]]:
    """Return the arrays of each file by the file's name, in the order of ``arrays``."""
    groups: list[dict[str, Array]] = [{}]
    size = 0
    for name, array in arrays.items():
        if groups[-1] and size + array.nbytes > max_bytes:
            groups.append({})
            size = 0
        groups[-1][name] = array
        size += array.nbytes
    if len(groups) == 1:
        return {WEIGHTS: groups[0]}
    return {f"model-{number:05}-of-{len(groups):05}.safetensors": group for number, group in enumerate(groups, start=1)}


def write_arrays(path: Path, arrays: Mapping[str, Array]) -> None:
    """Write one file."""
    from safetensors.numpy import save

    with outputs.replace(path) as file:
        file.write(save(dict(arrays), metadata={"format": "pt"}))
        file.flush()
        os.fsync(file.fileno())
