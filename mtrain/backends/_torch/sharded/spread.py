"""Build a model of which each rank keeps its part: an array is whole only while something works on it.

Every rank runs the whole construction, with the same generator, so the numbers are those of a model that is built whole.
What was not used for a while gives up its memory but for this rank's part; the next operation on it gathers it again.
"""

import gc
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from mtrain.backends._torch.collective import TorchCollective
from mtrain.backends._torch.internals import (
    TorchDispatchMode,
    changes_something,
    only_aliases,
    overwrites,
    storage_key,
    tensors_in,
    without_modes,
)
from mtrain.backends._torch.sharded.shards import Box
from mtrain.core.overriding import override
from mtrain.core.state import checks as state_checks
from mtrain.errors import TrainingError

LEAST_BYTES = 1 << 18
"""Smaller arrays stay whole until the model is split."""
ROOM_BYTES = 64 << 20
"""Arrays up to this size together stay whole; the newest one does whatever its size."""
_CHUNK_BYTES = 4 << 20
READ_DIRECTLY = frozenset(
    {"numpy", "__array__", "tolist", "data_ptr", "storage", "untyped_storage", "share_memory_", "__dlpack__"}
    | {"__reduce_ex__", "__deepcopy__"}
)
"""What reads memory without an operation of torch."""
SHOWN = frozenset({"__repr__", "__format__"})
"""What shows values, in operations of which no mode is told."""


class _Memory:
    """The memory of one array."""

    def __init__(self, number: int, storage: torch.UntypedStorage, item: int) -> None:
        self.number = number
        self.storage = weakref.ref(storage)
        self.size = storage.nbytes()
        self.item = item
        self.part: Tensor | None = None
        """This rank's bytes; None: the memory is whole."""
        self.digest = ""
        """Of the values, when the memory was last given up."""
        self.is_changed = True
        """Whether the values may be others since then."""
        self.is_taken = False
        """Whether ``part`` has become that of a weight."""

    def bytes(self) -> Tensor | None:
        """Return the whole memory as bytes; None: nothing refers to it any more."""
        storage = self.storage()
        return None if storage is None else torch.empty(0, dtype=torch.uint8).set_(storage)


