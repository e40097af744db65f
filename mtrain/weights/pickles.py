"""Read pickles as data: an interpreter that builds plain values and inert records, and never imports or calls anything.

A pickle is a program for a small stack machine whose GLOBAL and REDUCE instructions import and call whatever they name.
Here GLOBAL yields a ``Name``, which must be in a fixed list (``vocabulary.py``), and REDUCE looks the name up in a
table of mtrain's own pure functions. Instructions that no writer of weights uses (those of protocols 0 and 1, INST,
OBJ, EXT, ...) are refused.
"""

import pickletools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from io import BytesIO
from typing import Any, Protocol

_SHOWN = 120
"""Number of characters of a name that a message repeats."""
MAX_INSTRUCTIONS = 1_000_000
"""Largest number of instructions in a pickle.

A network of 1,000 arrays needs some 30,000; each instruction may take 100 bytes of memory or more.
"""


class Refused(Exception):
    """A pickle contains something that files of weights do not need, or is damaged; the message names it.

    ``name``: the name that was refused, where that is the reason.
    """

    def __init__(self, message: str, *, name: "Name | None" = None) -> None:
        super().__init__(message)
        self.name = name


@dataclass(frozen=True, slots=True)
class Name:
    """A name ``module.name`` from a pickle, which is never resolved."""

    module: str
    name: str

    def __str__(self) -> str:
        return ascii(f"{self.module}.{self.name}")[1:-1][:_SHOWN]


@dataclass(slots=True, eq=False)
class Inert:
    """A record of a pickled object: the name of its class and its stored attributes, without any behaviour."""

    kind: Name
    state: Mapping[Any, Any] = field(default_factory=dict)


MEMBER = frozenset(Name(module, "getattr") for module in ("builtins", "__builtin__"))
"""What Python 3.11.0 to 3.11.3 call to make a member of an enumeration: ``getattr(Class, "NAME")``; others call the class."""


def member(function: Name, arguments: tuple[Any, ...], *, of: frozenset[Name]) -> Inert:
    """Return a record for a member of one of the listed enumerations, as ``MEMBER`` makes it; ``function``: one of ``MEMBER``.

    Raises:
        Refused: It is anything else than a plain name in one of them.
    """
    match arguments:
        case (Name() as kind, str(name)) if kind in of and name.isidentifier() and not name.startswith("_"):
            return Inert(kind)
    raise Refused(f"the name {function}", name=function)


class Vocabulary(Protocol):
    """The names that a pickle may mention, and the values that they make."""

    def check(self, name: Name) -> None:
        """Raise ``Refused`` for a name that is not listed."""
        ...

    def make(self, name: Name, arguments: tuple[Any, ...]) -> Any:
        """Return the value that replaces ``name(*arguments)``. Raises ``Refused`` if the arguments do not fit."""
        ...


Persistent = Callable[[object], Any]
"""Turns a persistent id into a value. Raises ``Refused`` for an unknown one."""


class Key:
    """A value that may be a key of a dictionary, where it is compared by identity."""

    __slots__ = ()


def load(
    stream: BytesIO,
    vocabulary: Vocabulary,
    *,
    persistent: Persistent | None = None,
    max_instructions: int = MAX_INSTRUCTIONS,
) -> Any:
    """Read the pickle at the position of ``stream`` and return its value; the stream is then positioned at its end.

    Time and memory are bounded by the bytes read.

    Raises:
        Refused: The pickle contains something that weights do not need, or is damaged.
    """
    machine = _Machine(vocabulary, persistent)
    try:
        # No instruction allocates memory by a number that the pickle merely claims, and none copies values
        # that the memo can name again and again; so a bound on their number bounds time and memory.
        for _ in range(max_instructions):
            if (operation := _next_operation(stream)) is _STOP:
                return machine.pop()
            machine.run(operation.name, _argument(operation, stream))
    except (ValueError, IndexError, KeyError, TypeError, OverflowError) as error:
        raise Refused(f"a damaged pickle ({type(error).__name__}: {str(error)[:120]})") from error
    raise Refused(f"a pickle of more than {max_instructions:,} instructions; files of weights need far fewer")


