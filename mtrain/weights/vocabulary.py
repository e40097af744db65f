"""The names that a pickle of weights may mention, and the pure functions that replace them; others are refused."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mtrain.core.interfaces import Array
from mtrain.weights.arrays import PickledArray, PickledDtype, TorchTensor, numeric
from mtrain.weights.pickles import MEMBER, Inert, Name, Refused, member

_NUMPY_ARRAYS = ("numpy.core.multiarray", "numpy._core.multiarray")
_NUMPY_BUFFERS = ("numpy.core.numeric", "numpy._core.numeric")
_BUILTINS = ("builtins", "__builtin__")
_ENCODE = Name("_codecs", "encode")
_ENUMS = frozenset(
    {Name("deepspeed.runtime.zero.config", "ZeroStageEnum"), Name("mmengine.logging.history_buffer", "HistoryBuffer")}
)
_INERT = re.compile(
    r"torch\.nn\.modules\.[a-z_]+ [A-Za-z_]\w*"
    r"|torch\.nn\.backends\.thnn _get_thnn_function_backend"  # an attribute of every module before torch 1.4
    r"|torch\.nn\.parameter (Parameter|Buffer)"
    r"|torch (Size|Tensor|device|[A-Z][A-Za-z0-9]*Storage|u?int\d+|b?float\d+|double|half|bool|complex\d+|strided|contiguous_format)"
    r"|torch\.storage (Untyped|Typed|_Untyped|_Typed)Storage"
    r"|models\.(yolo|common|experimental) [A-Za-z_]\w*"
    r"|pathlib (Pure)?(Posix|Windows)?Path"
    r"|argparse Namespace"
    r"|deepspeed\.(runtime|utils|checkpoint)(\.\w+)* [A-Za-z_]\w*"  # loss scalers and places of fragments, in its checkpoints
    r"|(pytorch_lightning|lightning)(\.\w+)+ AttributeDict"
    r"|mmengine\.logging\.history_buffer HistoryBuffer"
    r"|numpy ndarray"
    r"|(__builtin__|builtins) object"
)
"""Matches ``module name`` of classes whose objects become records without behaviour: layers of torch and of YOLOv5."""


@dataclass(frozen=True, slots=True)
class WeightsVocabulary:
    """The ``pickles.Vocabulary`` of files of weights; each file needs its own."""

    _texts: dict[int, tuple[str, bytes]] = field(default_factory=dict)
    """Maps the id of a text to the text and its bytes, so that a text that is used often is encoded once."""

    def check(self, name: Name) -> None:
        """Refuse names that are not listed; a dotted name, which would walk through attributes, never is."""
        if (
            name not in {_ENCODE, *MEMBER, *_ENUMS}
            and (name.module, name.name) not in _FUNCTIONS
            and not _INERT.fullmatch(f"{name.module} {name.name}")
        ):
            raise Refused(f"the name {name}", name=name)

    def make(self, name: Name, arguments: tuple[Any, ...]) -> Any:
        """Return a value for a listed function, or a record for a listed class."""
        if name in MEMBER:
            return member(name, arguments, of=_ENUMS)
        function = self._encode if name == _ENCODE else _FUNCTIONS.get((name.module, name.name))
        if function is None:
            return Inert(name)
        try:
            return function(*arguments)
        except (TypeError, ValueError, IndexError, OverflowError, MemoryError) as error:
            raise Refused(f"{name} with arguments that it does not take ({type(error).__name__})") from error

    def _encode(self, text: object, encoding: object = "latin1") -> bytes:
        """Decode ``bytes``, which Python 3 writes as latin-1 text under protocol 2."""
        if not isinstance(text, str) or encoding not in ("latin1", "latin-1"):
            raise Refused("_codecs.encode of something else than latin-1 text")
        if id(text) not in self._texts:
            self._texts[id(text)] = (text, text.encode("latin-1"))
        return self._texts[id(text)][1]


def _empty_dict(*arguments: object) -> dict[Any, Any]:
    """Return an empty dictionary; its entries follow in the pickle. The factory of a ``defaultdict`` is ignored."""
    if any(isinstance(argument, list | tuple | dict) for argument in arguments):
        raise Refused("collections.OrderedDict with content, as Python 2 wrote it; save the file again with Python 3")
    return {}


def _same(items: object = ()) -> Any:
    """Return a tuple unchanged, and a set as the list of its members."""
    # Nothing is copied, because a pickle can name one list many times.
    if not isinstance(items, list | tuple):
        raise Refused("a tuple or set of something that is no list")
    return items


def _bytes(*arguments: object) -> bytes:
    """Return empty ``bytes``, which Python 3 writes as a call without arguments under protocol 2."""
    if arguments:
        raise Refused("builtins.bytes with arguments")
    return b""


def _dtype(text: object, *_: object) -> PickledDtype:
    return PickledDtype(numeric(text))


def _empty_array(*_: object) -> PickledArray:
    """Return an empty array, to which a BUILD instruction adds shape, type and content."""
    return PickledArray()


def _scalar(dtype: object, content: object) -> Array:
    if not isinstance(dtype, PickledDtype) or not isinstance(content, bytes):
        raise Refused("a numpy scalar without type or content")
    if len(content) != dtype.dtype.itemsize:
        raise Refused("a numpy scalar of another size than its type")
    return np.frombuffer(content, dtype.dtype).reshape(())


def _array_from_buffer(content: object, dtype: object, shape: object, order: object = "C") -> PickledArray:
    array = PickledArray()
    array.build((1, shape, dtype, order == "F", content))
    return array


def _parameter(tensor: object, *_: object) -> Any:
    return tensor


def _tensor_with_attributes(function: object, _kind: object, arguments: object, *_: object) -> TorchTensor:
    """Return a tensor to which attributes were given, such as ZeRO 3's numbers of parameters; these are left out."""
    if not isinstance(function, Name) or _FUNCTIONS.get((function.module, function.name)) != TorchTensor.of:
        raise Refused("a tensor that is made by a function which is not torch's own")
    if not isinstance(arguments, tuple):
        raise Refused("a tensor without storage")
    tensor: TorchTensor = TorchTensor.of(*arguments)
    return tensor


_FUNCTIONS: dict[tuple[str, str], Callable[..., Any]] = {
    ("collections", "OrderedDict"): _empty_dict,
    ("collections", "defaultdict"): _empty_dict,
    ("numpy", "dtype"): _dtype,
    ("torch", "Size"): _same,
    ("torch._tensor", "_rebuild_from_type_v2"): _tensor_with_attributes,
    ("torch._utils", "_rebuild_tensor"): TorchTensor.of,
    ("torch._utils", "_rebuild_tensor_v2"): TorchTensor.of,
    ("torch._utils", "_rebuild_parameter"): _parameter,
    ("torch._utils", "_rebuild_parameter_with_state"): _parameter,
    **{(module, "_reconstruct"): _empty_array for module in _NUMPY_ARRAYS},
    **{(module, "scalar"): _scalar for module in _NUMPY_ARRAYS},
    **{(module, "_frombuffer"): _array_from_buffer for module in _NUMPY_BUFFERS},
    **{(module, name): _same for module in _BUILTINS for name in ("set", "frozenset", "tuple")},
    **{(module, "bytes"): _bytes for module in _BUILTINS},
}
