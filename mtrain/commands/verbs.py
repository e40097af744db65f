"""Which verbs ``mtrain`` has: every entry point of the group ``mtrain.commands``, of mtrain and of other distributions.

An entry point has no line for the help. That is in the section ``[commands]`` of the ``plugins.toml`` of the package that it names::

    [commands.hello]
    heading = "Inspect"             # one of mtrain's or another; without this section: "Other"
    summary = "Greet somebody."

The list is kept in a file of the user's cache, so that the help imports nothing of this; it holds until a folder of the search
path or one of those files changes.
"""

import json
import os
import re
import sys
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from mtrain.errors import PluginError, UsageError
from mtrain.spec import packages
from mtrain.spec.files import read_text

if TYPE_CHECKING:
    import click

KIND = "commands"
GROUP = f"mtrain.{KIND}"
HEADINGS = ("Train", "Inspect", "Results", "Ship", "Scheduler")
"""Headings of the help, in this order; others follow."""
OTHER = "Other"
FOLDER = Path("~/.cache/mtrain/verbs")
MAX_BYTES = 1 << 20
"""Largest file that is read: of the cache, and of what a package says of its verbs."""


class Verb(NamedTuple):
    """A verb, described without importing it."""

    name: str
    target: str
    heading: str
    line: str

    @property
    def is_own(self) -> bool:
        """Return whether it is mtrain's; its verbs cannot be replaced."""
        return self.target.startswith("mtrain.")


def find_verbs(group: str = "") -> dict[str, Verb]:
    """Return the verbs by name, in the order of the help; those of mtrain's packages that are not installed have no target.

    Args:
        group: a verb whose own verbs are returned: an entry point ``plugins.test`` is ``mtrain plugins test``.
    """
    found = _read_installed(tuple(sys.path))
    prefix = f"{group}." if group else ""
    within = {name.removeprefix(prefix): verb for name, verb in found.items() if name.startswith(prefix)}
    return {name: verb for name, verb in within.items() if "." not in name}


@lru_cache(maxsize=1)
def _read_installed(search_path: tuple[str, ...]) -> dict[str, Verb]:
    folders = {entry: _time_of(entry) for entry in search_path if entry}
    # Two paths with one number take the file from each other: it says which one it is of.
    name = zlib.crc32("\0".join((sys.prefix, *folders)).encode(errors="surrogateescape"))
    cache = FOLDER.expanduser() / f"{name:08x}.json"
    kept = _read_list(cache, folders)
    # The list holds until a folder of the search path or a file that describes verbs changes.
    if kept is None:
        kept, described = _find(search_path)
        _write_list(
            cache, {"folders": folders, "files": {str(file): _time_of(file) for file in described}, "verbs": kept}
        )
    order = [*HEADINGS, *sorted({verb.heading for verb in kept} - {*HEADINGS, OTHER}), OTHER]
    return {verb.name: verb for verb in sorted(kept, key=lambda verb: order.index(verb.heading))}


def load(verb: Verb) -> "click.Command":
    """Import a verb; which of others may run is said by ``plugins.toml``, as for every plugin.

    Raises:
        PluginError: Two distributions bring it, it is disabled, cannot be imported, or is no command.
    """
    import click

    if not verb.target:
        package = packages.bringing(KIND, verb.name) or ""
        raise UsageError(packages.absent(package, f"{verb.name.replace('.', ' ')} is a command"))
    if verb.is_own:  # nothing can stand in its place, so nothing is looked up
        module, _, name = verb.target.partition(":")
        command = getattr(import_module(module), name)
    else:
        from mtrain.spec import plugins

        command = plugins.load_object(KIND, verb.name)
    if not isinstance(command, click.Command):
        raise PluginError(
            f"the command {verb.name!r} ({verb.target}) is {type(command).__name__}, expected a command of click"
        )
    return command


def is_shipped(name: str) -> bool:
    """Return whether mtrain has a verb of this name, though its installation may be older than its sources."""
    return name in _read_descriptions(packages.find_policy_file("mtrain", sys.path))


