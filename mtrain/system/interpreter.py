"""Check the interpreter of the ranks: its Python version, its mtrain, and its framework. Imports no framework."""

import json
import re
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import get_args

from pydantic import BaseModel

import mtrain
from mtrain.errors import UsageError
from mtrain.spec import remedies
from mtrain.spec.plugins import PluginEntry
from mtrain.spec.resolved import Resolved

OLDEST = (3, 11)
PATIENCE_S = 60.0
"""Time in seconds that an interpreter has to answer. On a network folder the first start may be slow."""
PROBE = """
import json, sys
from importlib.util import find_spec
found = {"python": list(sys.version_info[:2]), "mtrain": None, "backends": []}
trace = find_spec("mtrain_trace")
found["trace"] = trace is not None and trace.origin is not None  # a folder without files is no package
found["missing"] = [name for name in sys.argv[1:] if find_spec(name) is None]
found["versions"] = {}
if find_spec("mtrain") is not None:
    import mtrain
    found["mtrain"] = mtrain.__version__
if sys.version_info >= (3, 10):
    from importlib.metadata import PackageNotFoundError, entry_points, version
    for name in sys.argv[1:]:
        try:
            found["versions"][name] = version(name)
        except PackageNotFoundError:
            pass
    found["backends"] = sorted({point.name for point in entry_points(group="mtrain.backends")})
print(json.dumps(found))
"""
"""Program that reports the versions and modules of an interpreter as JSON.

It runs on any Python 3, in the current folder like a rank, and looks for the modules in its arguments without importing
them."""


@dataclass(frozen=True, slots=True)
class InterpreterFacts:
    """The facts about an interpreter that ``PROBE`` reports."""

    python: tuple[int, int]
    mtrain: str | None
    """Version of mtrain; None: not installed."""
    trace: bool
    """Whether mtrain-trace is installed, which mtrain needs."""
    missing: tuple[str, ...]
    """Modules that were searched and are not installed."""
    backends: tuple[str, ...]
    """Names of the backends that installed distributions provide."""
    versions: Mapping[str, str]
    """Versions of the modules that are distributions of that name."""


def check(job: Resolved) -> None:
    """Check the interpreter ``backend.python``, or that of this process if the spec does not set it.

    Raises:
        UsageError: ranks could not run there; the message says what to install.
    """
    name, python = job.spec.backend.name, job.spec.backend.python
    framework, options = job.backend.framework, job.backend_options
    extra = next((e.extra for e in job.registry.names("backends") if e.needs == framework and e.extra), None)
    here, there = (_install(extra, framework, python=at) for at in (None, python))
    entry = job.registry.find("backends", name)
    library = next(iter(entry.libraries), framework)
    if python is None:
        if find_spec(framework) is None:
            raise UsageError(
                f"backend.name: {name} runs on {framework}, which is not installed; "
                f"{_other_framework(options)}install it with: {here}, or name an interpreter that has it: -o backend.python=/path/to/python"
            )
        if find_spec(library) is None:
            raise UsageError(
                f"backend.name: {name} needs {library}, which is not installed; {entry.remedy(sys.executable)}"
            )
        if entry.oldest is not None:
            with suppress(PackageNotFoundError):
                _check_version(entry, version(framework), where=f"backend.name: {name}")
        return
    facts = _probe(python, framework, library)
    if facts.python < OLDEST:
        raise UsageError(
            f"backend.python: {python} is Python {_dot(facts.python)}, expected {_dot(OLDEST)} or newer; "
            "make its environment with a newer one"
        )
    if facts.mtrain != mtrain.__version__:
        has = "has no mtrain" if facts.mtrain is None else f"has mtrain {facts.mtrain}"
        raise UsageError(
            f"backend.python: {python} {has}, expected {mtrain.__version__} as here; install it there with: {there}"
        )
    if not facts.trace:
        raise UsageError(
            f"backend.python: {python} has no mtrain-trace, which mtrain needs; install both there with: {there}"
        )
    if not entry.is_local and name not in facts.backends:
        raise UsageError(
            f"backend.python: {python} has no backend {name!r} (known: {', '.join(facts.backends) or 'none'}); "
            f"install {entry.provider} there as here"
        )
    if framework in facts.missing:
        raise UsageError(
            f"backend.python: {python} has no {framework}, which backend {name} runs on; install it there with: {there}"
        )
    if library in facts.missing:
        raise UsageError(
            f"backend.python: {python} has no {library}, which backend {name} needs; {entry.remedy(python)}"
        )
    if framework in facts.versions:
        _check_version(entry, facts.versions[framework], where=f"backend.python: {python}: backend {name}")


def _check_version(entry: PluginEntry, found: str, *, where: str) -> None:
    """Refuse a framework that is older than ``entry`` says it needs.

    Raises:
        UsageError: It is.
    """
    if entry.oldest is None or _numbers(found) >= _numbers(entry.oldest):
        return
    raise UsageError(
        f"{where} needs {entry.needs} {entry.oldest} or newer, {found} is installed; use a newer one, or another backend"
    )


def _numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text.partition("+")[0])]


def _install(extra: str | None, framework: str, *, python: str | None) -> str:
    """Return the command that installs a backend's framework, as an extra of mtrain if there is one."""
    if extra:
        return remedies.install(extra, python=python)
    return f"{python} -m pip install {framework}" if python else f"pip install {framework}"


def _other_framework(options: BaseModel) -> str:
    """Return a part of an error message that suggests an installed framework on which the backend can run too.

    It is empty if the backend offers no choice of frameworks, or none of them is installed.
    """
    field = type(options).model_fields.get("framework")
    choices = get_args(field.annotation) if field is not None else ()
    installed = next((choice for choice in choices if find_spec(choice) is not None), None)
    return f"{installed} is: -o backend.options.framework={installed}; or " if installed else ""


def _probe(python: str, *modules: str) -> InterpreterFacts:
    """Run ``PROBE`` with the interpreter ``python``.

    Raises:
        UsageError: the interpreter cannot be run, or does not answer.
    """
    try:
        process = subprocess.run(  # noqa: S603 - the interpreter that the spec names
            [python, "-c", PROBE, *modules],
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=True,
        )
        answer = json.loads(process.stdout)
        return InterpreterFacts(
            python=tuple(answer["python"]),
            mtrain=answer["mtrain"],
            trace=answer["trace"],
            missing=tuple(answer["missing"]),
            backends=tuple(answer["backends"]),
            versions=answer.get("versions", {}),
        )
    except OSError as error:
        reason = error.strerror or str(error)
    except subprocess.TimeoutExpired:
        reason = f"it did not answer within {PATIENCE_S:g} s"
    except subprocess.CalledProcessError as error:
        reason = (error.stderr.strip().splitlines() or [f"exit code {error.returncode}"])[-1]
    except (ValueError, KeyError):
        reason = "it does not answer as Python does"
    raise UsageError(
        f"backend.python: {python!r} cannot be used: {reason}; give the path of the Python interpreter of the ranks, "
        f"or leave it out to use {sys.executable}"
    )


def _dot(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"
