"""What a script keeps in checkpoints beside its models: states that are equal on all ranks, those of each rank, and rows of samples."""

import base64
import hashlib
import json
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

import numpy as np

from mtrain.core.collective import broadcast, gather_on_first
from mtrain.core.interfaces import Array, Collective
from mtrain.core.samples.permutation import Indices
from mtrain.core.samples.sampler import Shares
from mtrain.data import trees
from mtrain.errors import CheckpointError, ScriptError

LARGEST_BYTES = 16 * 1024 * 1024
"""Largest array that is kept. Larger state belongs into the model, whose arrays are stored in a format of their own."""
OBJECTS = (
    "an object with state_dict() and load_state_dict(state), a dict, a list, an array, a tensor, or a generator of torch, "
    "numpy or random"
)
"""What may be kept, for messages."""
TAKEN = "numbers, text, bytes, None, arrays, tensors, generators of torch, numpy and random, and lists, tuples and dicts of these"
"""What a kept state may hold, for messages."""
BIT_GENERATORS = frozenset({"MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64"})
RANKS, ROWS, WHOLE = "ranks", "rows", "whole"
"""Keys of a state in a checkpoint that is each rank's own, or whose rows belong to samples. Any other state is that of all ranks."""
Tensors = Callable[[Array], Any]


class KeptObjects:
    """The objects that a script keeps, by name. Every rank keeps the same names."""

    def __init__(
        self, collective: Collective, saved: Mapping[str, Any] | None, tensor: Tensors, *, warn: Callable[..., None]
    ) -> None:
        """``saved``: the states in the checkpoint that is resumed, None: there is none. ``tensor`` turns an array into a tensor.

        ``warn`` is called with ``message``.
        """
        self._collective, self._saved, self._tensor, self._warn = collective, saved, tensor, warn
        self.samples = 0
        """Samples of the last update, over all ranks."""
        self._objects: dict[str, Any] = {}
        self._rows: dict[str, tuple[int, Shares]] = {}
        """The axis of the rows, and how a global batch is divided, of what has rows."""
        self._own: set[str] = set()
        """Names of states that were seen to differ between ranks."""

    def keep(self, name: str, kept_object: Any, *, rows: int | None = None, shares: Shares | None = None) -> None:
        """See ``Session.keep``; ``shares``: which part of an update this rank computes."""
        call = f"session.keep({name!r})"
        if name in self._objects:
            raise ScriptError(f"{call}: this name is taken; give each object a name of its own")
        if not _may_be_kept(kept_object):
            raise ScriptError(f"{call}: an object of type {type(kept_object).__name__} given; expected {OBJECTS}")
        state = _state_of(kept_object)
        plain = as_plain(state, name=name)
        if rows is not None:
            if isinstance(rows, bool) or not isinstance(rows, int) or rows < 0:
                raise ScriptError(f"{call}: rows={rows!r} given; expected the axis of the samples, 0 or above")
            if shares is None:
                raise ScriptError(
                    f"{call}: rows={rows} needs to know how an update is divided; call it after session.prepare"
                )
            _count_rows(plain, rows, call)
            self._rows[name] = rows, shares
        if self._saved is not None:
            _restore(
                kept_object,
                state,
                _part_of_rank(self._saved, name, self._collective, self._rows.get(name)),
                self._tensor,
                call,
            )
        self._objects[name] = kept_object

    def states(self) -> dict[str, Any]:
        """Return what a checkpoint holds of all objects; every rank must call. On ranks other than 0 parts are left out.

        Raises:
            ScriptError: a state cannot be stored, rank 0 lacks one, or rows are not as many as a rank's samples; raised on every rank.
        """
        states: dict[str, Any] = {}
        problem = ""
        try:
            states = {name: as_plain(_state_of(item), name=name) for name, item in self._objects.items()}
        except ScriptError as error:
            problem = str(error)
        # Digests and not the states: they are gathered from all ranks at each save.
        own = {name: hashlib.sha256(json.dumps(state).encode()).digest() for name, state in states.items()}
        axes = {name: axis for name, (axis, _) in self._rows.items()}
        problems, digests_of, axes_of = zip(*self._collective.all_gather((problem, own, axes)), strict=True)
        if problem := next(filter(None, problems), ""):
            raise ScriptError(problem)
        first, *others = digests_of
        for rank, digests in enumerate(others, 1):
            if unknown := next((name for name in digests if name not in first), None):
                raise ScriptError(
                    f"session.keep: the state of {unknown!r} on rank {rank} is kept, and rank 0 keeps none; keep the same names on every "
                    "rank"
                )
            # Rows are joined by all ranks together.
            if differing := sorted(dict(axes_of[0].items() ^ axes_of[rank].items())):
                raise ScriptError(
                    f"session.keep({differing[0]!r}): rows={axes_of[0].get(differing[0])} on rank 0, and "
                    f"rows={axes_of[rank].get(differing[0])} or no such name on rank {rank}; keep it with the same rows= on every rank"
                )
        for name in first:
            if name in self._rows:
                states[name] = self._join_ranks(name, states[name])
            elif any(digests.get(name, first[name]) != first[name] for digests in others):
                self._tell_own(name)
                states[name] = {RANKS: gather_on_first(self._collective, states.get(name))}
        return states

    def _join_ranks(self, name: str, state: Any) -> Any:
        """Return a state with the rows of all ranks, in the order of the global batch; every rank must call."""
        axis, shares = self._rows[name]
        parts = gather_on_first(self._collective, state)
        whole, problem = None, ""
        if parts:
            try:
                counts = [_count_rows(part, axis, "") for part in parts]
                whole = _join(parts, axis, _places_of(counts, shares, self.samples))
            except ScriptError as error:
                problem = str(error)
        if problem := broadcast(self._collective, problem):
            raise ScriptError(f"session.keep({name!r}, rows={axis}): {problem}")
        return {ROWS: axis, WHOLE: whole}

    def _tell_own(self, name: str) -> None:
        """Say once that a state belongs to each rank, since a mistake may have made it differ."""
        if name not in self._own:
            self._own.add(name)
            self._warn(
                message=f"session.keep: the state of {name!r} differs between ranks, so each rank's own is saved, and the job can be "
                f"resumed on {self._collective.size} ranks alone; where its rows belong to samples, give rows=0"
            )


