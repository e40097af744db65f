"""Where values of a spec come from: YAML files with their ``_BASE_``, the environment, ``-o`` and flags.

Each function lays what it finds over ``Layers`` and adds a line to ``problems`` for each mistake: all are told at once.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path as FilePath
from typing import Any, NamedTuple

from mtrain.spec.model import Spec
from mtrain.spec.provenance import Layers, Misplaced, Origin
from mtrain.spec.schema import field_at, walk
from mtrain.spec.suggest import closest, hint
from mtrain.spec.yaml_reader import Parsed, Path, parse, parse_value, read_text

PREFIX = "MTRAIN_"
JOB_SECRET = "MTRAIN_JOB_SECRET"  # noqa: S105
"""Environment variable with which the starter tells the ranks their secret. It is in no plan, no file and no log."""
CLUSTER_SECRET = "MTRAIN_CLUSTER_SECRET"  # noqa: S105
"""Environment variable with the secret that hosts share which people start by hand. Ranks are not told it."""
RESERVED = frozenset({"MTRAIN_HOME", "MTRAIN_DEBUG", "MTRAIN_CACHE", JOB_SECRET, CLUSTER_SECRET})
"""Variables that are no values of a spec."""
FOREIGN = {"FLAGS_START_PORT": "cluster.start_port"}
"""Variables of other programs that users set for the same purpose."""
BASE_KEY = "_BASE_"
OF_A_FORMAT = ("train", "val", "images")
"""Keys of `data` that name other things in another `data.format`, besides `data.options`."""
MAX_FILES = 100
"""Files that a spec may be made of: itself and all its bases."""
MAX_CHAIN = 30
"""Files that may name one another as base, each the next."""
LONGEST_SHOWN = 200
"""Characters of what was typed that a message repeats."""


class Given(NamedTuple):
    """A value from the command line, with the flag as it was typed."""

    value: Any
    text: str


@dataclass(frozen=True, slots=True)
class _Laid:
    """A file that is laid over others."""

    parsed: Parsed
    name: str
    kind: Any

    def origin(self, path: Path) -> Origin:
        return Origin(self.kind, self.name, _line(self.parsed, path))


@dataclass(slots=True)
class Sources:
    """Lays sources over one another, weakest first; ``raw`` keeps the text of values that came as text."""

    defaults: Mapping[str, Any]
    layers: Layers = field(default_factory=Layers)
    problems: list[str] = field(default_factory=list)
    raw: dict[Path, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    """What was left out, and why: one sentence each."""

    def add_file(self, file: FilePath) -> None:
        """The file's bases, then the file."""
        laid: list[_Laid] = []
        self._collect(file, (), laid, set())
        for layer in reversed(laid):
            former = self._begin_layer()
            self.layers.merge(layer.parsed.values, layer.origin)
            self._end_layer(former)

    def add_environment(self, environ: Mapping[str, str]) -> None:
        """``MTRAIN_TRAIN__BATCH_SIZE=8`` gives ``train.batch_size``."""
        former = self._begin_layer()
        for name in sorted(environ):
            text = shortened(f"{name}={environ[name]}")
            if name in FOREIGN:
                dotted = FOREIGN[name]
            elif name.startswith(PREFIX) and name not in RESERVED:
                dotted = name.removeprefix(PREFIX).lower().replace("__", ".")
                if field_at(Spec, _path(dotted)) is None and not _inside_free_keys(dotted):
                    self.problems.append(f"{text}: not a value of a spec{_variable_hint(name)}")
                    continue
            else:
                continue
            self._assign(dotted, environ[name], Origin("environment", text=text))
        self._end_layer(former)

    def add_overrides(self, overrides: Sequence[str]) -> None:
        """``PATH=VALUE`` each; the last of one path wins."""
        former = self._begin_layer()
        for text in overrides:
            dotted, sign, value = text.partition("=")
            dotted = dotted.strip()
            if not sign or not dotted or "" in dotted.split("."):
                self.problems.append(f"-o {shortened(text)}: expected PATH=VALUE, for example -o train.batch_size=8")
                continue
            self._assign(dotted, value, Origin("override", text=shortened(f"-o {text}")))
        self._end_layer(former)

    def add_flags(self, flags: Mapping[str, Any]) -> None:
        """Values by dotted path, plain or as ``Given``."""
        former = self._begin_layer()
        for dotted, flag in flags.items():
            given = flag if isinstance(flag, Given) else Given(flag, f"{dotted}={flag}")
            origin = Origin("flag", text=given.text)
            try:
                self.layers.assign(_path(dotted), given.value, origin, self.defaults)
            except Misplaced as error:
                self.problems.append(f"{given.text}: {error}")
        self._end_layer(former)

    def _assign(self, dotted: str, text: str, origin: Origin) -> None:
        path = _path(dotted)
        try:
            self.layers.assign(path, parse_value(text), origin, self.defaults)
            self.raw[path] = text.strip()
        except (Misplaced, ValueError) as error:
            self.problems.append(f"{origin}: {error}")

    def _collect(self, file: FilePath, chain: tuple[FilePath, ...], laid: list["_Laid"], seen: set[FilePath]) -> None:
        """Add ``file`` and its bases to ``laid``, strongest first.

        A file that several others name as a base has to be laid once: where it is strongest. So the bases are walked from
        the last to the first, and a file that was met before is passed over with everything below it.
        """
        name = display(file)
        if file in chain:
            names = " -> ".join(display(link) for link in (*chain[chain.index(file) :], file))
            self.problems.append(f"{name}: {BASE_KEY} goes round in a circle: {names}")
            return
        if file in seen:
            return
        if len(seen) >= MAX_FILES or len(chain) >= MAX_CHAIN:
            limit = f"{MAX_FILES} files" if len(seen) >= MAX_FILES else f"{MAX_CHAIN} files below one another"
            self.problems.append(f"{name}: not read: more than {limit} are named by {BASE_KEY}")
            return
        seen.add(file)
        try:
            text = read_text(file)
        except ValueError as error:
            self.problems.append(f"{name}: {error}")
            return
        parsed = parse(text, name=name)
        self.problems.extend(parsed.problems)
        bases = self._bases(parsed, file, name)
        laid.append(_Laid(parsed, name, "base" if chain else "file"))
        for base in reversed(bases):
            self._collect(base, (*chain, file), laid, seen)

    def _bases(self, parsed: Parsed, file: FilePath, name: str) -> list[FilePath]:
        given = parsed.values.pop(BASE_KEY, None)
        entries = given if isinstance(given, list) else [] if given is None else [given]
        found = []
        for position, entry in enumerate(entries):
            line = parsed.lines.get((BASE_KEY, position), parsed.lines.get((BASE_KEY,)))
            where = f"{name}:{line} {BASE_KEY}"
            if not isinstance(entry, str):
                self.problems.append(f"{where}: given {shortened(repr(entry))}, expected the name of a file")
                continue
            base = find_config(entry, beside=file.parent)
            if base is None:
                known = [*shipped_names(), *(near.name for near in file.parent.glob("*.yml"))]
                self.problems.append(
                    f"{where}: no file {shortened(entry)!r} beside {name} and no such shipped config{hint(entry, known)}"
                )
            else:
                found.append(base)
        return found

    def _begin_layer(self) -> Any:
        """Start the next layer; returns the data format that the weaker ones ask for."""
        self.layers.begin()
        return self.layers.get(("data", "format"))

    def _end_layer(self, former_format: Any) -> None:
        """Take back what weaker layers gave and this one has made meaningless."""
        self._settle_alternatives()
        if former_format is not None and self.layers.get(("data", "format")) != former_format:
            self._drop_what_the_former_format_had(former_format)

    def _drop_what_the_former_format_had(self, former: Any) -> None:
        """Leave out the paths and options that weaker layers gave for the data format ``former``."""
        options = self.layers.get(("data", "options"))
        candidates: list[Path] = [("data", key) for key in OF_A_FORMAT]
        candidates += [("data", "options", option) for option in options] if isinstance(options, dict) else []
        foreign = [p for p in candidates if p not in self.layers.touched and self.layers.get(p) is not None]
        if not foreign:
            return
        places = [f"{'.'.join(map(str, path))} ({self.layers.origin(path)})" for path in foreign]
        chosen = self.layers.get(("data", "format"))
        were = "was" if len(foreign) == 1 else "were"
        self.notes.append(
            f"{', '.join(places)}: left out, {were} given for data.format {former}; it is {chosen} now "
            f"({self.layers.origin(('data', 'format'))})"
        )
        for path in foreign:
            self.layers.drop(path)

    def _settle_alternatives(self) -> None:
        """A length in updates replaces one in epochs that a weaker source gave, and the other way round."""
        pair: tuple[Path, Path] = (("train", "epochs"), ("train", "updates"))
        for new, old in (pair, pair[::-1]):
            fresh = new in self.layers.touched and self.layers.get(new) is not None
            if fresh and old not in self.layers.touched and self.layers.get(old) is not None:
                self.layers.assign(old, None, self.layers.origin(new), self.defaults)