def _next_operation(stream: BytesIO) -> pickletools.OpcodeInfo:
    """Read the code of the next instruction, and refuse unlisted ones before their argument is decoded."""
    # ``pickletools.genops`` would decode the argument first, and for some instructions that already imports a codec.
    code = stream.read(1)
    operation = _OPERATIONS.get(code.decode("latin-1"))
    if operation is None:
        raise Refused("a damaged pickle (an unknown instruction)" if code else "a damaged pickle (no end)")
    if operation.name not in _KNOWN:
        raise Refused(f"the pickle instruction {operation.name}, which files of weights do not use")
    return operation


def _argument(operation: pickletools.OpcodeInfo, stream: BytesIO) -> Any:
    """Decode the argument of an instruction."""
    # Module and name are read here, because ``pickletools`` would treat a backslash as an escape, which pickles do not.
    if operation.name == "GLOBAL":
        return Name(*(stream.readline().decode("ascii").removesuffix("\n") for _ in range(2)))
    return None if operation.arg is None else operation.arg.reader(stream)


_PUSHED = frozenset(
    {
        *("BININT", "BININT1", "BININT2", "LONG1", "LONG4", "BINFLOAT"),
        *("BINSTRING", "SHORT_BINSTRING", "BINUNICODE", "BINUNICODE8", "SHORT_BINUNICODE"),
        *("BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8"),
    }
)
"""Instructions that push their argument."""
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_FIXED_TUPLES = {"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_KEYS = (str, float, bool, bytes, type(None), Key)
"""Types of dictionary keys, besides small integers: hashing nested or huge keys can exhaust the stack or the time."""


_LARGEST_KEY = 2**63


class _Machine:
    """The stack and the memo of one pickle."""

    def __init__(self, vocabulary: Vocabulary, persistent: Persistent | None) -> None:
        self._vocabulary = vocabulary
        self._persistent = persistent
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}

    def run(self, operation: str, argument: Any) -> None:
        """Execute one instruction."""
        if operation in _PUSHED:
            self._stack.append(argument)
        elif operation in _CONSTANTS:
            self._stack.append(_CONSTANTS[operation])
        elif operation in _FIXED_TUPLES:
            self._stack.append(tuple(self._pop_many(_FIXED_TUPLES[operation])))
        else:
            _METHODS[operation](self, argument)

    def pop(self) -> Any:
        """Remove and return the top of the stack, which must be above the last mark."""
        if len(self._stack) <= (self._marks[-1] if self._marks else 0):
            raise Refused("a damaged pickle (its stack is empty)")
        return self._stack.pop()

    def _pop_many(self, count: int) -> list[Any]:
        return [self.pop() for _ in range(count)][::-1]

    def _pop_mark(self) -> list[Any]:
        start = self._marks.pop()
        items = self._stack[start:]
        del self._stack[start:]
        return items

    def _top(self) -> Any:
        top = self.pop()
        self._stack.append(top)
        return top

    # Each of the following methods is one instruction; its last parameter is the argument, if the instruction has one.
    def _skip(self, _: Any) -> None:
        pass

    def _mark(self, _: Any) -> None:
        self._marks.append(len(self._stack))

    def _discard(self, _: Any) -> None:
        self.pop()

    def _discard_to_mark(self, _: Any) -> None:
        self._pop_mark()

    def _tuple(self, _: Any) -> None:
        self._stack.append(tuple(self._pop_mark()))

    def _empty_list(self, _: Any) -> None:
        self._stack.append([])

    def _frozen_set(self, _: Any) -> None:
        self._stack.append(self._pop_mark())

    def _empty_dict(self, _: Any) -> None:
        self._stack.append({})

    def _add_items(self, _: Any) -> None:
        items = self._pop_mark()
        _append(self._top(), items)

    def _append_one(self, _: Any) -> None:
        item = self.pop()
        _append(self._top(), [item])

    def _set_item(self, _: Any) -> None:
        pair = self._pop_many(2)
        _set_items(self._top(), pair)

    def _set_many(self, _: Any) -> None:
        items = self._pop_mark()
        _set_items(self._top(), items)

    def _put(self, index: int) -> None:
        self._memo[index] = self._top()

    def _memoize(self, _: Any) -> None:
        self._memo[len(self._memo)] = self._top()

    def _get(self, index: int) -> None:
        self._stack.append(self._memo[index])

    def _global(self, name: Name) -> None:
        self._vocabulary.check(name)
        self._stack.append(name)

    def _stack_global(self, _: Any) -> None:
        module, name = self._pop_many(2)
        if not (isinstance(module, str) and isinstance(name, str)):
            raise Refused("a damaged pickle (a name that is no text)")
        self._global(Name(module, name))

    def _make(self, _: Any) -> None:
        what, arguments = self._pop_many(2)
        if not isinstance(what, Name) or not isinstance(arguments, tuple):
            raise Refused(f"a call of {_describe(what)}, which is no name of a class or function")
        self._stack.append(self._vocabulary.make(what, arguments))

    def _build(self, _: Any) -> None:
        state = self.pop()
        target = self._top()
        if isinstance(target, Inert):
            part = state[0] if isinstance(state, tuple) and state else state
            if isinstance(part, dict):
                target.state = part
        elif hasattr(type(target), "build"):
            target.build(state)
        elif type(target) is not dict:  # a pickled OrderedDict may have attributes, which nothing here reads
            raise Refused(f"state for {_describe(target)}")

    def _persistent_id(self, _: Any) -> None:
        identity = self.pop()
        if self._persistent is None:
            raise Refused("a persistent id, which this kind of file does not use")
        self._stack.append(self._persistent(identity))