def _part_of_rank(saved: Mapping[str, Any], name: str, collective: Collective, rows: tuple[int, Shares] | None) -> Any:
    """Return the part of this rank of a state in a checkpoint.

    Raises:
        CheckpointError: there is none of this name, it has other rows, or it is that of another number of ranks.
    """
    call = f"session.keep({name!r})"
    if name not in saved:
        raise CheckpointError(
            f"{call}: the checkpoint has no state of that name; it has {', '.join(saved) or 'none'}. "
            "Start a new run, or use the name of the script that wrote it"
        )
    state = saved[name]
    kept = state if isinstance(state, Mapping) else {}
    axis = None if rows is None else rows[0]
    if kept.get(ROWS) != axis:
        raise CheckpointError(
            f"{call}: rows={axis} given, and the checkpoint was written with rows={kept.get(ROWS)}; use the script that wrote it, or start "
            "a new run"
        )
    if RANKS in kept:
        if len(kept[RANKS]) != collective.size:
            raise CheckpointError(
                f"{call}: the checkpoint holds a state for each of {len(kept[RANKS])} ranks, which differ, and this job has "
                f"{collective.size} ranks; resume it with --nproc-per-node {len(kept[RANKS])} in all, or start a new run whose state is "
                "kept by the rows of samples (rows=0) or is equal on all ranks"
            )
        return kept[RANKS][collective.rank]
    return state if rows is None else _share_of(kept[WHOLE], *rows)


# ------------------------------------------------------------------------------------------------------------ objects
def _may_be_kept(value: Any) -> bool:
    has_state = hasattr(value, "state_dict") and hasattr(value, "load_state_dict")
    return (
        has_state or isinstance(value, dict | list | np.ndarray) or _is_tensor(value) or _generator(value) is not None
    )


def _is_tensor(value: Any) -> bool:
    return hasattr(value, "detach") and hasattr(value, "numpy")


def _state_of(kept_object: Any) -> Any:
    """Return the state of an object; for one without methods for that it is the object itself."""
    return kept_object.state_dict() if hasattr(kept_object, "load_state_dict") else kept_object


def _restore(kept_object: Any, former: Any, plain: Any, tensor: Tensors, call: str) -> None:
    """Give an object the state ``plain``; ``former``: its state of now."""
    state = from_plain(plain, tensor, former=former)
    if hasattr(kept_object, "load_state_dict"):
        kept_object.load_state_dict(state)
        return
    kind = next((kind for kind in (dict, list, np.ndarray) if isinstance(kept_object, kind)), type(kept_object))
    if not isinstance(state, kind) or getattr(state, "shape", None) != getattr(kept_object, "shape", None):
        given, found = (
            f"{type(x).__name__} {tuple(getattr(x, 'shape', ())) or ''}".rstrip() for x in (kept_object, state)
        )
        raise CheckpointError(
            f"{call}: a {given} given, and the checkpoint has a {found}; keep the same object as the script that wrote it"
        )
    if isinstance(kept_object, dict):
        kept_object.clear()
        kept_object.update(state)
    elif isinstance(kept_object, list):
        kept_object[:] = state
    elif isinstance(kept_object, np.ndarray):
        kept_object[...] = state
    elif _is_tensor(kept_object):
        _ = kept_object.detach().copy_(state) if hasattr(kept_object, "copy_") else kept_object.set_value(state)
    elif state is not kept_object:
        raise CheckpointError(
            f"{call}: the checkpoint has a generator of another kind; keep the same one as the script that wrote it"
        )


