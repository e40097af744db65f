"""Whether the interpreter that will run the ranks can: its version, its mtrain, and its framework. Imports no framework."""

import json
import subprocess
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from typing import get_args

from pydantic import BaseModel

import mtrain
from mtrain.errors import UsageError
from mtrain.spec import plugins, remedies
from mtrain.spec.model import Spec

OLDEST = (3, 11)
PATIENCE_S = 60.0
"""A folder on a network may be slow the first time."""
PROBE = """
import json, sys
from importlib.util import find_spec
found = {"python": list(sys.version_info[:2]), "mtrain": None, "backends": []}
found["missing"] = [name for name in sys.argv[1:] if find_spec(name) is None]
if find_spec("mtrain") is not None:
    import mtrain
    found["mtrain"] = mtrain.__version__
if sys.version_info >= (3, 10):
    from importlib.metadata import entry_points
    found["backends"] = sorted({point.name for point in entry_points(group="mtrain.backends")})
print(json.dumps(found))
"""
"""Runs on any Python 3, in the current folder as a rank does; looks for what the backend needs and imports none of it."""


@dataclass(frozen=True, slots=True)
class Found:
    """What an interpreter has."""

    python: tuple[int, int]
    mtrain: str | None
    missing: tuple[str, ...]
    """Of the modules that were asked for."""
    backends: tuple[str, ...]
    """Names that installed distributions provide."""


def check(spec: Spec) -> None:
    """Look at ``backend.python``, or at this process where it is not given.

    Raises:
        UsageError: ranks could not run there; the message says what to install.
    """
    policy = plugins.read_policy(spec.plugins)
    name, python = spec.backend.name, spec.backend.python
    options = plugins.options("backends", name, spec.backend.options, path="backend.options", policy=policy)
    framework = plugins.made("backends", name, options, policy=policy).framework
    extra = next((e.extra for e in plugins.names("backends", policy=policy) if e.needs == framework and e.extra), None)
    here, there = (_install(extra, framework, python=at) for at in (None, python))
    entry = plugins.find("backends", name, policy=policy)
    library = entry.library or framework
    if python is None:
        if find_spec(framework) is None:
            raise UsageError(
                f"backend.name: {name} runs on {framework}, which is not installed; {_other_framework(options)}install it with: "
                f"{here}, or name an interpreter that has it: -o backend.python=/path/to/python"
            )
        if find_spec(library) is None:
            raise UsageError(
                f"backend.name: {name} needs {library}, which is not installed; {entry.remedy(sys.executable)}"
            )
        return
    found = _look(python, framework, library)
    if found.python < OLDEST:
        raise UsageError(
            f"backend.python: {python} is Python {_dotted(found.python)}, expected {_dotted(OLDEST)} or newer; "
            "make its environment with a newer one"
        )
    if found.mtrain != mtrain.__version__:
        has = "has no mtrain" if found.mtrain is None else f"has mtrain {found.mtrain}"
        raise UsageError(
            f"backend.python: {python} {has}, expected {mtrain.__version__} as here; install it there with: {there}"
        )
    if entry.distribution != plugins.POLICY_FILE and name not in found.backends:
        raise UsageError(
            f"backend.python: {python} has no backend {name!r} (known: {', '.join(found.backends) or 'none'}); "
            f"install {entry.distribution} {entry.version} there as here"
        )
    if framework in found.missing:
        raise UsageError(
            f"backend.python: {python} has no {framework}, which backend {name} runs on; install it there with: {there}"
        )
    if library in found.missing:
        raise UsageError(
            f"backend.python: {python} has no {library}, which backend {name} needs; {entry.remedy(python)}"
        )


def _install(extra: str | None, framework: str, *, python: str | None) -> str:
    """The command that installs what a backend runs on: an extra of mtrain, or for others' backends the framework."""
    if extra:
        return remedies.install(extra, python=python)
    return f"{python} -m pip install {framework}" if python else f"pip install {framework}"


def _other_framework(options: BaseModel) -> str:
    """What to type where the backend runs on another framework too, and that one is installed."""
    field = type(options).model_fields.get("framework")
    choices = get_args(field.annotation) if field is not None else ()
    found = next((choice for choice in choices if find_spec(choice) is not None), None)
    return f"{found} is: -o backend.options.framework={found}; or " if found else ""


def _look(python: str, *modules: str) -> Found:
    try:
        done = subprocess.run(  # noqa: S603 - the interpreter that the spec names
            [python, "-c", PROBE, *modules],
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=True,
        )
        said = json.loads(done.stdout)
        return Found(
            python=tuple(said["python"]),
            mtrain=said["mtrain"],
            missing=tuple(said["missing"]),
            backends=tuple(said["backends"]),
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


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"
