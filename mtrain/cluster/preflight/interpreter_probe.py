"""What an interpreter has: versions, and which modules it can find. Imports nothing that it looks for.

Uses the standard library alone, so that its text can be run by any Python 3 (``python -c TEXT JSON``), one without mtrain too.
"""

import hashlib
import json
import platform
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Dict, List, Optional  # noqa: UP035 - older interpreters must read this

CODE = (".py", ".pyi", ".toml", ".yml")
"""Endings of the files of which a package's behaviour is made."""


def look(packages: List[str], modules: List[str], code: str) -> Dict[str, Any]:  # noqa: UP006
    """Versions of ``packages`` and of what provides ``modules`` (None: cannot be found), and the source of the package ``code``."""
    versions = {}
    provided = {name: None if find_spec(name) is None else "" for name in modules}
    if sys.version_info >= (3, 10):  # noqa: UP036 - any Python may run this
        from importlib import metadata

        for name in packages:
            try:
                versions[name] = metadata.version(name)
            except metadata.PackageNotFoundError:
                continue
        distributions = metadata.packages_distributions()
        for name in (name for name in modules if provided[name] is not None):
            found = sorted(set(distributions.get(name, [])))
            provided[name] = ", ".join(f"{each} {metadata.version(each)}" for each in found)
    return {
        "executable": sys.executable,
        "python": platform.python_version(),
        "packages": versions,
        "modules": provided,
        "code": look_at_code(code),
    }


def look_at_code(package: str) -> Optional[Dict[str, Any]]:  # noqa: UP006, UP045
    """Folder and digest of the source files of a package; None: it is not there."""
    found = find_spec(package)
    if found is None or not found.submodule_search_locations:
        return None
    folder = Path(next(iter(found.submodule_search_locations)))
    total = hashlib.sha256()
    for file in sorted(file for file in folder.rglob("*") if file.suffix in CODE):
        total.update(("%s\0" % file.relative_to(folder).as_posix()).encode())  # noqa: UP031
        total.update(hashlib.sha256(file.read_bytes()).digest())
    return {"folder": str(folder), "digest": total.hexdigest()}


if __name__ == "__main__":
    print(json.dumps(look(**json.loads(sys.argv[1]))))
