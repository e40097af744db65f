"""Pictures and histograms that a script shows in the reports of its job."""

import io
import re
from pathlib import Path
from typing import Any

import numpy as np

from mtrain.core.interfaces import Array
from mtrain.data import trees
from mtrain.errors import ScriptError
from mtrain.spec import outputs

FOLDER = "images"
CHANNELS = (1, 3, 4)
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*(/[A-Za-z0-9_][A-Za-z0-9_.-]*)*")
EXPECTED = (
    "expected an array (height, width), (height, width, channels) or (channels, height, width) with 1, 3 or 4 channels, numbers from "
    "0 to 1 or bytes, an image of Pillow, or a figure of matplotlib"
)


def write(run: Path, name: str, picture: Any, *, update: int) -> str:
    """Write a picture into the run folder; return the name of its file there.

    Raises:
        ScriptError: the name or the picture cannot be used, or the file cannot be written.
    """
    check_name(name, call="session.image")
    file = f"{FOLDER}/{name.replace('/', '.')}-{update:08d}.png"
    content = png_of(picture, name=name)
    try:
        outputs.make_folder(run / FOLDER)
        outputs.write_bytes(run / file, content)
    except OSError as error:
        raise ScriptError(
            f"session.image({name!r}): {run / file} cannot be written: {error.strerror or error}"
        ) from error
    return file


def check_name(name: Any, *, call: str) -> None:
    """Refuse what is no name.

    Raises:
        ScriptError: it has other signs than names have.
    """
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise ScriptError(
            f"{call}({name!r}): expected a name of letters, digits, '_', '-', '.' and '/', such as 'samples/fixed'"
        )


def png_of(picture: Any, *, name: str) -> bytes:
    """Return a picture as the content of a PNG file.

    Raises:
        ScriptError: it is none.
    """
    buffer = io.BytesIO()
    if hasattr(picture, "savefig"):
        picture.savefig(buffer, format="png")
    elif hasattr(picture, "getbands"):
        picture.save(buffer, format="png")
    else:
        from PIL import Image

        Image.fromarray(_bytes_of(picture, name=name)).save(buffer, format="png")
    return buffer.getvalue()


def _bytes_of(picture: Any, *, name: str) -> Array:
    """Return a picture as bytes, (height, width) or (height, width, 3 or 4)."""
    array = trees.as_array(picture)
    if array is None or not array.size or array.dtype.kind not in "bfiu":
        given = type(picture).__name__ if array is None else f"an array of {array.dtype} with shape {array.shape}"
        raise ScriptError(f"session.image({name!r}): {given} given; {EXPECTED}")
    if array.ndim == 3 and array.shape[2] not in CHANNELS and array.shape[0] in CHANNELS:
        array = array.transpose(1, 2, 0)
    if array.ndim not in (2, 3) or (array.ndim == 3 and array.shape[2] not in CHANNELS):
        raise ScriptError(f"session.image({name!r}): an array of shape {array.shape} given; {EXPECTED}")
    if array.dtype.kind in "bf":
        array = np.rint(np.clip(np.nan_to_num(array.astype(np.float64)), 0, 1) * 255)
    elif array.min() < 0 or array.max() > 255:
        raise ScriptError(
            f"session.image({name!r}): whole numbers from {array.min()} to {array.max()} given; {EXPECTED}"
        )
    array = np.ascontiguousarray(array.astype(np.uint8))
    return array[:, :, 0] if array.ndim == 3 and array.shape[2] == 1 else array


def count_values(name: str, values: Any, *, bins: int) -> tuple[list[int], list[float]]:
    """Return the counts of values between neighbouring edges, and the edges.

    Raises:
        ScriptError: there are no finite numbers among them, or the name cannot be used.
    """
    check_name(name, call="session.histogram")
    array = trees.as_array(values)
    numbers = np.empty(0) if array is None or array.dtype.kind not in "bfiu" else array.astype(np.float64).ravel()
    numbers = numbers[np.isfinite(numbers)]
    if not numbers.size or isinstance(bins, bool) or not isinstance(bins, int) or bins < 1:
        raise ScriptError(
            f"session.histogram({name!r}): {type(values).__name__} with {numbers.size} finite numbers and bins={bins!r} given; expected an "
            "array or tensor with one at least, and 1 range or more"
        )
    counts, edges = np.histogram(numbers, bins=bins)
    return [int(count) for count in counts], [float(edge) for edge in edges]