class Spread(TorchDispatchMode):
    """While it is entered, large arrays on the host are spread over the ranks; every rank must do the same with them.

    Afterwards ``part`` and ``fill`` give what the model is split from.
    """

    def __init__(self, collective: TorchCollective, target: torch.device) -> None:
        """Spread over the ranks of ``collective``, which exchanges tensors on ``target``."""
        super().__init__()
        self._collective = collective
        self._target = target
        self._known: dict[int, _Memory] = {}
        self._by_number: dict[int, _Memory] = {}
        # Also of arrays that are gone: when a rank's collector frees them must not decide what is given up.
        self._recent: OrderedDict[int, int] = OrderedDict()
        self._count = 0
        self._reads = _DirectReads(self._show, self.fill_for_good)
        self._hook: Any = None

    @override
    def __enter__(self) -> "Spread":
        self._reads.__enter__()
        self._hook = nn.modules.module.register_module_parameter_registration_hook(self._adopt)
        super().__enter__()
        return self

    @override
    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._hook.remove()
        self._reads.__exit__(*error)

    @override
    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        with without_modes():
            if only_aliases(func):
                return func(*args, **(kwargs or {}))
            used = [memory for x in tensors_in((args, kwargs)) if (memory := self._of(x)) is not None]
            for memory in used:
                if memory.part is not None:
                    self._fill(memory, values=not self._is_overwritten(memory, func, args, used))
            result = func(*args, **(kwargs or {}))
            if changes_something(func):
                for memory in used:
                    memory.is_changed = True
            made = [memory for x in tensors_in(result) if (memory := self._of(x) or self._track(x)) is not None]
            self._make_room([*used, *made])
            return result

    def _is_overwritten(
        self, memory: _Memory, operation: object, args: tuple[Any, ...], used: Sequence[_Memory]
    ) -> bool:
        """Return whether an operation overwrites all of ``memory``, and reads nothing of it."""
        x = args[0]
        is_target = overwrites(operation) and self._of(x) is memory and used.count(memory) == 1
        return is_target and x.is_contiguous() and x.nbytes == memory.size

    def _of(self, x: object) -> _Memory | None:
        """Return the known memory of ``x``, which may also be of a class that adds nothing but names."""
        if not isinstance(x, Tensor) or not _has_memory(x):
            return None
        return self._known.get(storage_key(x))

    def _track(self, x: Tensor) -> _Memory | None:
        if not _is_plain(x):
            return None
        storage = x.untyped_storage()
        if storage.nbytes() < max(LEAST_BYTES, 1) or not storage.resizable():
            return None
        self._count += 1
        memory = _Memory(self._count, storage, x.element_size())
        key = storage_key(x)
        self._known[key] = self._by_number[memory.number] = memory
        weakref.finalize(storage, self._forget, key, memory).atexit = False
        return memory

    def _forget(self, key: int, memory: _Memory) -> None:
        if self._known.get(key) is memory:
            del self._known[key]
        self._by_number.pop(memory.number, None)

    def _adopt(self, module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        """Copy a parameter that lies in memory of others, such as a file's, when a module gets it."""
        if parameter is None or not _is_plain(parameter) or self._of(parameter) is not None:
            return
        if parameter.nbytes >= LEAST_BYTES:
            parameter.data = parameter.detach().clone()  # an operation that is watched

    def _make_room(self, used: Sequence[_Memory]) -> None:
        """Give up what was not used for the longest time."""
        for memory in used:
            if memory.number in self._by_number:
                self._recent[memory.number] = memory.size
                self._recent.move_to_end(memory.number)
        spared = {memory.number for memory in used}
        total = sum(self._recent.values())
        while total > ROOM_BYTES and (oldest := next(iter(self._recent))) not in spared:
            total -= self._recent.pop(oldest)
            if (unused := self._by_number.get(oldest)) is not None:
                self._give_up(unused)

    def _give_up(self, memory: _Memory) -> None:
        whole = memory.bytes()
        if whole is None or memory.part is not None or not whole.untyped_storage().resizable():
            return
        memory.size = whole.numel()  # An operation may have resized it.
        if memory.is_changed:
            # Memory that numpy has seen cannot be given up, so numpy gets copies.
            memory.digest = state_checks.fingerprint(("", x.clone().numpy()) for x in whole.split(_CHUNK_BYTES))
            memory.is_changed = False
        first, each = self._bounds(memory)
        part = whole.new_zeros(each)
        own = whole[first : first + each]
        part[: own.numel()] = own
        memory.part = part
        whole.untyped_storage().resize_(0)

    def _bounds(self, memory: _Memory) -> tuple[int, int]:
        """Return where this rank's bytes begin, and how many each rank has; those of the last ones are filled up."""
        each = -(-memory.size // memory.item // self._collective.size) * memory.item
        return self._collective.rank * each, each

    def _fill(self, memory: _Memory, *, values: bool = True) -> None:
        """Make memory whole again; without ``values``, its content does not matter."""
        storage, part = memory.storage(), memory.part
        assert storage is not None, "an operation has it"
        assert part is not None, "it was given up"
        if values:
            self._agree(f"{memory.number} {memory.size} {memory.digest}")
        storage.resize_(memory.size)
        memory.part = None
        if values:
            gathered = self._collective.all_gather_tensor(part.to(self._target)).reshape(-1)
            whole = memory.bytes()
            assert whole is not None, "an operation has it"
            whole.copy_(gathered[: memory.size])

    def _agree(self, what: str) -> None:
        """Refuse ranks that build something else than rank 0; every rank must call."""
        try:
            state_checks.check_equal_start(self._collective, what)
        except TrainingError as error:
            raise TrainingError(
                f"{error}. Each rank keeps a part of the arrays, so while the model is built, every rank must do the same with them: what "
                "one rank alone computes or prints of them, let all do, or do it later"
            ) from None

    # ------------------------------------------------------------------------------------------ after the construction
    def check_equal_start(self, model: nn.Module) -> None:
        """Refuse to start if ranks have built different weights; every rank must call.

        Raises:
            TrainingError: They have.
        """
        with self:  # A user's module may compute something for its state.
            entries = model.state_dict()
        for memory in list(self._by_number.values()):
            self._give_up(memory)
        taken = state_checks.Fingerprint()
        for name, x in entries.items():
            known = self._of(x)
            if known is None or known.part is None:
                taken.add(name, x.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
            else:
                taken.add(f"{name} {known.digest} {tuple(x.shape)} {x.stride()} {x.storage_offset()}", _NOTHING)
        self._agree(taken.digest)

    def is_spread(self, x: Tensor) -> bool:
        """Return whether the values of ``x`` are spread over the ranks."""
        memory = self._of(x)
        return memory is not None and memory.part is not None

    def part(self, x: Tensor, box: Box, *, is_even: bool) -> Tensor:
        """Return the elements of ``x`` in ``box``, in memory that nothing else uses; every rank must call.

        ``is_even``: all ranks ask for equal parts of the flattened array, one after the other.
        """
        memory = self._of(x)
        is_all = memory is not None and x.is_contiguous() and x.nbytes == memory.size
        lengths = [end - first for first, end in box]
        size = prod(lengths) * x.element_size()
        if is_even and is_all and memory is not None and memory.part is not None and memory.part.nbytes == size:
            own, memory.is_taken = memory.part if not memory.is_taken else memory.part.clone(), True
            return own.view(x.dtype).view(lengths)
        self.fill(x)
        return x.detach()[tuple(slice(first, end) for first, end in box)].clone(memory_format=torch.contiguous_format)

    def fill(self, x: Tensor) -> None:
        """Make the memory of ``x`` whole; every rank must call."""
        memory = self._of(x)
        if memory is not None and memory.part is not None:
            self._fill(memory)

    def _show(self, x: Tensor) -> None:
        """Make the memory of ``x`` whole until something else needs the room."""
        with without_modes():
            self.fill(x)
            if (memory := self._of(x)) is not None:
                self._make_room([memory])

    def fill_for_good(self, x: Tensor) -> None:
        """Make the memory of ``x`` whole, and leave it so."""
        with without_modes():
            self.fill(x)
        memory = self._of(x)
        if memory is not None:
            self._by_number.pop(memory.number, None)

    def fill_rest(self, split: Iterable[Tensor]) -> None:
        """Make everything whole but the memory of ``split``; every rank must call."""
        gc.collect()  # what is no longer used must be so on all ranks
        kept = {id(memory) for x in split if _is_plain(x) and (memory := self._of(x)) is not None}
        for memory in list(self._by_number.values()):
            if memory.part is not None and id(memory) not in kept and memory.storage() is not None:
                self._fill(memory)


_NOTHING: Any = torch.empty(0).numpy()


class _DirectReads(TorchFunctionMode):
    """Makes arrays whole before something reads their memory without an operation of torch."""

    def __init__(self, show: Callable[[Tensor], None], fill: Callable[[Tensor], None]) -> None:
        super().__init__()
        self._show = show
        self._fill = fill

    @override
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name in READ_DIRECTLY or name in SHOWN:
            for x in tensors_in(args):
                (self._show if name in SHOWN else self._fill)(x)
        return func(*args, **(kwargs or {}))


def _is_plain(x: Tensor) -> bool:
    """Return whether ``x`` is of torch's own classes, and has memory of its own on the host."""
    return type(x) in (Tensor, nn.Parameter) and _has_memory(x)


def _has_memory(x: Tensor) -> bool:
    is_wrapper = type(x).__torch_dispatch__ is not Tensor.__torch_dispatch__
    return not is_wrapper and x.device.type == "cpu" and x.layout == torch.strided
