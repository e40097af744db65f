"""The user's own code in the pods: the files that a job names, and those they import, as a ConfigMap."""

import ast
import base64
import importlib.util
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from mtrain.core.interfaces.queue import Submission
from mtrain.errors import UsageError
from mtrain.spec.files import read_bytes
from mtrain.spec.references import MAX_CODE_BYTES
from mtrain_clusters._kubernetes.options import CODE_FOLDER

MAX_BYTES = 1 << 20
"""Size of a ConfigMap's content that the API server still accepts."""
IN_THE_IMAGE = "install it as a package in the image and here, and name it as package.module:Name"
# The files of a whole ConfigMap would be links through a folder with another name in every pod, and a folder that is
# mounted from it has files alone.
SUBFOLDER = "code"
"""Folder in the volume that is mounted."""


@dataclass(frozen=True, slots=True)
class OwnCode:
    """The files of a job's own code, with the path of each in the pods."""

    files: Mapping[PurePosixPath, Path] = field(default_factory=dict)
    """Path below ``CODE_FOLDER`` -> file here."""
    names: Mapping[str, str] = field(default_factory=dict)
    """The texts of the spec, and the script's path, that name code here -> those that name it in a pod."""

    def in_pods(self, value: Any) -> Any:
        """Return a value of a spec, with texts and keys that name code here replaced by those of the pods."""
        if isinstance(value, str):
            return self.names.get(value, value)
        if isinstance(value, dict):
            return {self.names.get(key, key): self.in_pods(entry) for key, entry in value.items()}
        return [self.in_pods(entry) for entry in value] if isinstance(value, list) else value

    def contents(self) -> tuple[dict[str, Any], list[dict[str, str]]]:
        """Return the data of the ConfigMap, and the path in the volume of each of its keys.

        Raises:
            UsageError: it is too large, or a file cannot be read.
        """
        texts, binaries = dict[str, str](), dict[str, str]()
        items, size = [], 0
        for number, (place, file) in enumerate(sorted(self.files.items())):
            # The number keeps keys apart that are equal once their signs are replaced; 253 characters is the limit of
            # the API.
            key = f"{number}-{re.sub(r'[^-._A-Za-z0-9]', '_', place.name)}"[-253:]
            content = _read(file)
            size += len(content)
            try:
                texts[key] = content.decode()
            except UnicodeDecodeError:
                binaries[key] = base64.b64encode(content).decode()
            items.append({"key": key, "path": f"{SUBFOLDER}/{place}"})
        if size > MAX_BYTES:
            largest = max(self.files.values(), key=lambda file: file.stat().st_size)
            raise UsageError(
                f"the job's own code has {size} bytes, but a ConfigMap holds {MAX_BYTES}; the largest file is {largest}: "
                f"{IN_THE_IMAGE}, or put its data into the data volume"
            )
        return {"data": texts} | ({"binaryData": binaries} if binaries else {}), items


def own_code_of(submission: Submission) -> OwnCode:
    """Return the own code of a job: what its spec names, its script, and what these import from beside them.

    Raises:
        UsageError: the pods cannot have a part of it.
    """
    if submission.local_plugins:
        plugins = ", ".join(submission.local_plugins)
        raise UsageError(
            f"{plugins}: declared in plugins.toml, which the pods do not have; package it (`mtrain plugins new`) and install "
            "it in the image and here"
        )
    for text, where in submission.code.items():
        if where is None and (place := _beside(text.rpartition(":")[0], submission.folder)) is not None:
            raise UsageError(
                f"{text}: a module of {place}, which the pods do not have; name its file, PATH.py:Name, to send it with the "
                f"job, or {IN_THE_IMAGE}"
            )
    named = {text: file for text, file in submission.code.items() if file is not None}
    if submission.arguments:
        named[submission.arguments[0]] = Path(submission.arguments[0])
    if not named:
        return OwnCode()
    # Below their common folder, files keep the places at which their imports look for each other.
    base = Path(os.path.commonpath([file.parent for file in named.values()]))
    files = {PurePosixPath(file.relative_to(base)): file for root in named.values() for file in _with_imports(root)}
    names = {}
    for text, file in named.items():
        _, sign, name = ("", "", "") if text == str(file) else text.rpartition(":")
        names[text] = f"{CODE_FOLDER}/{file.relative_to(base).as_posix()}{sign}{name}"
    return OwnCode(files, names)


def _beside(module: str, folder: Path) -> Path | None:
    """Return the folder from which Python would import ``module`` here, unless it is installed."""
    top = module.partition(".")[0]
    if any((folder / name).exists() for name in (top, f"{top}.py")):
        return folder
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return None
    places = [] if spec is None else [spec.origin, *(spec.submodule_search_locations or ())]
    own = [Path(place) for place in places if place and Path(place).is_absolute() and _is_of_a_path(Path(place))]
    return own[0].parent if own else None


def _is_of_a_path(place: Path) -> bool:
    """Return whether a module was found in a folder of PYTHONPATH."""
    folders = [Path(folder).absolute() for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]
    return any(place.is_relative_to(folder) for folder in folders)


def _with_imports(root: Path) -> Iterator[Path]:
    """Yield a file and the files beside it that it imports, directly or through others.

    Python searches the folder of the root first. Files that are imported under a name made at run time are not found.
    """
    # Files may import each other in a circle.
    waiting, seen = [root], set[Path]()
    while waiting:
        file = waiting.pop()
        if file in seen:
            continue
        seen.add(file)
        yield file
        for module in _imports_of(file, root.parent):
            waiting += _files_of(module, root.parent)


def _imports_of(file: Path, top: Path) -> Iterator[tuple[str, ...]]:
    """Yield the modules that a file may import, as the parts of their names below ``top``."""
    content = _read(file)
    if len(content) > MAX_BYTES:
        return  # The job is refused for it.
    try:
        tree = ast.parse(content)
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # Python will say it where it imports the file.
        return
    package = file.relative_to(top).parent.parts
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (tuple(alias.name.split(".")) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: max(0, len(package) - node.level + 1)] if node.level else ()
            module = (*above, *(node.module.split(".") if node.module else ()))
            yield module
            yield from ((*module, alias.name) for alias in node.names)


def _files_of(module: tuple[str, ...], top: Path) -> Iterator[Path]:
    """Yield the files that Python reads to import a module: those of its packages, and its own."""
    for count in range(1, len(module) + 1):
        place = top.joinpath(*module[:count])
        yield from (file for file in (place / "__init__.py", place.with_name(f"{place.name}.py")) if file.is_file())


def _read(file: Path) -> bytes:
    try:
        return read_bytes(file, limit=MAX_CODE_BYTES)
    except OSError as error:
        raise UsageError(f"{file}: cannot be sent: {error.strerror or error}; {IN_THE_IMAGE}") from error
