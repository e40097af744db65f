"""References to a user's own code in a spec: ``PATH.py:Name`` or ``package.module:Name``.

A model, a data set, a metric or a reporter may be named by such a text in place of a plugin. The starter looks at the file without
running it (``look``); only ranks import it (``import_object``).
"""

import ast
import importlib
import importlib.util
import os
import sys
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

from mtrain.errors import PluginError
from mtrain.spec.files import read_bytes
from mtrain.spec.suggest import hint

PLUGIN = "own"
"""Name of the model, data set and reporter plugins that stand for what a reference names."""
KINDS = ("models", "datasets", "reporters")
"""Kinds of plugins in whose place a reference may be given."""
MAX_CODE_BYTES = 1 << 20
"""Largest Python file of a user that is read, in bytes. Parsing takes up to 500 times that in memory."""
FORM = "expected PATH.py:Name, such as ./nets.py:MyNet, or package.module:Name"


@dataclass(frozen=True, slots=True)
class May:
    """Metadata of a key of a spec whose text, or each text of its list or key of its mapping, may be a reference."""

    files: tuple[str, ...] = ()
    """Suffixes of files that may be named instead, relative to the spec. Reading one runs no code."""


@dataclass(frozen=True, slots=True)
class Reference:
    """The place of a class or function."""

    text: str
    file: Path | None
    """The file that defines it; None: ``module`` is imported by its name."""
    module: str
    name: str

    @property
    def words(self) -> str:
        """The place in words, for people."""
        return f"{self.name} of {self.file or self.module}"


@dataclass(frozen=True, slots=True)
class Parameters:
    """The parameters of a class or function by name, as its source text states them."""

    names: tuple[str, ...]
    required: tuple[str, ...]
    open: bool
    """Whether it takes any further names, as ``**options`` does."""


def is_reference(text: object) -> bool:
    """Return whether the text has the form of a reference, right or wrong, and not that of a plugin's name."""
    return isinstance(text, str) and (":" in text or "/" in text or text.endswith(".py"))


@lru_cache(maxsize=64)
def parse(text: str) -> Reference:
    """Return the parts of a reference.

    Raises:
        PluginError: the text has another form.
    """
    place, _, name = text.rpartition(":")
    if not place or not name.isidentifier():
        example = f"; name the class or function in it: {text}:MyNet" if text.endswith(".py") else ""
        raise PluginError(f"given {text!r}, {FORM}{example}")
    if place.endswith(".py"):
        path = Path(place).expanduser().absolute()
        return Reference(text, path, path.stem, name)
    if not all(part.isidentifier() for part in place.split(".")):
        raise PluginError(f"given {text!r}, {FORM}")
    return Reference(text, None, place, name)


def make_absolute(text: str, folder: Path, *, files: tuple[str, ...] = ()) -> str:
    """Return a reference with its path absolute, taken from ``folder`` if it is relative; any other text unchanged.

    ``files``: see ``May.files``.
    """
    if files and text.lower().endswith(files):
        return str((folder / Path(text).expanduser()).resolve())
    place, sign, name = text.rpartition(":")
    path = place if sign else name
    if not is_reference(text) or not path.endswith(".py"):
        return text
    whole = (folder / Path(path).expanduser()).resolve()
    return f"{whole}{sign}{name if sign else ''}"


# ------------------------------------------------------------------------------------------- looking without running
def look(reference: Reference) -> Parameters | None:
    """Check from its source text that a reference exists, and return its parameters; None if the text does not say.

    Raises:
        PluginError: the file is missing or not Python, has no such name, or the module is not installed.
    """
    if reference.file is None:
        top = reference.module.partition(".")[0]
        if importlib.util.find_spec(top) is None and not (Path(top).exists() or Path(f"{top}.py").exists()):
            raise PluginError(
                f"{reference.text}: there is no module {top!r} here; install it, or name a file, PATH.py:Name"
            )
        return None
    statement = _find(_source(reference.file), reference)
    return _parameters(statement)


def _source(file: Path) -> ast.Module:
    try:
        return parsed_python(file)
    except OSError as error:
        what = (error.strerror or str(error)).lower()
        raise PluginError(
            f"{str(file)[:300]}: {what}; name an existing Python file, relative to the spec or absolute"
        ) from error
    except ValueError as error:
        raise PluginError(str(error)) from error


def parsed_python(file: Path) -> ast.Module:
    """Return the syntax tree of a user's Python file, of at most ``MAX_CODE_BYTES``.

    Raises:
        OSError: it is missing, unreadable, not a regular file, or larger.
        ValueError: it is not valid Python; the message names the place.
    """
    content = read_bytes(file, limit=MAX_CODE_BYTES)
    try:
        # Parsed and never run: only ranks may import a framework.
        tree = ast.parse(content, filename=str(file))
        # Compiling finds more mistakes, such as `return` outside of a function.
        compile(tree, str(file), "exec", dont_inherit=True)
        return tree
    except (SyntaxError, ValueError) as error:
        place = f"{file}:{error.lineno}" if isinstance(error, SyntaxError) else str(file)
        raise ValueError(f"{place}: is not valid Python: {getattr(error, 'msg', error)}") from error
    except (RecursionError, MemoryError) as error:
        raise ValueError(f"{file}: is not valid Python: nested too deeply") from error


