"""Commands that install what is missing, as a person can type them. Imports no framework."""

import shlex
from functools import cache
from importlib import metadata
from pathlib import Path


@cache
def checkout() -> Path | None:
    """The folder that mtrain runs from where that is a clone of its sources; None: it was installed as a wheel."""
    folder = Path(__file__).parents[2]
    return folder if (folder / "pyproject.toml").is_file() else None


def install(extra: str, *, python: str | None = None) -> str:
    """The command that installs what an extra of mtrain stands for, for example ``pip install -e '.[ddp]'``.

    Outside a clone the requirements are named one by one: no package index has mtrain under its name.

    Args:
        extra: of ``pyproject.toml``; empty: mtrain itself.
        python: the interpreter to install into; None: the pip of the shell.
    """
    pip = f"{shlex.quote(python)} -m pip install" if python else "pip install"
    folder = checkout()
    if folder is None:
        return f"{pip} {shlex.join(requirements(extra)) if extra else 'WHEEL-OF-MTRAIN'}"
    # An interpreter that is named may be called from elsewhere, so that only a full path is right there.
    where = f"{'.' if python is None and folder == Path.cwd() else folder}{f'[{extra}]' if extra else ''}"
    return f"{pip} -e '{where}'"


def requirements(extra: str) -> list[str]:
    """What an extra of the installed mtrain asks for."""
    try:
        lines = [line.partition(";") for line in metadata.requires("mtrain") or []]
    except metadata.PackageNotFoundError:
        return [extra]
    found = [need.strip() for need, _, marker in lines if marker.replace("'", '"').strip() == f'extra == "{extra}"']
    return found or [extra]
