"""What a stranger may have written is opened, parsed and printed by the functions of ``spec/files``, ``bounds`` and ``terminal`` alone."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.sources import nodes, source_files

READERS = (
    "weights/", "tasks/", "data/", "core/checkpoint/", "spec/importers/", "commands/data.py",
    "mtrain_deploy/exported/", "mtrain_deploy/serving/", "mtrain_deploy/quantising/", "mtrain_language/",
)  # fmt: skip
"""Folders and files that read what others wrote."""
MODULES = {
    "json": {"load", "loads"},
    "os": {"open"},
    "io": {"open"},
    "gzip": {"open"},
    "tarfile": {"open"},
    "zipfile": {"ZipFile"},
    "pickle": {"load", "loads", "Unpickler"},
    "yaml": {"load", "safe_load"},
    "np": {"load", "fromfile", "loadtxt"},
    "marshal": {"load", "loads"},
}
BUILTINS = {"open", "print", "input", "exec", "eval"}
METHODS = {"read_text", "read_bytes"}
EXCEPTIONS = {
    "weights/outline.py": {"json.load", "json.loads", "print"},  # between this process and one of its own
    "weights/backup/copier.py": {"json.loads"},  # lines of its own process
    "weights/backup/worker.py": {"json.loads"},  # that process
    "weights/backup/place.py": {"os.open"},  # a folder, which is flushed
    "weights/torch_files.py": {"zipfile.ZipFile"},  # of bytes in memory, whose members are bounded there
    "weights/writing.py": {"zipfile.ZipFile"},  # writes
    "core/checkpoint/arrays_file.py": {"os.open"},  # of a file that is mapped, after a look at what it is
    "core/checkpoint/format.py": {"os.open"},  # a folder, which is flushed
    "core/checkpoint/sharing.py": {"json.loads"},  # of rank 0
    "data/once_per_host.py": {
        "os.open",
        "open",
        "json.loads",
    },  # /proc, and a file that ranks of this user have written
    "data/images/handwritten.py": {"gzip.open", "np.loadtxt"},  # a file of scikit-learn
    "mtrain_language/meshes/estimate.py": {"json.load", "print"},  # between the starter and this program
    "mtrain_language/meshes/plan.py": {"json.loads"},  # what that program has answered
    "mtrain_language/readers/python_docs.py": {"read_bytes"},  # the standard library's own
    "tasks/own/layout.py": {"json.loads"},  # a name that this process has made
    "tasks/detection/annotations.py": {"json.loads"},
    "tasks/detection/convert.py": {"read_text", "yaml.safe_load"},  # what it has just written itself
    "tasks/detection/image_cache.py": {"np.load"},  # without pickles, of a file that open_file has opened
    "mtrain_deploy/serving/page.py": {"read_text"},  # files of the package
}
"""File -> calls that it may make, each with its reason."""


def calls(file: Path) -> Iterator[str]:
    """Yield the names of forbidden calls in a file, also of functions that it imports by name."""
    imported = {
        alias.asname or alias.name: f"{node.module}.{alias.name}"
        for node in nodes(file)
        if isinstance(node, ast.ImportFrom) and node.module in MODULES
        for alias in node.names
        if alias.name in MODULES[node.module]
    }
    for node in nodes(file):
        match node:
            case ast.Call(func=ast.Name(id=name)) if name in BUILTINS or name in imported:
                yield imported.get(name, name)
            case ast.Attribute(value=ast.Name(id=module), attr=name) if name in MODULES.get(module, ()):
                yield f"{module}.{name}"
            case ast.Call(func=ast.Attribute(attr=name)) if name in METHODS:
                yield name


def files() -> dict[str, Path]:
    found = {name: file for name, file in source_files().items() if name.startswith(READERS)}
    assert all(any(name.startswith(reader) for name in found) for reader in READERS)
    return found


def test_readers_open_parse_and_print_by_the_shared_functions_alone() -> None:
    guilty = {}
    for name, file in files().items():
        found = set(calls(file)) - EXCEPTIONS.get(name, set())
        if found:
            guilty[name] = sorted(found)
    assert guilty == {}, (
        "use files.open_file, read_bytes, read_text, parse_json, and terminal.say; or name the reason for an exception"
    )


def test_each_exception_is_needed() -> None:
    known = files()
    assert {name for name in EXCEPTIONS if not EXCEPTIONS[name] <= set(calls(known[name]))} == set()


@pytest.mark.parametrize(
    "line",
    [
        "open('x')", "import json\njson.load(f)", "from json import loads\nloads(x)", "from json import loads as parse\nparse(x)",
        "import json\nread = json.loads", "path.read_text()", "Path(x).read_bytes()", "print(x)", "import os\nos.open(x, 0)",
        "import pickle\npickle.Unpickler(f)", "import numpy as np\nnp.load(x)", "import yaml\nyaml.safe_load(x)",
    ],
)  # fmt: skip
def test_another_door_is_noticed(line: str, tmp_path: Path) -> None:
    (tmp_path / "x.py").write_text(line)
    assert list(calls(tmp_path / "x.py"))


def test_the_shared_functions_are_no_other_door(tmp_path: Path) -> None:
    (tmp_path / "x.py").write_text(
        "from mtrain.spec.files import *\nread_text(x, limit=1)\nparse_json(x)\nopen_file(x)\nx.open\n"
    )
    assert not list(calls(tmp_path / "x.py"))
