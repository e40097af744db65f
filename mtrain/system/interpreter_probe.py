"""Probe an interpreter for versions of packages and for modules that it can find, without importing them.

This file uses the standard library alone, so that any Python 3 can run its text (``python -c TEXT JSON``), even without
mtrain.
"""

import hashlib
import json
import platform
import re
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Dict, Iterable, List, Optional, Set  # noqa: UP035 - older interpreters must read this

CODE = (".py", ".pyi", ".toml", ".yml")
"""Suffixes of the files that determine a package's behaviour."""


def probe(packages: List[str], modules: List[str], code: str, *, in_detail: bool) -> Dict[str, Any]:  # noqa: UP006
    """Return versions of ``packages``, providers of ``modules``, names of backends, and what is known of the package ``code``.

    ``packages``: name -> version, for those that are installed. ``modules``: name -> distributions with versions, ""
    where they are unknown, None where the module cannot be found. Without ``in_detail`` the distributions of modules and the
    digest of ``code`` are left out: both read many files.
    """
    versions: Dict[str, str] = {}  # noqa: UP006
    backends: List[str] = []  # noqa: UP006
    provided = {name: "" if _is_there(name) else None for name in modules}
    if sys.version_info >= (3, 10):  # noqa: UP036 - any Python may run this
        from importlib import metadata

        for name in packages:
            try:
                versions[name] = metadata.version(name)
            except metadata.PackageNotFoundError:
                continue
        backends = sorted({point.name for point in metadata.entry_points(group="mtrain.backends")})
        found = [name for name in modules if provided[name] is not None] if in_detail else []
        provided.update(_providers(found, metadata.distributions()))
    return {
        "executable": sys.executable,
        "python": platform.python_version(),
        "packages": versions,
        "modules": provided,
        "backends": backends,
        "code": probe_code(code, in_detail=in_detail),
    }


def _providers(modules: List[str], distributions: Iterable[Any]) -> Dict[str, str]:  # noqa: UP006
    """Return the distributions of each module that has any, with versions, as ``importlib.metadata.packages_distributions`` does.

    That function parses the metadata and every path of all that is installed, which takes most of a host's preflight.
    """
    providers: Dict[str, Set[str]] = {}  # noqa: UP006
    for each in distributions:
        declared = (each.read_text("top_level.txt") or "").split()
        paths = "" if declared else each.read_text("RECORD") or each.read_text("SOURCES.txt") or ""
        for name in modules:
            line = r"^%s(/[^,\n]*)?\.py(,|$)" % re.escape(name)  # noqa: UP031
            if name in declared or (name in paths and re.search(line, paths, re.MULTILINE)):
                providers.setdefault(name, set()).add("%s %s" % (each.metadata["Name"], each.version))  # noqa: UP031
    return {name: ", ".join(sorted(found)) for name, found in providers.items()}


def _is_there(name: str) -> bool:
    spec = find_spec(name)
    return spec is not None and spec.origin is not None  # a folder without files is no package


def probe_code(package: str, *, in_detail: bool) -> Optional[Dict[str, Any]]:  # noqa: UP006, UP045
    """Return the folder of a package, its version, and ``in_detail`` a digest of its source files; None: it is not installed."""
    module = find_spec(package)
    if module is None or not module.submodule_search_locations:
        return None
    folder = Path(next(iter(module.submodule_search_locations)))
    total = hashlib.sha256()
    for file in sorted(file for file in folder.rglob("*") if file.suffix in CODE) if in_detail else ():
        total.update(("%s\0" % file.relative_to(folder).as_posix()).encode())  # noqa: UP031
        total.update(hashlib.sha256(file.read_bytes()).digest())
    try:
        version = getattr(__import__(package), "__version__", None)
    except Exception:  # an interpreter that is too old for it
        version = None
    return {"folder": str(folder), "digest": total.hexdigest(), "version": version}


if __name__ == "__main__":
    print(json.dumps(probe(**json.loads(sys.argv[1]))))
