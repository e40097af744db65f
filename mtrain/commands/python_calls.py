"""Arguments of mtrain's Python functions, converted to what the command line would have given: specs, paths and values."""

import os
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from mtrain.errors import UsageError
from mtrain.spec import terminal
from mtrain.spec.request import NOTHING, SpecRequest

if TYPE_CHECKING:
    from mtrain.spec.config import Loaded, RunValues, Source
    from mtrain.spec.typed import Spec

R = TypeVar("R")
File = str | os.PathLike[str] | None
SpecSource: TypeAlias = "File | Spec"
OF_SPEC = ("backend", "ranks", "overrides")
"""Arguments that change the spec of a call."""


def flags_of(*, backend: str | None, ranks: int | None, overrides: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the values that the arguments set, by dotted path, with the argument that messages name."""
    from mtrain.spec import config

    flags = {path: config.Given(value, f"overrides[{path!r}]") for path, value in flat(overrides or {})}
    if backend is not None:
        flags["backend.name"] = config.Given(backend, f"backend={backend!r}")
    if ranks is not None:
        flags["cluster.nproc_per_node"] = config.Given(ranks, f"ranks={ranks!r}")
    return flags


def flat(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Return nested values by dotted path, as YAML would have given them; an empty mapping stays a value."""
    from mtrain.spec.in_code import plain
    from mtrain.spec.schema import leaves

    return leaves(plain(values, where="overrides"))


def source_of(spec: SpecSource) -> "Source":
    """Return a spec as ``config.load`` takes it.

    Raises:
        UsageError: it is none.
    """
    if spec is None or isinstance(spec, Mapping):
        return spec
    if not isinstance(spec, str | os.PathLike):
        raise UsageError(
            f"given a spec of type {type(spec).__name__}, expected a file, the name of a config, or a dict"
        )
    return os.fspath(spec)


def need_main_thread(name: str) -> None:
    """Refuse other threads: only the main thread of a process can be told of Ctrl-C and SIGTERM."""
    if threading.current_thread() is not threading.main_thread():
        raise UsageError(
            f"mtrain.{name} was called from another thread; call it from the main thread, or from a process of its own"
        )


def spec_request(
    spec: SpecSource,
    *,
    backend: str | None = None,
    ranks: int | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> SpecRequest:
    """Return the spec that a call asks for, with every value that it passes; see ``mtrain.commands.functions``."""
    from mtrain.spec.config import Given, load

    def read(config: "Source", needed: Mapping[str, Any] = NOTHING, run: "RunValues | None" = None) -> "Loaded":
        # A value with a name of its own keeps it in messages; the others are named as entries of `overrides`.
        named = {path: value for path, value in needed.items() if isinstance(value, Given)}
        plain = {path: value for path, value in needed.items() if path not in named}
        values = {**dict(flat(overrides or {})), **plain}
        flags = flags_of(backend=backend, ranks=ranks, overrides=values)
        return load(config, flags={**flags, **named}, run=run)

    return SpecRequest(config=source_of(spec), read=read)


def request_of(kind: type[R], arguments: Mapping[str, Any], /, **more: Any) -> R:
    """Return the request that a call asks for: each field has the argument of its name.

    Args:
        kind: the request, a dataclass; its field ``spec`` is made of the arguments ``spec``, ``backend``, ``ranks`` and ``overrides``.
        arguments: the arguments of the call: ``locals()`` where it begins.
        more: fields that are not the argument of their name.
    """
    names = {field.name: field.type for field in fields(kind)}  # type: ignore[arg-type]  # a dataclass, which no type can say
    values = {name: _fit(arguments[name], annotation) for name, annotation in names.items() if name in arguments}
    if "spec" in names:
        values["spec"] = spec_request(
            arguments["spec"], **{name: arguments[name] for name in OF_SPEC if name in arguments}
        )
    return kind(**{**values, **more})


def _fit(value: Any, annotation: Any) -> Any:
    """Return an argument as a request has it: a path is a ``Path`` where the field is one, else text."""
    if value is not None and annotation in (Path, Path | None):
        return Path(value)
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def teller(*, quiet: bool) -> Callable[[str], None]:
    """Return what prints the lines on the progress of a call, or nothing."""
    return (lambda text: None) if quiet else (lambda text: terminal.say(text, err=True))