def _describe(value: object) -> str:
    return str(value) if isinstance(value, Name) else f"a value of type {type(value).__name__}"


def _append(target: Any, items: list[Any]) -> None:
    if isinstance(target, list):
        target.extend(items)
    elif not isinstance(target, Inert):
        raise Refused(f"items for {_describe(target)}")


def _set_items(target: Any, items: list[Any]) -> None:
    if len(items) % 2:
        raise Refused("a damaged pickle (a key without a value)")
    if isinstance(target, Inert):
        return
    if type(target) is not dict:
        raise Refused(f"entries for {_describe(target)}")
    for key, value in zip(items[::2], items[1::2], strict=True):
        if not isinstance(key, _KEYS) and not (type(key) is int and abs(key) < _LARGEST_KEY):
            raise Refused(f"a dictionary key that is {_describe(key)}")
        target[key] = value


_METHODS: dict[str, Callable[[_Machine, Any], None]] = {
    "PROTO": _Machine._skip,
    "FRAME": _Machine._skip,
    "MARK": _Machine._mark,
    "POP": _Machine._discard,
    "POP_MARK": _Machine._discard_to_mark,
    "TUPLE": _Machine._tuple,
    "EMPTY_LIST": _Machine._empty_list,
    "EMPTY_SET": _Machine._empty_list,
    "FROZENSET": _Machine._frozen_set,
    "ADDITEMS": _Machine._add_items,
    "APPENDS": _Machine._add_items,
    "APPEND": _Machine._append_one,
    "EMPTY_DICT": _Machine._empty_dict,
    "SETITEM": _Machine._set_item,
    "SETITEMS": _Machine._set_many,
    "BINPUT": _Machine._put,
    "LONG_BINPUT": _Machine._put,
    "MEMOIZE": _Machine._memoize,
    "BINGET": _Machine._get,
    "LONG_BINGET": _Machine._get,
    "GLOBAL": _Machine._global,
    "STACK_GLOBAL": _Machine._stack_global,
    "REDUCE": _Machine._make,
    "NEWOBJ": _Machine._make,
    "BUILD": _Machine._build,
    "BINPERSID": _Machine._persistent_id,
}
"""Maps an instruction to its method. Sets become lists, so that their members need not be hashed."""
_OPERATIONS = {operation.code: operation for operation in pickletools.opcodes}
_STOP = _OPERATIONS["."]
_KNOWN = frozenset({_STOP.name, *_PUSHED, *_CONSTANTS, *_FIXED_TUPLES, *_METHODS})
