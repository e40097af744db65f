"""Read the sources of a spec: YAML files with their ``_BASE_``, the environment, ``-o`` and flags.

Each function merges its values into ``Layers`` and adds a line to ``problems`` for each mistake, so that all mistakes
are reported at once.
"""

import contextlib
import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import resources
from pathlib import Path as FilePath
from typing import Any, NamedTuple

from mtrain.spec import references
from mtrain.spec.in_code import plain
from mtrain.spec.model import Spec
from mtrain.spec.provenance import Layers, Misplaced, Origin
from mtrain.spec.reserved import RESERVED
from mtrain.spec.schema import has_value, walk
from mtrain.spec.suggest import closest, hint
from mtrain.spec.yaml_reader import Parsed, Path, nearest, parse, parse_value, read_text

PREFIX = "MTRAIN_"
FOREIGN = {"FLAGS_START_PORT": "cluster.start_port"}
"""Environment variables of other programs that set a value of a spec, with the path of that value."""
BASE_KEY = "_BASE_"
MAX_FILES = 100
"""Largest number of files that a spec may consist of, itself and all its bases."""
MAX_CHAIN = 30
"""Largest depth of bases: files of which each names the next one as its base."""
LONGEST_SHOWN = 200
"""Largest number of characters of the user's input that a message repeats."""


class Given(NamedTuple):
    """A value from the command line, with the flag as it was typed."""

    value: Any
    text: str


@dataclass(frozen=True, slots=True)
class _FileLayer:
    """A file of a spec, as one layer."""

    parsed: Parsed
    name: str
    kind: Any

    def origin(self, path: Path, *, level: int) -> Origin:
        return Origin(self.kind, self.name, nearest(path, self.parsed.lines), level=level)


@dataclass(frozen=True, slots=True)
class _ImportedLayer:
    """The values that an importer has made of another project's file, as one layer."""

    parsed: Parsed
    name: str
    places: Mapping[Path, str]

    def origin(self, path: Path, *, level: int) -> Origin:
        return Origin("file", self.name, text=nearest(path, self.places) or self.name, level=level)


@dataclass(slots=True)
class Files:
    """A file of a spec and its bases, read once, with a line for each mistake in them."""

    laid: list[_FileLayer | _ImportedLayer] = field(default_factory=list)
    """The file first, then its bases, strongest first."""
    problems: list[str] = field(default_factory=list)

    @classmethod
    def read(cls, file: FilePath) -> "Files":
        """Read ``file`` and its bases."""
        files = cls()
        files._collect(file, (), set())
        return files

    @classmethod
    def written_in_code(cls, values: Mapping[str, Any], place: FilePath) -> "Files":
        """Take the values of a spec that was written in Python, and read its bases, which are searched beside ``place``.

        Raises:
            SpecError: there is a value that YAML does not have.
        """
        files = cls()
        files._lay(Parsed(values=plain(values, where=place.name)), place, place.name, (), {place})
        return files

    @classmethod
    def of_import(cls, values: Mapping[str, tuple[Any, str]], name: str) -> "Files":
        """Take values that were translated from the file ``name``: dotted path -> value and its place there."""
        parsed = Parsed(values=nest({dotted: value for dotted, (value, _) in values.items()}))
        return cls([_ImportedLayer(parsed, name, {_path(dotted): place for dotted, (_, place) in values.items()})])

    def seem_foreign(self) -> bool:
        """Return whether there are mistakes, or a key at the top that is no section of the core's schema."""
        return bool(self.problems) or not Spec.model_fields.keys() >= {
            k for each in self.laid for k in each.parsed.values
        }

    def _collect(self, file: FilePath, chain: tuple[FilePath, ...], visited: set[FilePath]) -> None:
        """Add ``file`` and its bases to ``laid``."""
        name = display(file)
        if file in chain:
            names = " -> ".join(display(link) for link in (*chain[chain.index(file) :], file))
            self.problems.append(f"{name}: {BASE_KEY} goes round in a circle: {names}")
            return
        if file in visited:
            return
        if len(visited) >= MAX_FILES or len(chain) >= MAX_CHAIN:
            limit = f"{MAX_FILES} files" if len(visited) >= MAX_FILES else f"{MAX_CHAIN} files below one another"
            self.problems.append(f"{name}: not read: more than {limit} are named by {BASE_KEY}")
            return
        visited.add(file)
        try:
            text = read_text(file)
        except ValueError as error:
            self.problems.append(f"{name}: {error}")
            return
        parsed = parse(text, name=name)
        self.problems.extend(parsed.problems)
        self._lay(parsed, file, name, chain, visited)

    def _lay(
        self, parsed: Parsed, file: FilePath, name: str, chain: tuple[FilePath, ...], visited: set[FilePath]
    ) -> None:
        """Add the content of ``file`` as a layer, and its bases."""
        bases = self._bases(parsed, file, name)
        self.laid.append(_FileLayer(parsed, name, "base" if chain else "file"))
        # From the last to the first: a file that several others name as a base counts once, at its strongest position.
        for base in reversed(bases):
            self._collect(base, (*chain, file), visited)

    def _bases(self, parsed: Parsed, file: FilePath, name: str) -> list[FilePath]:
        value = parsed.values.pop(BASE_KEY, None)
        entries = value if isinstance(value, list) else [] if value is None else [value]
        bases = []
        for position, entry in enumerate(entries):
            line = parsed.lines.get((BASE_KEY, position), parsed.lines.get((BASE_KEY,)))
            where = f"{name}{f':{line}' if line else ''} {BASE_KEY}"
            if not isinstance(entry, str):
                self.problems.append(f"{where}: given {shorten(repr(entry))}, expected the name of a file")
                continue
            base = find_config(entry, beside=file.parent)
            if base is None:
                candidates = [*shipped_names(), *(near.name for near in file.parent.glob("*.yml"))]
                self.problems.append(
                    f"{where}: no file {shorten(entry)!r} beside {name} and no such shipped config"
                    f"{hint(entry, candidates)}"
                )
            else:
                bases.append(base)
        return bases