def _find(tree: ast.Module, reference: Reference) -> ast.stmt | None:
    """Return the statement that defines the name; None if the text alone cannot tell.

    Raises:
        PluginError: nothing in the file can define it.
    """
    names = dict(_definitions(tree.body))
    if reference.name in names:
        return names[reference.name]
    # Such a file may define any name, and only running it would tell.
    if "*" in names or "__getattr__" in names:
        return None
    raise PluginError(
        f"{reference.file}: defines no {reference.name!r}{hint(reference.name, [name for name in names if name != '*'])}"
    )


def _definitions(body: Sequence[ast.stmt]) -> Iterator[tuple[str, ast.stmt | None]]:
    """Yield (name, definition) for every name that statements at the top of a file may bind."""
    for statement in body:
        if isinstance(statement, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
            yield statement.name, statement
        elif isinstance(statement, ast.Import | ast.ImportFrom):
            for alias in statement.names:
                yield (alias.asname or alias.name).partition(".")[0], None
        else:
            for node in ast.walk(statement):
                if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                    yield node.id, None
                elif isinstance(node, ast.FunctionDef | ast.ClassDef):
                    yield node.name, None
                elif isinstance(node, ast.Import | ast.ImportFrom):
                    yield from ((alias.asname or alias.name, None) for alias in node.names)


def _parameters(statement: ast.stmt | None) -> Parameters | None:
    """Return the parameters of an undecorated function, or of a class that defines ``__init__`` itself; else None."""
    first = 0
    if isinstance(statement, ast.ClassDef):
        own = [item for item in statement.body if isinstance(item, ast.FunctionDef) and item.name == "__init__"]
        if statement.decorator_list or statement.keywords or not own:
            return None
        statement, first = own[0], 1
    if not isinstance(statement, ast.FunctionDef) or statement.decorator_list:
        return None
    plain = [*statement.args.posonlyargs, *statement.args.args][first:]
    without_default = plain[: len(plain) - len(statement.args.defaults)] if statement.args.defaults else plain
    keywords = list(zip(statement.args.kwonlyargs, statement.args.kw_defaults, strict=True))
    return Parameters(
        names=tuple(item.arg for item in [*plain, *statement.args.kwonlyargs]),
        required=tuple(
            [item.arg for item in without_default] + [item.arg for item, value in keywords if value is None]
        ),
        open=statement.args.kwarg is not None,
    )


# -------------------------------------------------------------------------------------------------- running it
def import_object(reference: Reference) -> Any:
    """Import the file or module, and return what the reference names. This runs the user's code.

    Raises:
        PluginError: the import fails, or there is no such name.
    """
    try:
        module = _module(reference)
    except PluginError:
        raise
    except Exception as error:  # A user's file may raise any exception when it is imported.
        raise PluginError(f"{reference.text}: importing it failed: {tell_error(error, reference.file)}") from error
    if not hasattr(module, reference.name):
        names = [name for name in vars(module) if not name.startswith("_")]
        raise PluginError(
            f"{reference.file or reference.module}: defines no {reference.name!r}{hint(reference.name, names)}"
        )
    found = getattr(module, reference.name)
    if not callable(found):
        raise PluginError(f"{reference.text}: is a {type(found).__name__}; expected a class or a function")
    return found


def tell_error(error: BaseException, file: Path | None = None) -> str:
    """Return an exception of a user's code in one line, with the last place in ``file`` that it passed."""
    place, trace = "", error.__traceback__
    while trace is not None:
        if file is not None and trace.tb_frame.f_code.co_filename == str(file):
            place = f" ({file.name}:{trace.tb_lineno})"
        trace = trace.tb_next
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else ''}{place}".rstrip(": ")


def _module(reference: Reference) -> ModuleType:
    """Import the module of a reference; a file is imported once, under its own name where that is free.

    The file's folder is put in front of the search path, as Python does for a script.
    """
    if reference.file is None:
        return importlib.import_module(reference.module)
    for module in list(sys.modules.values()):
        # A model and a data set in one file must see one module, or their classes would exist twice.
        if getattr(module, "__file__", None) == str(reference.file):
            return module
    _source(reference.file)  # a missing file, and one that is not Python, have messages of their own
    folder = str(reference.file.parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    stem = reference.file.stem
    is_free = stem.isidentifier() and stem not in sys.modules and stem not in sys.stdlib_module_names
    name = stem if is_free else f"mtrain_own_{zlib.crc32(os.fsencode(reference.file))}"
    spec = importlib.util.spec_from_file_location(name, reference.file)
    assert spec is not None, "a .py file has a loader"
    assert spec.loader is not None, "a .py file has a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
