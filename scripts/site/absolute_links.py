"""Rewrite the links of a README for a package index, where relative ones lead nowhere: python -m scripts.site.absolute_links FOLDER

FOLDER is a copy of the checkout, whose README.md is overwritten. The address is that of `[project.urls]`, the version that of
the package: links lead to the files of the tag `v<version>`.
"""

import re
import sys
import tomllib
from pathlib import Path

from scripts.site.documents import change_links

_IMAGES = (".svg", ".png", ".jpg")


def absolute(text: str, *, address: str, version: str) -> str:
    """Return a document at the top of the repository with links that lead there from anywhere."""

    def change(target: str) -> str:
        if re.match(r"[a-z]+:|#", target):
            return target
        form = "raw" if target.endswith(_IMAGES) else "blob"
        return f"{address}/{form}/v{version}/{target}"

    return change_links(text, change)


def main() -> None:
    """Rewrite README.md of a folder."""
    folder = Path(sys.argv[1])
    project = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (version,) = re.findall(r'^__version__ = "(.*)"$', (folder / "mtrain/__init__.py").read_text("utf-8"), re.MULTILINE)
    readme = folder / "README.md"
    text = absolute(readme.read_text(encoding="utf-8"), address=project["urls"]["Repository"], version=version)
    readme.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