def _find(search_path: Sequence[str]) -> tuple[list[Verb], list[Path]]:
    """Return the verbs of all entry points, those of mtrain first, and the files that describe them."""
    points = sorted(_entry_points(search_path), key=lambda point: not point[1].startswith("mtrain."))
    described: dict[Path, Mapping[str, Any]] = {}
    verbs: dict[str, Verb] = {}
    for name, target in points:
        file = packages.find_policy_file(packages.module_of(target), search_path)
        if file not in described:
            described[file] = _read_descriptions(file)
        words = described[file].get(name, {})
        if target.startswith("mtrain.") and not words:
            continue  # a list of entry points that an older installation has left
        verb = Verb(name, target, str(words.get("heading", OTHER)), str(words.get("summary", "")))
        verbs.setdefault(verb.name, verb)  # nobody replaces a verb of mtrain
    for package, each in packages.PACKAGES.items():
        for name in each.brings.get(KIND, ()):
            verbs.setdefault(name, Verb(name, "", each.heading, f"Not installed: {package}."))
    rank = {
        name: number for number, name in enumerate(described.get(packages.find_policy_file("mtrain", search_path), ()))
    }
    return sorted(verbs.values(), key=lambda verb: rank.get(verb.name, len(rank))), list(described)


def _entry_points(search_path: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield name and target of each entry point of the group."""
    # The files are read here, because importing `importlib.metadata` and parsing all groups takes longer than the whole help.
    seen = set()
    for entry in search_path:
        with suppress(OSError):
            for info in sorted(os.listdir(entry or ".")):
                name, dot, ending = info.rpartition(".")
                owner = name.partition("-")[0].replace(".", "_").lower()
                # Of a distribution that lies in several folders the first counts, as Python would import it.
                if dot and ending in ("dist-info", "egg-info") and owner not in seen:
                    seen.add(owner)
                    yield from _points_of(Path(entry, info, "entry_points.txt"))


def _points_of(file: Path) -> Iterator[tuple[str, str]]:
    """Yield name and target of each entry point of the group in a file of entry points; none where it cannot be read."""
    try:
        text = read_text(file, limit=MAX_BYTES)
    except (OSError, ValueError):
        return
    section = text.partition(f"[{GROUP}]")[2].partition("\n[")[0]
    for line in section.splitlines():
        name, is_point, target = line.partition("=")
        if is_point and not line.lstrip().startswith(("#", ";")):
            yield name.strip(), target.partition("[")[0].strip()


def _read_descriptions(file: Path) -> dict[str, Any]:
    """Return what a package says of its verbs; nothing where that cannot be read."""
    import tomllib

    try:
        text = read_text(file, limit=MAX_BYTES)
        try:
            section = tomllib.loads(_sections_of_commands(text)).get(KIND, {})
        except tomllib.TOMLDecodeError:
            section = tomllib.loads(text).get(KIND, {})
    except (OSError, ValueError, RecursionError):
        return {}
    return (
        {name: words for name, words in section.items() if isinstance(words, dict)} if isinstance(section, dict) else {}
    )


def _sections_of_commands(text: str) -> str:
    """Return the sections of a ``plugins.toml`` that are about commands, and what stands before the first section."""
    # The whole file is long, and the help needs these alone. Of one with strings of several lines all is returned, since such a line
    # may look like the head of a section.
    if '"""' in text or "'''" in text:
        return text
    first, *sections = re.split(r"(?m)^[ \t]*(?=\[)", text)
    return first + "".join(section for section in sections if re.match(rf"\[[ \t]*[\"']?{KIND}\b", section))


def _time_of(path: str | Path) -> int:
    try:
        return Path(path).stat().st_mtime_ns
    except OSError:
        return 0


def _read_list(cache: Path, folders: Mapping[str, int]) -> list[Verb] | None:
    """Return the verbs of the cache; None where it is missing, older than what it was made of, or not readable."""
    try:
        content = json.loads(read_text(cache, limit=MAX_BYTES))
        if content["folders"] == folders and all(_time_of(file) == time for file, time in content["files"].items()):
            return [Verb(*map(str, words)) for words in content["verbs"]]
    except (OSError, ValueError, RecursionError, TypeError, KeyError, AttributeError):
        pass  # whoever may write to the user's cache may have written anything
    return None


def _write_list(cache: Path, content: Mapping[str, Any]) -> None:
    from mtrain.spec import outputs

    try:
        cache.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        outputs.write_text(cache, json.dumps(content))
    except OSError:  # A home that nobody can write to: it is read anew each time.
        pass
