"""Commands that install missing packages, worded for a person to type. Imports no framework."""

import shlex
from collections.abc import Sequence
from functools import cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from mtrain.errors import UsageError


@cache
def checkout() -> Path | None:
    """Return the folder of the clone from which mtrain runs; None if it was installed as a wheel."""
    folder = Path(__file__).parents[2]
    return folder if (folder / "pyproject.toml").is_file() else None


def install(extra: str, *, python: str | None = None) -> str:
    """Return the command that installs the requirements of an extra of mtrain, for example ``pip install -e '.[ddp]'``.

    Outside a clone the requirements are listed one by one, because mtrain is on no package index under its name.

    Args:
        extra: name of an extra in ``pyproject.toml``, or several with commas between them; empty: mtrain itself.
        python: interpreter to install into; None: the one whose ``pip`` the shell finds.
    """
    pip = f"{shlex.quote(python)} -m pip install" if python else "pip install"
    folder = checkout()
    if folder is None:
        return f"{pip} {shlex.join(requirements(extra)) if extra else 'WHEEL-OF-MTRAIN'}"
    # A named interpreter may be called from another folder, where only a full path leads to the clone.
    where = f"{'.' if python is None and folder == Path.cwd() else folder}{f'[{extra}]' if extra else ''}"
    return f"{pip} -e '{where}'"


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
    """Return the requirements of an extra of the installed mtrain; the extra's own name if they are not known."""
    try:
        lines = [line.partition(";") for line in metadata.requires("mtrain") or []]
    except metadata.PackageNotFoundError:
        return [extra]
    wanted = {f'extra == "{one}"' for one in extra.split(",")}
    needs = [need.strip() for need, _, marker in lines if marker.replace("'", '"').strip() in wanted]
    return needs or extra.split(",")
