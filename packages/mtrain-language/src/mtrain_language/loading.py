"""Let transformers read a model's weights array by array, each into memory of its own."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

IN_TURN = "HF_DEACTIVATE_ASYNC_LOAD"
"""Variable with which transformers reads no array before the former one is in the model."""


@contextmanager
def array_by_array() -> Iterator[None]:
    """Have transformers read one array after the other, and not map the files, while inside."""
    from transformers import modeling_utils

    former, opened = os.environ.get(IN_TURN), vars(modeling_utils).get("safe_open")
    # transformers' threads would read the whole model ahead, and pages of a mapped file count as memory of the process:
    # both would be there on each rank, however many share the model.
    os.environ[IN_TURN] = "1"
    if opened is not None:
        # A release that opens files in another way has no such name, and reads as it does.
        vars(modeling_utils)["safe_open"] = partial(_open, opened)
    try:
        yield
    finally:
        if opened is not None:
            vars(modeling_utils)["safe_open"] = opened
        if former is None:
            del os.environ[IN_TURN]
        else:
            os.environ[IN_TURN] = former


def _open(open_file: object, *arguments: object, **options: object) -> object:
    assert callable(open_file)
    if "backend" in options:  # Older releases do not give it, and older safetensors do not know it.
        options["backend"] = "pread"
    return open_file(*arguments, **options)