@dataclass(slots=True)
class Sources:
    """Merges the sources of a spec. They must be added from the weakest to the strongest."""

    schema: type[Spec]
    """The schema of the job, or the core's as long as the job's is not known."""
    is_known: Callable[[Path], bool] = lambda _: True
    """Whether a path that ``schema`` does not have belongs to another task; other ones are refused in the environment."""
    layers: Layers = field(default_factory=Layers)
    problems: list[str] = field(default_factory=list)
    raw: dict[Path, str] = field(default_factory=dict)
    """Text of each value from the environment or ``-o``, as it was typed."""
    defaults: Mapping[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        self.defaults = self.schema().model_dump(mode="json")

    def add_files(self, files: Files) -> None:
        """Add the bases of a file and then the file itself."""
        self.problems.extend(files.problems)
        for layer in reversed(files.laid):
            self.layers.begin()
            self.layers.merge(layer.parsed.values, partial(layer.origin, level=self.layers.level))
            self._settle_alternatives()

    def add_environment(self, environ: Mapping[str, str]) -> None:
        """Add values from environment variables: ``MTRAIN_TRAIN__BATCH_SIZE=8`` sets ``train.batch_size``."""
        self.layers.begin()
        for name in sorted(environ):
            text = shorten(f"{name}={environ[name]}")
            # Sorted above, so that mistakes come in one order whatever the shell exports first.
            if name in FOREIGN:
                dotted = FOREIGN[name]
            elif name.startswith(PREFIX) and name not in RESERVED:
                dotted = name.removeprefix(PREFIX).lower().replace("__", ".")
                path = _path(dotted)
                if not has_value(self.schema, path) and not self.is_known(path):
                    self.problems.append(f"{text}: not a value of a spec{self._variable_hint(name)}")
                    continue
            else:
                continue
            self._assign(dotted, environ[name], Origin("environment", text=text, level=self.layers.level))
        self._settle_alternatives()

    def add_run(self, values: Mapping[str, Any], file: str) -> None:
        """Add the values, by dotted path, that were chosen for the run that is resumed; ``file`` is the run's spec."""
        self.layers.begin()
        origin = Origin("run", file=file, level=self.layers.level)
        for dotted, value in values.items():
            path = _path(dotted)
            said = self.layers.get(path)
            # What a weaker source says too stays that source's: code
            # that the user's own spec names is named by the user.
            if self.layers.is_set(path) and (said == value or (_names_code(said) and _names_code(value))):
                continue
            try:
                self.layers.assign(path, value, origin, self.defaults)
            except Misplaced as error:
                self.problems.append(f"{origin} {dotted}: {error}")
        self._settle_alternatives()

    def add_command_line(self, overrides: Sequence[str], flags: Mapping[str, Any]) -> None:
        """Add the values of ``-o`` and of flags, which are one layer: none of them gives way to another of them.

        Two different values of one path are an error, except of ``-o`` alone, where the last one counts.
        """
        self.layers.begin()
        self._add_overrides(overrides)
        self._add_flags(flags)
        self._settle_alternatives()

    def _add_overrides(self, overrides: Sequence[str]) -> None:
        """Add values of ``-o``, each ``PATH=VALUE``."""
        for text in overrides:
            dotted, sign, value = text.partition("=")
            dotted = dotted.strip()
            if not sign or not dotted or "" in dotted.split("."):
                self.problems.append(f"-o {shorten(text)}: expected PATH=VALUE, for example -o train.batch_size=8")
                continue
            self._assign(dotted, value, Origin("override", text=shorten(f"-o {text}"), level=self.layers.level))

    def _add_flags(self, flags: Mapping[str, Any]) -> None:
        """Add values of flags by dotted path, plain or as ``Given``."""
        for dotted, value in flags.items():
            flag = value if isinstance(value, Given) else Given(value, f"{dotted}={value}")
            origin = Origin("flag", text=flag.text, level=self.layers.level)
            path = _path(dotted)
            typed = self.layers.origin(path) if self.layers.is_touched(path) else None
            if typed is not None and self.layers.get(path) != flag.value:
                self.problems.append(f"{flag.text}: {typed} gives {dotted} another value; keep one of them")
            try:
                self.layers.assign(path, flag.value, origin, self.defaults)
            except Misplaced as error:
                self.problems.append(f"{flag.text}: {error}")

    def _variable_hint(self, name: str) -> str:
        paths = (path for path, _ in walk(self.schema) if len(path) > 1)
        variables = [PREFIX + "__".join(str(key) for key in path).upper() for path in paths]
        best = closest(name, [*variables, *RESERVED])
        return (
            f"; did you mean {best}?" if best else "; write MTRAIN_SECTION__KEY, for example MTRAIN_TRAIN__BATCH_SIZE=8"
        )

    def _assign(self, dotted: str, text: str, origin: Origin) -> None:
        path = _path(dotted)
        try:
            self.layers.assign(path, parse_value(text), origin, self.defaults)
            self.raw[path] = text.strip()
        except (Misplaced, ValueError) as error:
            self.problems.append(f"{origin}: {error}")

    def _settle_alternatives(self) -> None:
        """Let a length in updates replace a length in epochs from a weaker layer, and the other way round."""
        pair: tuple[Path, Path] = (("train", "epochs"), ("train", "updates"))
        for new, old in (pair, pair[::-1]):
            # A source that gives both means neither to give way: the validation refuses it.
            fresh = self.layers.is_touched(new) and self.layers.get(new) is not None
            if fresh and not self.layers.is_touched(old) and self.layers.get(old) is not None:
                self.layers.assign(old, None, self.layers.origin(new), self.defaults)


def _names_code(value: Any) -> bool:
    """Return whether a value is a reference to a user's own code, or holds one."""
    if isinstance(value, Mapping):
        return any(_names_code(part) for pair in value.items() for part in pair)
    if isinstance(value, list):
        return any(map(_names_code, value))
    return isinstance(value, str) and references.is_reference(value)


def shipped_folder() -> FilePath:
    """Return the folder of the configs that come with mtrain."""
    return FilePath(str(resources.files("mtrain"))) / "configs"


def shipped_names() -> list[str]:
    """Return the names of the shipped configs, which ``-c`` takes without a path."""
    return sorted(file.stem for file in shipped_folder().glob("*.yml"))


def shipped_summaries() -> dict[str, str]:
    """Return the names of the shipped configs, each with the first sentence of the comment at its top."""
    return {name: _first_sentence(read_text(shipped_folder() / f"{name}.yml")) for name in shipped_names()}


def specs_in(folder: FilePath) -> list[str]:
    """Return the names of the YAML files in a folder that begin a section of a spec at the start of a line.

    Files that cannot be read, or are too long for settings, are left out: a folder may hold any YAML.
    """
    keys = ("_BASE_:", "model:", "data:", "train:", "optimizer:")
    names = []
    for file in sorted(file for ending in ("*.yml", "*.yaml") for file in folder.glob(ending)):
        with contextlib.suppress(ValueError):
            # Lines are looked at and no YAML is parsed: the files of a folder need not be valid.
            if any(line.startswith(keys) for line in read_text(file).splitlines()):
                names.append(file.name)
    return names


def _first_sentence(text: str) -> str:
    comment = " ".join(
        line[1:].strip() for line in itertools.takewhile(lambda line: line[:1] == "#", text.splitlines())
    )
    sentence, stop, _ = comment.partition(". ")
    return sentence.removesuffix(".") if stop or comment.endswith(".") else comment


def find_config(name: str, *, beside: FilePath | None = None) -> FilePath | None:
    """Return an existing file, or else the shipped config of that name; None if there is neither.

    A relative name is searched in the folder ``beside``, by default in the current one.
    """
    try:
        file = (beside or FilePath()) / FilePath(name).expanduser()
    except RuntimeError:  # `~name`, and there is no user of that name
        return None
    if os.path.isfile(file):  # Path.is_file raises an error if the name is too long for the file system.
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
    """Return the name of a file for messages.

    A file below the current folder is named relative to it, a shipped one by its package.
    """
    if is_shipped(file):
        return f"mtrain/configs/{file.relative_to(shipped_folder().resolve()).as_posix()}"
    here = FilePath.cwd()
    return str(file.relative_to(here)) if file.is_relative_to(here) else str(file)


def shorten(text: str) -> str:
    """Return ``text``, without its middle if it is too long for a message."""
    return text if len(text) <= LONGEST_SHOWN else f"{text[: LONGEST_SHOWN - 30]} ... {text[-20:]}"


def nest(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values by dotted path as sections in sections."""
    tree: dict[str, Any] = {}
    for dotted, value in values.items():
        *sections, last = dotted.split(".")
        branch = tree
        for section in sections:
            branch = branch.setdefault(section, {})
        branch[last] = value
    return tree


def _path(dotted: str) -> Path:
    """Return dotted text as a tuple of keys, in which numbers after the first key are positions in lists."""
    keys: list[str | int] = []
    for part in dotted.split("."):
        keys.append(int(part) if part.isdigit() and keys else part)
    return tuple(keys)
