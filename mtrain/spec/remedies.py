"""Commands that install missing packages, worded for a person to type. Imports no framework."""

import re
import shlex
from collections.abc import Sequence
from functools import cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from mtrain.errors import UsageError

REQUIRED = ("packages/mtrain-trace",)
"""Folders of a clone with the distributions that mtrain requires. No index has them, so each command names them besides mtrain."""
OWN = "mtrain-"
"""Beginning of the name of every distribution of the clone but mtrain's."""


@cache
def checkout() -> Path | None:
    """Return the folder of the clone from which mtrain runs; None if it was installed as a wheel."""
    folder = Path(__file__).parents[2]
    return folder if all((folder / package / "pyproject.toml").is_file() for package in REQUIRED) else None


def install(extra: str, *, python: str | None = None, anew: bool = False) -> str:
    """Return the command that installs an extra of mtrain, ``pip install -e packages/mtrain-trace -e '.[ddp]'`` for example.

    Outside a clone the requirements are listed one by one, because mtrain is on no package index under its name.

    Args:
        extra: name of an extra in ``pyproject.toml``, or several with commas between them; empty: mtrain itself. A word such as
            ``mtrain-ui``, also with extras in brackets, is that package, for which mtrain itself is there already.
        python: interpreter to install into; None: the one whose ``pip`` the shell finds.
        anew: the package itself is wanted, although it is installed: in another version, or broken.
    """
    pip = f"{shlex.quote(python)} -m pip install" if python else "pip install"
    words = extra.split(",") if extra else []
    packages, extras = (
        [each for each in words if each.startswith(OWN)],
        [each for each in words if not each.startswith(OWN)],
    )
    folder = checkout()
    if folder is None:
        needed = [
            *(requirements(",".join(extras)) if extras else []),
            *(need for each in packages for need in _wheel(each, anew=anew)),
        ]
        return f"{pip} {shlex.join(needed) if needed else 'WHEEL-OF-MTRAIN-TRACE WHEEL-OF-MTRAIN'}"
    # A named interpreter may be called from another folder, where only a full path leads to the clone.
    is_here = python is None and folder == Path.cwd()
    own = f".[{','.join(extras)}]" if extras else "."
    places = [*REQUIRED, own] if extras or not packages else []
    places += [f"packages/{each}" for each in packages]
    if not is_here:
        places = [
            f"{folder}{each.removeprefix('.')}" if each.startswith(".") else str(folder / each) for each in places
        ]
    return f"{pip} {' '.join(f'-e {shlex.quote(place)}' for place in places)}"


def _wheel(package: str, *, anew: bool) -> list[str]:
    """Return what installs a package outside a clone: its wheel, or what it requires where it is installed."""
    name, _, extra = package.rstrip("]").partition("[")
    try:
        metadata.distribution(name)
    except metadata.PackageNotFoundError:
        anew = True
    if anew:
        return [f"WHEEL-OF-{name.upper()}"]
    return requirements(extra, distribution=name)


def require(modules: Sequence[str], *, what: str, extra: str) -> None:
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


def requirements(extra: str, *, distribution: str = "mtrain") -> list[str]:
    """Return the requirements of extras of the installed mtrain, or of a package of it; their own names if they are not known."""
    try:
        lines = [line.partition(";") for line in metadata.requires(distribution) or []]
    except metadata.PackageNotFoundError:
        return [extra]
    # An extra that includes others is written out, because no index has mtrain to resolve them.
    extras, needs = extra.split(","), dict[str, None]()
    for name in extras:  # It grows by those that are included.
        wanted = f'extra == "{name}"' if name else ""
        for need in (need.strip() for need, _, marker in lines if marker.replace("'", '"').strip() == wanted):
            if included := re.fullmatch(r"mtrain\[(.+)\].*", need):
                extras += [one for one in included[1].split(",") if one not in extras]
            elif not need.startswith("mtrain"):
                needs[need] = None
    return list(needs) or [each for each in extra.split(",") if each]
