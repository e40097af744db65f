"""Check the interpreter of the ranks: its Python version, its mtrain, and its framework. Imports no framework."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import mtrain
from mtrain.errors import UsageError
from mtrain.spec import remedies
from mtrain.system import interpreter_probe

if TYPE_CHECKING:
    from pydantic import BaseModel

    from mtrain.spec.plugins import PluginEntry
    from mtrain.spec.resolved import Resolved

OLDEST = (3, 11)
PATIENCE_S = 60.0
"""Time in seconds that an interpreter has to answer ``check``. On a network folder the first start may be slow."""
ANSWER_S = 12.0
"""The same where somebody waits for the answer of each host."""
PACKAGES = (
    *("numpy", "pydantic", "pyyaml", "opencv-python-headless", "pillow", "simplejpeg", "safetensors", "scikit-learn"),
    "faster-coco-eval",
)
"""Distributions that influence the computed values, besides the modules that the backend needs."""


def ask(
    python: str | None,
    modules: Sequence[str],
    folder: Path = Path(),
    *,
    packages: Sequence[str] = PACKAGES,
    in_detail: bool = True,
    timeout_s: float = ANSWER_S,
) -> dict[str, Any]:
    """Return the versions and modules of an interpreter, see ``interpreter_probe.probe``; or a mapping with ``error`` alone.

    ``python``: path of the interpreter, which is started in ``folder``; None: the one that runs this code.
    """
    question: dict[str, Any] = {"packages": list(packages), "modules": list(modules), "code": "mtrain"}
    question["in_detail"] = in_detail
    # As a rule the agent runs in the interpreter of the ranks, and can look itself.
    if python is None or os.path.abspath(python) == os.path.abspath(sys.executable):
        return interpreter_probe.probe(**question)
    text = Path(interpreter_probe.__file__).read_text(encoding="utf-8")
    try:
        process = subprocess.run(  # noqa: S603 - the interpreter that the spec names
            [python, "-c", text, json.dumps(question)],
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=True,
            cwd=folder,
        )
        return dict(json.loads(process.stdout))
    except FileNotFoundError:
        missing = python if folder.is_dir() else str(folder)
        return {"error": f"{missing} is not there"}
    except OSError as error:
        return {"error": f"{python}: {error.strerror or error}"}
    except subprocess.TimeoutExpired:
        return {"error": f"{python} did not answer within {timeout_s:g} s"}
    except subprocess.CalledProcessError as error:
        return {"error": f"{python}: {(error.stderr.strip().splitlines() or [f'exit code {error.returncode}'])[-1]}"}
    except (ValueError, TypeError):
        return {"error": f"{python} does not answer as Python does"}


def check(job: "Resolved") -> None:
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
    modules = [framework, library, "mtrain_trace"]
    facts = ask(python, modules, packages=[framework], in_detail=False, timeout_s=PATIENCE_S)
    if "error" in facts:
        raise UsageError(
            f"backend.python: {facts['error']}; give the path of the Python interpreter of the ranks, or leave it out to use "
            f"{sys.executable}"
        )
    found, installed = facts["modules"], (facts["code"] or {}).get("version")
    for refused, why in (
        (
            tuple(_numbers(facts["python"]))[:2] < OLDEST,
            f"is Python {facts['python']}, expected {OLDEST[0]}.{OLDEST[1]} or newer; make its environment with a newer one",
        ),
        (
            installed != mtrain.__version__,
            f"has {f'mtrain {installed}' if installed else 'no mtrain'}, expected {mtrain.__version__} as here; install it with: {there}",
        ),
        (
            found.get("mtrain_trace") is None,
            f"has no mtrain-trace, which mtrain needs; install both there with: {there}",
        ),
        (
            not entry.is_local and name not in facts["backends"],
            f"has no backend {name!r} (known: {', '.join(facts['backends']) or 'none'}); install {entry.provider} there as here",
        ),
        (
            found.get(framework) is None,
            f"has no {framework}, which backend {name} runs on; install it there with: {there}",
        ),
        (
            found.get(library) is None,
            f"has no {library}, which backend {name} needs; {entry.remedy(python)}",
        ),
    ):
        if refused:
            raise UsageError(f"backend.python: {python} {why}")
    if framework in facts["packages"]:
        _check_version(entry, facts["packages"][framework], where=f"backend.python: {python}: backend {name}")


def _check_version(entry: "PluginEntry", found: str, *, where: str) -> None:
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


def _other_framework(options: "BaseModel") -> str:
    """Return a part of an error message that suggests an installed framework on which the backend can run too.

    It is empty if the backend offers no choice of frameworks, or none of them is installed.
    """
    field = type(options).model_fields.get("framework")
    choices = get_args(field.annotation) if field is not None else ()
    installed = next((choice for choice in choices if find_spec(choice) is not None), None)
    return f"{installed} is: -o backend.options.framework={installed}; or " if installed else ""
