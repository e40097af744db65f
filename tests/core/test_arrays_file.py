"""Files of arrays: the bytes that the safetensors library writes, made array by array, and mapped array by array."""

import gc
import os
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save

from mtrain.core.checkpoint import arrays_file
from mtrain.core.checkpoint.arrays_file import MappedArrays
from mtrain.core.interfaces import Array, Outline


def arrays() -> dict[str, Array]:
    """Every type, from none to three axes, also empty ones, and names that need escapes."""
    random = np.random.default_rng(0)
    drawn = {
        f'{kind} "{axes}"/ü \n\x01\x7f': np.array(random.standard_normal(random.integers(0, 5, size=axes)) * 99).astype(
            kind
        )
        for kind in arrays_file.TYPES.values()
        for axes in (0, 1, 2, 3)
    }
    return drawn | {"__metadata__": np.array([True, False]), "empty": np.ones((0, 3), np.float32)}


def outlines(of: dict[str, Array]) -> dict[str, Outline]:
    return {name: Outline(array.shape, array.dtype) for name, array in of.items()}


def file_bytes(of: dict[str, Array]) -> bytes:
    known = outlines(of)
    order = arrays_file.file_order(known)
    return arrays_file.header(known) + b"".join(
        arrays_file.contents((of[name] for name in order), (known[name] for name in order))
    )


def test_a_file_has_the_bytes_that_the_library_writes() -> None:
    for some in (arrays(), {}, {"a": np.zeros(0)}):
        assert file_bytes(some) == save({"/" + name: array for name, array in some.items()})


def test_mapped_arrays_are_those_that_were_written_and_cannot_be_changed(tmp_path: Path) -> None:
    path = tmp_path / "some.safetensors"
    path.write_bytes(file_bytes(arrays()))
    mapped = MappedArrays(path)
    path.unlink()
    assert mapped.keys() == arrays().keys()
    for name, expected in arrays().items():
        actual = mapped[name]
        assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape), name
        np.testing.assert_array_equal(actual, expected)
        assert actual.size == 0 or not actual.flags.writeable


def test_nothing_stays_mapped_or_open_of_arrays_that_were_dropped(tmp_path: Path) -> None:
    path = tmp_path / "big.safetensors"
    path.write_bytes(file_bytes({"a": np.ones(1 << 18), "b": np.ones(1 << 18)}))
    mapped = MappedArrays(path)
    assert sum(float(mapped[name].sum()) for name in mapped) == 1 << 19
    gc.collect()
    maps, opened = Path("/proc/self/maps"), Path("/proc/self/fd")
    assert str(path) not in maps.read_text()
    held = mapped["a"]
    assert str(path) in maps.read_text(), "the array is not a copy"
    del held, mapped
    gc.collect()
    assert str(path) not in [os.readlink(link) for link in opened.iterdir() if link.is_symlink()]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff" * 16,
        b"\x02\0\0\0\0\0\0\0{]",
        file_bytes({"a": np.ones(3)})[:-1],
        file_bytes({"a": np.ones(3)}) + b"0",
    ],
    ids=["empty", "a huge header", "no JSON", "cut", "longer"],
)
def test_another_file_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "bad.safetensors"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"bad\.safetensors"):
        MappedArrays(path)


def test_a_type_that_files_cannot_hold_is_named() -> None:
    with pytest.raises(TypeError, match="w: arrays of type object cannot be saved; expected one of U64, I64"):
        arrays_file.header({"w": Outline((1,), np.dtype(object))})
