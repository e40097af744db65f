"""mtrain without its packages, with all libraries: its own verbs work, and every other one names its package and the command."""

import contextlib
import json
import subprocess
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from shlex import quote, split
from typing import NamedTuple

import pytest

import mtrain
from mtrain.spec import packages
from tests.distribution.base_environment import make
from tests.distribution.building import Built
from tests.sources import ROOT
from tests.starts import starts_processes

SCRIPT = Path(__file__).parents[1] / "script" / "scripts" / "train_torch.py"
DRIVER = """
import contextlib, io, json, sys
from mtrain.commands import main
for words in json.loads(sys.argv[1]):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(words)
    print(json.dumps([code, out.getvalue(), err.getvalue()]))
"""
OWN = (
    "train",
    "run",
    "compare",
    "plan",
    "doctor",
    "stacks",
    "config",
    "data",
    "plugins",
    "evaluate",
    "predict",
    "checkpoint",
    "weights",
)
OTHERS = [
    (package, name.split("."))
    for package, each in packages.PACKAGES.items()
    for name in each.brings.get("commands", ())
]
TINY = ("-c", "digits", "-o", "train.updates=2", "train.epochs=null", "report.name=tiny")


class Answer(NamedTuple):
    """What a command has said."""

    code: int
    out: str
    err: str


def answers(python: Path, here: Path, commands: Sequence[Sequence[str]]) -> list[Answer]:
    """Run commands one after the other in one process of an environment."""
    command = [python, "-c", DRIVER, json.dumps(commands)]
    done = subprocess.run(command, cwd=here, capture_output=True, text=True, check=False, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    return [Answer(*json.loads(line)) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
@starts_processes
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment into which this clone's mtrain and mtrain-trace are installed."""
    return make(tmp_path_factory.mktemp("clone") / "venv", everything=True)


@pytest.fixture(scope="module")
@starts_processes
def wheels(built: Mapping[str, Built], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment with the wheels of mtrain and mtrain-trace."""
    python = make(tmp_path_factory.mktemp("wheels") / "venv", everything=True, mtrain=False)
    (site,) = python.parents[1].glob("lib/python3*/site-packages")
    for name in ("mtrain", "mtrain_trace"):
        with contextlib.closing(zipfile.ZipFile(built[name].wheel)) as archive:
            archive.extractall(site)
    return python


def check_others(python: Path, here: Path, command: str) -> None:
    found = answers(python, here, [words for _, words in OTHERS])
    for (package, words), answer in zip(OTHERS, found, strict=True):
        place = command.format(package=package, PACKAGE=package.upper())
        line = f"error: {' '.join(words)} is a command of {package}, which is not installed: pip install {place}\n"
        assert answer == (2, "", line)


@pytest.mark.smoke
def test_every_other_verb_names_its_package_and_its_folder_in_the_clone(clone: Path, tmp_path: Path) -> None:
    mark = "'" if " " in str(ROOT) else ""
    check_others(clone, tmp_path, f"-e {mark}{ROOT}/packages/{{package}}{mark}")


def test_without_a_clone_the_wheel_is_named(wheels: Path, tmp_path: Path) -> None:
    check_others(wheels, tmp_path, "WHEEL-OF-{PACKAGE}")


@pytest.mark.smoke
def test_the_verbs_of_the_core_are_there(clone: Path, tmp_path: Path) -> None:
    commands = [["--help"], *([verb, "--help"] for verb in OWN), ["train", *TINY, "--dry-run"], ["plan", *TINY]]
    front, *others, dry, plan = answers(clone, tmp_path, commands)
    assert [answer.code for answer in (front, *others, dry, plan)] == [0] * len(commands)
    listed = [
        line.split()[0] for line in front.out.splitlines() if line.startswith("  ") and "Not installed" not in line
    ]
    assert set(OWN) <= set(listed)
    assert not {words[0] for _, words in OTHERS if len(words) == 1} & set(listed)
    assert all(verb in answer.out for verb, answer in zip(OWN, others, strict=True))
    assert "mtrain.rank.worker" in dry.out
    assert "mtrain.rank.worker" in plan.out
    assert dry.err == plan.err == ""


@pytest.mark.smoke
def test_what_a_spec_asks_of_a_package_names_it(clone: Path, tmp_path: Path) -> None:
    cases = {
        "mtrain-clusters": ["cluster.name=slurm"],
        "mtrain-ui": ["report.reporters.wandb=true"],
        "mtrain-language": ["data.format=text"],
    }
    found = answers(clone, tmp_path, [["plan", "-c", "digits", "-o", *values] for values in cases.values()])
    for package, answer in zip(cases, found, strict=True):
        assert answer.code == 2, answer
        assert (
            f"of {package}, which is not installed: pip install -e {quote(f'{ROOT}/packages/{package}')}" in answer.err
        )
        assert answer.err.count("\n") == 1


def test_the_doctor_has_a_line_for_each_package_that_is_absent(clone: Path, tmp_path: Path) -> None:
    (answer,) = answers(clone, tmp_path, [["doctor", "--quick", "--json", "-b", "solo"]])
    rows = {row["check"]: row for row in json.loads(answer.out)["findings"]}
    assert answer.code == 0
    assert rows["mtrain-trace"]["text"] == f"version {mtrain.__version__}"
    assert {rows[package]["state"] for package in packages.PACKAGES} == {"absent"}
    assert all(
        split(rows[package]["remedy"])[-1].endswith(f"{ROOT}/packages/{package}") for package in packages.PACKAGES
    )


def test_jobs_are_trained_evaluated_used_and_compared(clone: Path, tmp_path: Path) -> None:
    commands = [
        ["train", *TINY, "--backend", "ddp", "--nproc-per-node", "2"],
        ["evaluate", "runs/tiny"],
        ["data", "make", "digits", "made"],
        ["predict", "made/images", "--run", "runs/tiny"],
        ["run", "--backend", "solo", "--name", "script", str(SCRIPT)],
        ["compare", "-c", "digits", "--backends", "solo,ddp", "--updates", "2", "--rounds", "0"],
    ]
    found = answers(clone, tmp_path, commands)
    assert [answer.code for answer in found] == [0] * len(commands), found
    for file in ("tiny/summary.json", "script/summary.json", "compare/compare.json"):
        assert (tmp_path / "runs" / file).is_file()
    assert not any("Traceback" in answer.out + answer.err for answer in found)