def _generator(value: Any) -> tuple[str, Any] | None:
    """Return (kind, state) of a generator of random numbers; None: it is none that can be made again."""
    torch = sys.modules.get("torch")
    if type(value) is random.Random:
        return "random", value.getstate()
    if type(value) is np.random.RandomState:
        return "numpy", value.get_state(legacy=False)
    if type(value) is np.random.Generator and type(value.bit_generator).__name__ in BIT_GENERATORS:
        return type(value.bit_generator).__name__, value.bit_generator.state
    if torch is not None and isinstance(value, torch.Generator):
        return f"torch:{value.device.type}", value.get_state()
    return None


def _set_generator(kind: str, state: Any, former: Any) -> Any:
    """Return a generator with a state: ``former`` itself if it is of this kind, since the script may hold it elsewhere."""
    known = _generator(former)
    made = former if known is not None and known[0] == kind else None
    if kind == "random":
        made = made or random.Random()
        made.setstate(state)
    elif kind == "numpy":
        made = made or np.random.RandomState()
        made.set_state(state)
    elif kind in BIT_GENERATORS:
        made = made or np.random.Generator(getattr(np.random, kind)())
        made.bit_generator.state = state
    else:
        torch = sys.modules["torch"]
        made = made or torch.Generator(device=kind.partition(":")[2])
        made.set_state(torch.from_numpy(state))
    return made