def shipped_folder() -> FilePath:
    """Where the configs that come with mtrain lie."""
    return FilePath(str(resources.files("mtrain"))) / "configs"


def shipped_names() -> list[str]:
    """Names that ``-c`` takes without a path."""
    return sorted(file.stem for file in shipped_folder().glob("*.yml"))


def find_config(name: str, *, beside: FilePath | None = None) -> FilePath | None:
    """An existing file (relative to ``beside``, else to the current folder), else the shipped config of that name."""
    try:
        file = (beside or FilePath()) / FilePath(name).expanduser()
    except RuntimeError:  # `~name` of no user
        return None
    if os.path.isfile(file):  # unlike Path.is_file, this is no error for a name that is too long
        return file.resolve()
    for candidate in (name, f"{name}.yml", f"{name.removesuffix('.yaml')}.yml"):
        shipped = shipped_folder() / candidate
        if not FilePath(name).is_absolute() and ".." not in FilePath(name).parts and os.path.isfile(shipped):
            return shipped.resolve()
    return None


def is_shipped(file: FilePath) -> bool:
    """Return whether a file, given as a resolved path, is one of the configs that are installed with mtrain."""
    return file.is_relative_to(shipped_folder().resolve())


def display(file: FilePath) -> str:
    """A file as messages name it: relative where it lies below the current folder, shipped ones by package."""
    if is_shipped(file):
        return f"mtrain/configs/{file.relative_to(shipped_folder().resolve()).as_posix()}"
    here = FilePath.cwd()
    return str(file.relative_to(here)) if file.is_relative_to(here) else str(file)


def shortened(text: str) -> str:
    """``text``, its middle left out where it is too long for a message."""
    return text if len(text) <= LONGEST_SHOWN else f"{text[: LONGEST_SHOWN - 30]} ... {text[-20:]}"


def _path(dotted: str) -> Path:
    """Dotted text as keys; digits become positions where the schema has a list."""
    keys: list[str | int] = []
    for part in dotted.split("."):
        keys.append(int(part) if part.isdigit() and keys else part)
    return tuple(keys)


def _line(parsed: Parsed, path: Path) -> int | None:
    for length in range(len(path), 0, -1):
        if path[:length] in parsed.lines:
            return parsed.lines[path[:length]]
    return None


def _inside_free_keys(dotted: str) -> bool:
    parts = dotted.split(".")
    return any(field_at(Spec, tuple(parts[:length])) is not None for length in range(2, len(parts)))


def _variable_hint(name: str) -> str:
    known = [PREFIX + "__".join(str(key) for key in path).upper() for path, _ in walk(Spec) if len(path) > 1]
    best = closest(name, [*known, *RESERVED])
    return f"; did you mean {best}?" if best else "; write MTRAIN_SECTION__KEY, for example MTRAIN_TRAIN__BATCH_SIZE=8"
