"""Environments made of links to what is installed already: what ``pip install mtrain`` brings, or all but mtrain's packages."""

import re
import subprocess
import sys
import sysconfig
import tomllib
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

from tests.sources import ROOT

FRAMEWORK = "torch"
FOR_PAGES = {"jinja2", "fsspec"}
"""Torch requires these and imports them late; they are left out, since mtrain must do without them."""
CORE = ("mtrain", "mtrain-trace")
"""The distributions of an installation without a package."""


def base_requirements() -> list[str]:
    """Return mtrain's requirements without an extra, as ``pyproject.toml`` lists them."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return [Requirement(line).name for line in project["dependencies"]]


def required(names: list[str]) -> set[str]:
    """Return the distributions that ``names`` bring, with those that they require themselves."""
    found: set[str] = set()
    waiting = list(names)
    while waiting:
        name = normal(waiting.pop())
        if name in found or name in FOR_PAGES:
            continue
        try:
            lines = metadata.requires(name) or []
        except metadata.PackageNotFoundError:  # Wanted on another platform, or under another Python.
            continue
        found.add(name)
        needs = [Requirement(line) for line in lines]
        waiting += [need.name for need in needs if need.marker is None or need.marker.evaluate({"extra": ""})]
    return found


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def make(folder: Path, *, framework: str | None = FRAMEWORK, everything: bool = False, mtrain: bool = True) -> Path:
    """Make the environment in ``folder``; return its interpreter.

    Args:
        folder: where; it is made.
        framework: distribution that is there besides mtrain's requirements.
        everything: all libraries that are installed are there, instead of those two.
        mtrain: this checkout's mtrain and mtrain-trace are there, without the other packages; False: nothing of mtrain's.
    """
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", "--symlinks", str(folder)], check=True)
    (site,) = folder.glob("lib/python3*/site-packages")
    if everything:
        for path in Path(sysconfig.get_path("purelib")).iterdir():
            if not path.name.startswith(("mtrain", "__editable__")) and path.suffix != ".pth":
                (site / path.name).symlink_to(path)
    else:
        for name in sorted(required([*base_requirements(), *([framework] if framework else [])])):
            for top, installed in tops(metadata.distribution(name)).items():
                if not (site / top).exists():
                    (site / top).symlink_to(installed)
    if mtrain:
        link_mtrain(site)
    return folder / "bin" / "python"


def tops(distribution: metadata.Distribution) -> dict[str, Path]:
    """Return the files and folders in ``site-packages`` that belong to a distribution, by name."""
    names = {file.parts[0] for file in distribution.files or []} - {"..", "__pycache__"}
    return {name: Path(str(distribution.locate_file(name))) for name in names}


def link_mtrain(site: Path) -> None:
    """Make this checkout's mtrain and mtrain-trace importable, with their entry points."""
    (site / "checkout.pth").write_text(f"{ROOT}\n{ROOT}/packages/mtrain-trace/src\n", encoding="utf-8")
    for name in CORE:
        # The checkout may hold an older description too, which an editable installation leaves there.
        known = [path for found in metadata.distributions(name=name) for path in tops(found).values()]
        info = next(path for path in known if path.suffix == ".dist-info")
        if not (site / info.name).exists():
            (site / info.name).symlink_to(info)