# ------------------------------------------------------------------------------------------------------- plain values
def as_plain(value: Any, *, name: str) -> Any:
    """Return a state as values that JSON can hold.

    Raises:
        ScriptError: it holds something else than numbers, text, arrays, generators and containers of these.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {"dict": [[as_plain(key, name=name), as_plain(item, name=name)] for key, item in value.items()]}
    if isinstance(value, list | tuple):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [as_plain(item, name=name) for item in value]}
    if (generator := _generator(value)) is not None:
        return {"generator": [generator[0], as_plain(generator[1], name=name)]}
    array = np.frombuffer(value, np.uint8) if type(value) is bytes else trees.as_array(value)
    if array is None or array.dtype.kind in "OV":
        raise ScriptError(f"session.keep({name!r}): its state holds a {type(value).__name__}; expected {TAKEN}")
    if array.nbytes > LARGEST_BYTES:
        raise ScriptError(
            f"session.keep({name!r}): its state holds an array of {array.nbytes / 2**20:.0f} MiB; at most "
            f"{LARGEST_BYTES >> 20} MiB are kept: make it a buffer of the model"
        )
    if type(value) is bytes:
        return {"bytes": base64.b64encode(value).decode()}
    kind = "numpy" if isinstance(value, np.ndarray) else "scalar" if isinstance(value, np.generic) else "tensor"
    return {
        **_plain_array(array),
        "tensor": kind == "tensor",
        "scalar": kind == "scalar",
        # numpy has no bfloat16, so it is stored as float32, which has all its values.
        **({"bfloat16": True} if "bfloat16" in str(value.dtype) else {}),
    }


def _plain_array(array: Array) -> dict[str, Any]:
    content = base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()
    return {"array": [array.dtype.str, list(array.shape), content]}


def _array_of(value: Mapping[str, Any]) -> Array:
    dtype, shape, content = value["array"]
    return np.frombuffer(base64.b64decode(content), dtype=np.dtype(dtype)).reshape(shape).copy()


def from_plain(value: Any, tensor: Tensors, *, former: Any = None) -> Any:
    """Return the value from which ``as_plain`` made ``value``; ``tensor`` turns an array into a tensor.

    Generators that are at the same place in ``former`` get their states and are in the result themselves.
    """
    if not isinstance(value, Mapping):
        return value
    if "dict" in value:
        before = former if isinstance(former, Mapping) else {}
        pairs = ((from_plain(key, tensor), item) for key, item in value["dict"])
        return {key: from_plain(item, tensor, former=before.get(key)) for key, item in pairs}
    if "array" in value:
        array = _array_of(value)
        if value.get("scalar"):
            return array[()]
        made: Any = tensor(array) if value["tensor"] else array
        return made.bfloat16() if value.get("bfloat16") else made
    if "bytes" in value:
        return base64.b64decode(value["bytes"])
    if "generator" in value:
        kind, state = value["generator"]
        return _set_generator(kind, from_plain(state, lambda array: array), former)
    items = value["tuple"] if "tuple" in value else value["list"]
    places = former if isinstance(former, list | tuple) and len(former) == len(items) else [None] * len(items)
    found = [from_plain(item, tensor, former=place) for item, place in zip(items, places, strict=True)]
    return tuple(found) if "tuple" in value else found


# --------------------------------------------------------------------------------------------------------------- rows
def _leaves(plain: Any) -> list[Any]:
    """Return the arrays and other single values of a plain state, in order."""
    if isinstance(plain, Mapping) and (
        inner := next((plain[kind] for kind in ("dict", "list", "tuple") if kind in plain), None)
    ):
        items = [part for pair in inner for part in pair] if "dict" in plain else inner
        return [leaf for item in items for leaf in _leaves(item)]
    return [plain]


def _arrays(plain: Any) -> list[Any]:
    return [leaf for leaf in _leaves(plain) if isinstance(leaf, Mapping) and "array" in leaf]


def _count_rows(plain: Any, axis: int, call: str) -> int | None:
    """Return the number of rows of all arrays of a state; None: it has no array.

    Raises:
        ScriptError: arrays have different numbers, or not as many axes.
    """
    shapes = [array["array"][1] for array in _arrays(plain)]
    counts = {shape[axis] if len(shape) > axis else None for shape in shapes}
    if len(counts) > 1 or None in counts:
        raise ScriptError(
            f"{call}{': ' if call else ''}arrays of shapes {', '.join(str(tuple(shape)) for shape in shapes)} given; expected as many rows "
            f"along axis {axis} in each"
        )
    return counts.pop() if counts else None


def _places(shares: Shares, total: int, rank: int) -> Indices:
    """Return which rows of ``total`` belong to a rank, in the order in which it has them: one micro batch after the other."""
    return np.concatenate(replace(shares, rank=rank).spread(np.arange(total)))


def _places_of(counts: Sequence[int | None], shares: Shares, samples: int) -> list[Indices] | None:
    """Return which rows each rank has; None: there are none.

    Raises:
        ScriptError: the ranks have other numbers of rows than of samples.
    """
    if not any(counts):
        return None
    # Of the last update first: a rank without a sample has one of another rank's, which would be counted twice.
    for total in (samples, sum(count or 0 for count in counts)):
        places = [_places(shares, total, rank) for rank in range(len(counts))]
        if total and [len(place) for place in places] == list(counts):
            return places
    raise ScriptError(
        f"the ranks have {', '.join(map(str, counts))} rows; expected as many as each has samples, as session.batches divides them"
    )


def _join(parts: Sequence[Any], axis: int, places: Sequence[Indices] | None) -> Any:
    """Return one plain state of those of all ranks.

    Raises:
        ScriptError: they differ in something else than the rows of arrays.
    """
    leaves = [_leaves(part) for part in parts]
    kinds = [json.dumps([_without_rows(leaf, axis) for leaf in each]) for each in leaves]
    if any(kind != kinds[0] for kind in kinds):
        raise ScriptError(
            "the states differ between ranks in more than their rows; keep what else is each rank's own under another name"
        )
    # Into the part of rank 0, of which each array is read before it is replaced.
    for number, leaf in enumerate(leaves[0]):
        if places is not None and isinstance(leaf, dict) and "array" in leaf:
            arrays = [np.moveaxis(_array_of(each[number]), axis, 0) for each in leaves]
            out = np.empty(
                (max(int(place.max()) for place in places if len(place)) + 1, *arrays[0].shape[1:]), arrays[0].dtype
            )
            for place, array in zip(places, arrays, strict=True):
                out[place] = array
            leaf.update(_plain_array(np.moveaxis(out, 0, axis)))
    return parts[0]


def _without_rows(leaf: Any, axis: int) -> Any:
    if not isinstance(leaf, Mapping) or "array" not in leaf:
        return leaf
    dtype, shape, _ = leaf["array"]
    return {**leaf, "array": [dtype, [*shape[:axis], *shape[axis + 1 :]]]}


def _share_of(whole: Any, axis: int, shares: Shares) -> Any:
    """Return the part of a joined state whose rows are those of this rank's samples."""
    part: Any = deepcopy(whole)
    for leaf in _arrays(part):
        array = _array_of(leaf)
        leaf.update(_plain_array(np.take(array, _places(shares, array.shape[axis], shares.rank), axis)))
    return part
