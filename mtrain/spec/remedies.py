"""Commands that install missing packages, worded for a person to type. Imports no framework."""

import re
import shlex
from collections.abc import Sequence
from functools import cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from mtrain.errors import UsageError

PACKAGES = ("packages/mtrain-trace",)
"""Folders of a clone with the distributions that mtrain requires. No index has them, so each command names them besides mtrain."""


@cache
def checkout() -> Path | None:
    """Return the folder of the clone from which mtrain runs; None if it was installed as a wheel."""
    folder = Path(__file__).parents[2]
    return folder if all((folder / package / "pyproject.toml").is_file() for package in PACKAGES) else None


def install(extra: str, *, python: str | None = None) -> str:
    """Return the command that installs an extra of mtrain, ``pip install -e packages/mtrain-trace -e '.[ddp]'`` for example.

    Outside a clone the requirements are listed one by one, because mtrain is on no package index under its name.

    Args:
        extra: name of an extra in ``pyproject.toml``, or several with commas between them; empty: mtrain itself.
        python: interpreter to install into; None: the one whose ``pip`` the shell finds.
    """
    pip = f"{shlex.quote(python)} -m pip install" if python else "pip install"
    folder = checkout()
    if folder is None:
        return f"{pip} {shlex.join(requirements(extra)) if extra else 'WHEEL-OF-MTRAIN-TRACE WHEEL-OF-MTRAIN'}"
    # A named interpreter may be called from another folder, where only a full path leads to the clone.
    is_here = python is None and folder == Path.cwd()
    own = f"{'.' if is_here else folder}{f'[{extra}]' if extra else ''}"
    places = [*(package if is_here else str(folder / package) for package in PACKAGES), own]
    return f"{pip} {' '.join(f'-e {shlex.quote(place)}' for place in places)}"


def need(modules: Sequence[str], *, what: str, extra: str) -> None:
    """Refuse to begin something whose modules are not installed. They are looked up, not imported.

    Raises:
        UsageError: one is missing; the message names the extra that installs it.
    """
    missing = [module for module in modules if find_spec(module) is None]
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        raise UsageError(
            f"{what} needs {', '.join(missing)}, which {verb} not installed; install with {install(extra)}"
        )


def requirements(extra: str) -> list[str]:
    """Return the requirements of extras of the installed mtrain; their own names if they are not known.

    Where an extra includes another one, that one's requirements are returned: no index has mtrain.
    """
    try:
        lines = [line.partition(";") for line in metadata.requires("mtrain") or []]
    except metadata.PackageNotFoundError:
        return [extra]
    extras, needs = extra.split(","), dict[str, None]()
    for name in extras:  # It grows by those that are included.
        for need in (
            need.strip() for need, _, marker in lines if marker.replace("'", '"').strip() == f'extra == "{name}"'
        ):
            if included := re.fullmatch(r"mtrain\[(.+)\]", need):
                extras += [one for one in included[1].split(",") if one not in extras]
            else:
                needs[need] = None
    return list(needs) or extra.split(",")
