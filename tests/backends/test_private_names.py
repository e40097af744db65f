"""Private names of foreign libraries are used in the ``internals.py`` of each library, and nowhere else."""

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path

from tests.selection import under_torch
from tests.sources import ROOT, nodes, python_files, source_files

pytestmark = under_torch

DOCUMENTED = ("_exit", "_fields")
"""Names of Python's own library that its documentation lists: ``os._exit``, and ``_fields`` of named tuples."""
ALLOWED = {
    "atexit._clear": "a copied process must not do at its end what the one it was copied from would do",
    "atexit._run_exitfuncs": "a copied process ends without leaving Python, after its own functions have run",
    "etree._Element": "the documented class of lxml's elements, which annotations name",
    "getattr(_class_of(config), '_tied_weights_keys', None)": "transformers says nowhere else which arrays a class shares",
    "safetensors.numpy._TYPES": "safetensors has no other table of the types of numbers",
}
"""Private names that are allowed outside of internals.py, each with the reason."""
READERS = ("getattr", "setattr", "hasattr", "delattr")


def sources() -> list[Path]:
    examples = (file for file in python_files(ROOT / "examples") if "build" not in file.parts)
    return sorted([*source_files().values(), *examples])


def is_private(name: str) -> bool:
    return name.startswith("_") and not (name.startswith("__") and name.endswith("__")) and name not in DOCUMENTED


def own_names(files: Iterable[Path]) -> set[str]:
    """Return all private names that mtrain itself defines: functions, classes, variables, attributes of ``self``."""
    names: set[str] = set()
    for file in files:
        for node in nodes(file):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                names.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_self(node.value):
                names.add(node.attr)
    return {name for name in names if is_private(name)}


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def foreign_private_uses(within: Iterable[ast.AST], own: set[str]) -> Iterator[tuple[int, str]]:
    """Yield (line, use) of each private name that is not in ``own``."""
    for node in within:
        if isinstance(node, ast.Attribute) and is_private(node.attr) and node.attr not in own:
            yield node.lineno, ast.unparse(node)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            module = node.module if isinstance(node, ast.ImportFrom) else None
            for alias in node.names:
                path = f"{module}.{alias.name}" if module else alias.name
                if not path.startswith(("mtrain", "__future__")) and any(map(is_private, path.split("."))):
                    yield node.lineno, path
        else:
            for name in _names_as_text(node):
                if is_private(name) and name not in own:
                    yield node.lineno, ast.unparse(node)


def _names_as_text(node: ast.AST) -> Iterator[str]:
    """Yield the attribute that a call of ``getattr`` and the like, ``vars(x)[...]`` or ``x.__dict__[...]`` names."""
    name: ast.expr | None = None
    if (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in READERS
        and len(node.args) > 1
    ):
        name = node.args[1]
    elif isinstance(node, ast.Subscript):
        holder = node.value
        is_vars = isinstance(holder, ast.Call) and isinstance(holder.func, ast.Name) and holder.func.id == "vars"
        if is_vars or (isinstance(holder, ast.Attribute) and holder.attr == "__dict__"):
            name = node.slice
    if isinstance(name, ast.Constant) and isinstance(name.value, str):
        yield name.value


def test_private_names_of_foreign_libraries_are_used_in_internals_only() -> None:
    own = own_names(sources())
    wrong, used = [], set()
    for file in sources():
        if file.name == "internals.py":
            continue
        path = file.relative_to(ROOT)
        for line, use in foreign_private_uses(nodes(file), own):
            if use in ALLOWED:
                used.add(use)
            else:
                wrong.append(f"{path}:{line}: {use}: move it behind a function of the library's internals.py")
    assert not wrong, "\n".join(wrong)
    assert used == set(ALLOWED), "ALLOWED lists what is not used any more"


def test_every_library_with_internals_says_which_versions_were_tested() -> None:
    modules = [file for file in sources() if file.name == "internals.py"]
    folders = {file.parent.name for file in modules}
    assert folders == {
        "_torch",
        "_paddle",
        "_deepspeed",
        "_horovod",
        "_ray",
        "_fsdp",
        "meshes",
        "mtrain_tensorflow",
        "mtrain_sharded",
    }
    for file in modules:
        found = [node for node in nodes(file)[0].body if isinstance(node, ast.Assign)]
        (versions,) = [node.value for node in found if ast.unparse(node.targets[0]) == "TESTED"]
        assert ast.literal_eval(versions), file


def test_the_search_finds_private_names_however_they_are_written() -> None:
    tree = ast.parse(
        "import torch\nfrom torch._C import x\nimport paddle._a\ntorch._b(1)\ngetattr(torch, '_c')\nvars(torch)['_d']\n"
        "torch.__dict__['_e']\nself._own\ntorch.public\ntorch.__version__\n"
    )
    found = [use for _, use in sorted(foreign_private_uses(ast.walk(tree), {"_own"}))]
    assert found == [
        "torch._C.x",
        "paddle._a",
        "torch._b",
        "getattr(torch, '_c')",
        "vars(torch)['_d']",
        "torch.__dict__['_e']",
    ]
