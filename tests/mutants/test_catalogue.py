"""Every fault of the catalogue still fits the source, so that `make mutants` plants it."""

import ast
import shutil
from collections import Counter
from pathlib import Path

import pytest

from tests.mutants.catalogue import CATALOGUE, ROOT, Fault, Stale, read

FAULTS = read()
LEAST = 4
"""Number of faults of each folder and module of mtrain."""
WITHOUT_FAULTS = {"__init__", "__main__", "__pycache__", "keras", "launchers"}
"""Rooms that compute nothing, or next to it."""


def test_every_fault_is_found_once_and_leaves_python_that_can_be_parsed(tmp_path: Path) -> None:
    wrong = []
    for fault in FAULTS:
        target = tmp_path / fault.file
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / fault.file, target)
        try:
            if fault.apply(tmp_path) == target.read_text(encoding="utf-8"):
                wrong.append(f"{fault.id}: changes nothing")
            if target.suffix == ".py":
                ast.parse(target.read_text(encoding="utf-8"))
        except (Stale, SyntaxError) as error:
            wrong.append(f"{fault.id}: {error}")
    assert not wrong, "\n".join(wrong)


def test_every_killer_is_a_test_that_is_there() -> None:
    wrong = []
    for fault in FAULTS:
        for killer in fault.killers:
            file, _, name = killer.partition("::")
            function = name.rpartition("::")[2].partition("[")[0]
            if not (ROOT / file).exists() or (function and f"def {function}(" not in (ROOT / file).read_text()):
                wrong.append(f"{fault.id}: {killer}")
    assert not wrong, "\n".join(wrong)


def test_names_are_unique_and_every_fault_has_a_killer() -> None:
    names = [fault.id for fault in FAULTS]
    assert len(set(names)) == len(names)
    assert [fault.id for fault in FAULTS if not fault.killers] == []


def test_every_fault_is_in_the_file_of_its_room() -> None:
    assert not CATALOGUE.with_suffix(".toml").exists(), "each room has a file of its own"
    for file in sorted(CATALOGUE.glob("*.toml")):
        assert {fault.room for fault in read(file)} == {file.stem}, file.name


def test_every_room_of_mtrain_has_faults() -> None:
    rooms = {path.stem for path in (ROOT / "mtrain").iterdir() if path.is_dir() or path.suffix == ".py"}
    rooms |= {path.name for path in ROOT.glob("packages/*/src/mtrain_*") if path.suffix != ".egg-info"}
    counts = Counter(fault.room for fault in FAULTS)
    few = {room: counts[room] for room in rooms - WITHOUT_FAULTS if counts[room] < LEAST}
    assert not few, f"rooms with fewer than {LEAST} faults: {few}"


def test_a_fault_that_no_longer_fits_is_told_with_its_name(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = 1\nx = 1\n")
    fault = Fault(id="mine", area="a", file="a.py", old="x = 1", new="x = 2", killers=("tests",))
    with pytest.raises(Stale, match=r"mine: `old` is found 2 times in a\.py, expected once"):
        fault.apply(tmp_path)
