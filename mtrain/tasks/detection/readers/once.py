"""Let the ranks of a host share the annotations that a reader returns, where there are many images."""

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

from mtrain.core.interfaces import SplitRequest
from mtrain.data.once_per_host import Form, read_once
from mtrain.tasks.detection.annotations import Annotations, from_arrays

LEAST_IMAGES = 1000
"""Fewer images are read by each rank: they take no second, and no memory to speak of."""
Reader = TypeVar("Reader", bound=Any)


def _taken_apart(annotations: Annotations) -> Any:
    return None if len(annotations) < LEAST_IMAGES else (annotations.arrays, annotations.facts)


FORM = Form(take_apart=_taken_apart, put_together=from_arrays)


def once_per_host(read: Callable[[Reader, SplitRequest], Annotations]) -> Callable[[Reader, SplitRequest], Annotations]:
    """Let one rank of each host run ``read``, a method of a reader, and the others map what it has returned."""

    @wraps(read)
    def read_shared(self: Reader, request: SplitRequest) -> Annotations:
        key = f"{type(self).__module__}.{type(self).__qualname__} {self.options!r} {request!r}"
        return read_once(lambda: read(self, request), key=key, form=FORM)

    return read_shared
