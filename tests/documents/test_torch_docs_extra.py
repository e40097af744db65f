"""The pages that are made from the program need nothing that `make docs` does not install."""

import re
import subprocess
import sys
import tomllib

import pytest

from scripts.site.documents import ROOT

PROGRAM = """
import importlib.machinery, importlib.metadata as metadata, json, re, sys
from pathlib import Path
from packaging.requirements import Requirement

def plain(name):
    return re.sub(r"[-_.]+", "-", name).lower()

def needed(extras, own):
    found, waiting = set(), [("mtrain", extra) for extra in ("", *extras)] + [(name, "") for name in packages]
    while waiting:
        name, extra = waiting.pop()
        if (name, extra) in found:
            continue
        found.add((name, extra))
        try:
            lines = own[extra] if name == "mtrain" else metadata.requires(name) or ()
        except metadata.PackageNotFoundError:
            continue
        for each in map(Requirement, lines):
            if each.marker is None or each.marker.evaluate({"extra": extra}):
                waiting += [(plain(each.name), wanted) for wanted in ("", *each.extras)]
    return {name for name, _ in found}

extras, own = json.loads(sys.argv[1])
packages = [folder.name for folder in Path("packages").iterdir()]
allowed, owners = needed(extras, own) | {"mtrain", *packages}, metadata.packages_distributions()
find, from_name = importlib.machinery.PathFinder.find_spec, metadata.Distribution.from_name

def find_allowed(name, path=None, target=None):
    names = {plain(each) for each in owners.get(name.partition(".")[0], ())}
    return find(name, path, target) if not names or names & allowed else None

def named(name):
    if plain(name) in allowed:
        return from_name(name)
    raise metadata.PackageNotFoundError(name)

importlib.machinery.PathFinder.find_spec = find_allowed
metadata.Distribution.from_name = named
sys.path.insert(0, "scripts/site")
import commands, errors, reference, shipped
for text in (commands.page(), errors.page(), reference.page(Path("mtrain"), "x"), shipped.page()):
    assert len(text) > 1000
print(sorted(name for name in ("transformers", "paddle", "keras", "onnx") if name in sys.modules))
"""
"""Makes the pages in a process that finds only the distributions that the extras bring, whatever else is installed."""


@pytest.mark.job
def test_the_generated_pages_need_only_the_extras_that_make_docs_installs() -> None:
    import json

    rule = (ROOT / "Makefile").read_text(encoding="utf-8").partition("/.installed-docs: ")[2]
    extras = re.search(r"scripts/install \S+ ([\w,]+) \$\(EVERY\)", rule)[1].split(",")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    own = {"": project["dependencies"], **project["optional-dependencies"]}
    command = [sys.executable, "-c", PROGRAM, json.dumps([extras, own])]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "['transformers']", "nothing that the extras do not bring was found"
