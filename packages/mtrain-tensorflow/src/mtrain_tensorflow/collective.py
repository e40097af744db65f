"""Communication among the ranks of a script that trains with Horovod and TensorFlow."""

from typing import Any, Literal, TypeVar

import numpy as np
import tensorflow as tf

from mtrain.core.ranks.serialization import pack, unpack

T = TypeVar("T")


class TensorflowCollective:
    """``core.interfaces.Collective`` over the ranks of ``hvd.init()``, for values on the host."""

    def __init__(self, hvd: Any) -> None:
        self._hvd = hvd
        self.rank: int = hvd.rank()
        self.size: int = hvd.size()

    def all_reduce(self, x: Any, op: Literal["sum", "mean", "max"]) -> Any:
        """See ``Collective.all_reduce``."""
        array = np.asarray(x)
        tensor = tf.convert_to_tensor(array)
        # Horovod pairs the calls of ranks by name; those of the script's own have other names, so it never takes one for the other.
        name = f"mtrain.{op}.{array.dtype}.{array.shape}"
        total = self._hvd.allreduce(tensor, op=self._hvd.Max if op == "max" else self._hvd.Sum, name=name).numpy()
        return total / self.size if op == "mean" else total

    def all_gather(self, value: T) -> list[T]:
        """See ``Collective.all_gather``."""
        payload = np.frombuffer(pack(value), dtype=np.uint8)
        # Horovod joins arrays of different lengths, but does not say where each ends.
        sizes = self._hvd.allgather(tf.constant([payload.size]), name="mtrain.objects.sizes").numpy()
        gathered = self._hvd.allgather(tf.convert_to_tensor(payload), name="mtrain.objects").numpy()
        return [unpack(part.tobytes()) for part in np.split(gathered, np.cumsum(sizes)[:-1])]


class Alone:
    """``core.interfaces.Collective`` of a single process, with or without Horovod."""

    rank = 0
    size = 1

    def all_reduce(self, x: Any, op: Literal["sum", "mean", "max"]) -> Any:
        """See ``Collective.all_reduce``."""
        return np.array(x)

    def all_gather(self, value: T) -> list[T]:
        """See ``Collective.all_gather``."""
        return [value]
