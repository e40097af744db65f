"""What is published: wheel, source distribution, version, and what an installation without a checkout can do."""

import ast
import configparser
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from collections.abc import Mapping, Sequence
from importlib import import_module, metadata
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

import mtrain
from mtrain.spec import packages
from tests.distribution.base_environment import make
from tests.distribution.building import NAMES, Built, project, sources
from tests.sources import ROOT

Wheels = Mapping[str, Built]
INFO = {"METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE", "top_level.txt"}
DATA = {
    "mtrain": {"plugins.toml", "py.typed", "configs/digits.yml", "core/nn.pyi", "backends/_horovod/build.sh"},
    "mtrain_clusters": {"plugins.toml", "py.typed"},
    "mtrain_deploy": {"plugins.toml", "py.typed", "serving/page.html"},
    "mtrain_kit": {"plugins.toml", "py.typed", "templates/backends.py.txt"},
    "mtrain_language": {"plugins.toml", "py.typed"},
    "mtrain_sweep": {"plugins.toml", "py.typed", "spaces/yolov5.yml"},
    "mtrain_tensorflow": {"py.typed"},
    "mtrain_trace": {"py.typed"},
    "mtrain_ui": {"plugins.toml", "py.typed", "pages/assets/report.html"},
}
"""Package -> files beside its modules without which it does not work."""


def contents(wheel: Path) -> Mapping[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def description(packed: Mapping[str, bytes]) -> Mapping[str, bytes]:
    """Return the files of the folder that describes a distribution, without its name."""
    return {name.split("/", 1)[1]: text for name, text in packed.items() if name.split("/")[0].endswith(".dist-info")}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.timeout(300)
def test_a_wheel_has_every_file_of_its_package_its_licence_and_nothing_else(built: Wheels, name: str) -> None:
    packed = contents(built[name].wheel)
    below = "" if name == "mtrain" else f"packages/{name.replace('_', '-')}/src/"
    expected = {
        source.removeprefix(below): (ROOT / source).read_bytes()
        for source in sources()
        if source.startswith(f"{below}{name}/")
    }
    if name == "mtrain_trace":
        expected["mtrain_trace.pth"] = (ROOT / "packages/mtrain-trace/mtrain_trace.pth").read_bytes()
    if name == "mtrain":
        written = "mtrain/spec/typed.py"  # by the build
        expected[written] = packed[written]
        assert b"class Spec" in packed[written]
    info = description(packed)
    assert {file: text for file, text in packed.items() if ".dist-info/" not in file} == expected
    assert {f"{name}/{file}" for file in DATA[name]} <= set(expected)
    assert INFO - {"entry_points.txt"} <= set(info) <= INFO
    assert info["licenses/LICENSE"] == (ROOT / "LICENSE").read_bytes()


@pytest.mark.timeout(300)
def test_every_entry_point_of_a_wheel_names_something_that_it_has(built: Wheels) -> None:
    seen = set()
    for name in NAMES:
        packed = contents(built[name].wheel)
        points = configparser.ConfigParser(delimiters=("=",))
        points.optionxform = str  # type: ignore[assignment,method-assign]
        points.read_string(description(packed).get("entry_points.txt", b"").decode())
        for group in points.sections():
            for point, target in points[group].items():
                module, _, attribute = target.partition(":")
                place = module.replace(".", "/")
                text = packed.get(f"{place}.py") or packed[f"{place}/__init__.py"]
                assert not attribute or attribute in top_names(text), f"{name}: {group} {point} = {target}"
                seen.add((group, point))
    assert {("mtrain.commands", verb) for verb in ("train", "export", "submit", "sweep", "ui", "plugins.test")} <= seen


def top_names(text: bytes) -> set[str]:
    """Return the names that a module defines or imports at its top."""
    names = set()
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return names


@pytest.mark.timeout(300)
def test_wheels_require_each_other_in_exactly_their_version(built: Wheels) -> None:
    """Nothing else of the name lies on an index, and another version was not tested with it."""
    found = {}
    for name in NAMES:
        lines = description(contents(built[name].wheel))["METADATA"].decode().splitlines()
        assert f"Version: {mtrain.__version__}" in lines
        needs = [Requirement(line.partition(": ")[2]) for line in lines if line.startswith("Requires-Dist: ")]
        # A requirement of mtrain without a version is an extra's that names another extra.
        found[name] = {
            need.name: str(need.specifier) for need in needs if need.name.startswith("mtrain") and need.specifier
        }
    pin = f"=={mtrain.__version__}"
    assert found.pop("mtrain_trace") == {}
    assert found.pop("mtrain") == {"mtrain-trace": pin}
    assert all(needs == {"mtrain": pin} for needs in found.values()), found


@pytest.mark.timeout(300)
def test_the_source_distribution_has_the_documents_and_no_tests(built: Wheels) -> None:
    with tarfile.open(built["mtrain"].sdist) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    assert {"LICENSE", "README.md", "CHANGELOG.md", "CITATION.cff", "SECURITY.md", "docs/spec.md"} <= names
    assert not [name for name in names if name.startswith(("tests", "benchmarks", "packages"))]


@pytest.mark.timeout(300)
def test_descriptions_of_the_distributions_pass_the_check_of_package_indexes(built: Wheels) -> None:
    files = [str(file) for each in built.values() for file in each]
    command = [sys.executable, "-m", "twine", "check", "--strict", *files]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_checkout_and_source_distribution_build_the_same_wheel(copy: Path, built: Wheels, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(tmp_path), "--wheel", str(copy)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    direct = contents(wheel)
    assert {name: text for name, text in contents(built["mtrain"].wheel).items() if not name.endswith("RECORD")} == {
        name: text for name, text in direct.items() if not name.endswith("RECORD")
    }


def test_the_version_is_the_same_wherever_it_stands() -> None:
    changelog = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert changelog is not None
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert {metadata.version("mtrain"), changelog[1], citation["version"]} == {mtrain.__version__}


@pytest.mark.parametrize("name", NAMES)
def test_each_package_has_the_version_of_mtrain_and_requires_exactly_that(name: str) -> None:
    """A package is installed from the clone that mtrain is from; with another version of it mtrain was not tested."""
    assert import_module(name).__version__ == metadata.version(name.replace("_", "-")) == mtrain.__version__
    settings = tomllib.loads((project(ROOT, name) / "pyproject.toml").read_text(encoding="utf-8"))
    assert settings["tool"]["setuptools"]["dynamic"]["version"] == {"attr": f"{name}.__version__"}
    needs = [Requirement(line) for line in settings["project"]["dependencies"] if line.startswith("mtrain")]
    wanted = {"mtrain": ["mtrain-trace"], "mtrain_trace": []}.get(name, ["mtrain"])
    assert [(need.name, str(need.specifier)) for need in needs] == [
        (need, f"=={mtrain.__version__}") for need in wanted
    ]
    assert settings["project"]["name"] == name.replace("_", "-")


def test_every_folder_of_packages_is_a_distribution_that_is_published() -> None:
    assert sorted(os.listdir(ROOT / "packages")) == sorted(name.replace("_", "-") for name in NAMES if name != "mtrain")
    assert {*packages.PACKAGES, "mtrain-trace"} == set(os.listdir(ROOT / "packages"))


@pytest.mark.job
def test_a_tag_of_this_commit_names_its_version() -> None:
    tags = subprocess.run(
        ["git", "tag", "--points-at", "HEAD", "--list", "v[0-9]*"], cwd=ROOT, capture_output=True, text=True
    )
    assert set(tags.stdout.split()) <= {f"v{mtrain.__version__}"}


def test_the_version_does_not_depend_on_git() -> None:
    """Hosts of a job compare versions, so a local change on one of two checkouts must not alter its version."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert settings["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "mtrain.__version__"}
    assert re.fullmatch(r"\d+\.\d+\.\d+((a|b|rc)\d+)?", mtrain.__version__)


def test_the_citation_has_what_its_format_requires() -> None:
    """The required keys of the Citation File Format 1.2, and no key that it does not know."""
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["cff-version"] == "1.2.0"
    assert citation["type"] in ("software", "dataset")
    assert citation["message"]
    assert citation["title"] == "mtrain"
    assert citation["license"] == "Apache-2.0"
    assert citation["authors"] == [{"name": "The mtrain authors"}]
    assert set(citation) <= {
        *(
            "abstract",
            "authors",
            "cff-version",
            "contact",
            "date-released",
            "doi",
            "identifiers",
            "keywords",
            "license",
        ),
        *("license-url", "message", "preferred-citation", "references", "repository", "repository-code", "title"),
        *("type", "url", "version"),
    }


class Installation:
    """Wheels in an environment of its own, which borrows the libraries of the one that runs the tests, but nothing of mtrain's."""

    def __init__(self, wheels: Sequence[Path], folder: Path) -> None:
        self._folder = folder
        self._bin = make(folder, everything=True, mtrain=False).parent
        command = [
            sys.executable,
            "-m",
            "pip",
            "--python",
            str(self._bin / "python"),
            "install",
            "--quiet",
            "--no-deps",
        ]
        subprocess.run([*command, "--no-index", *map(str, wheels)], check=True)
        self.place = Path(self._python("import mtrain; print(mtrain.__file__)").strip())

    def _python(self, code: str) -> str:
        command = [self._bin / "python", "-c", code]
        return subprocess.run(command, cwd=self._folder, capture_output=True, text=True, check=True).stdout

    def run(self, *command: str, folder: Path) -> str:
        """Run a program of the environment in `folder`, and return what it prints; it must end with 0."""
        settings = {
            name: os.environ[name] for name in ("HOME", "LANG", "TMPDIR", "OMP_NUM_THREADS") if name in os.environ
        }
        settings["PATH"] = f"{self._bin}:/usr/bin:/bin"
        done = subprocess.run(
            [self._bin / command[0], *command[1:]], cwd=folder, env=settings, capture_output=True, text=True
        )
        assert done.returncode == 0, f"{command}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout + done.stderr


@pytest.fixture(scope="module")
def installation(built: Wheels, tmp_path_factory: pytest.TempPathFactory) -> Installation:
    made = Installation([each.wheel for each in built.values()], tmp_path_factory.mktemp("environment") / "venv")
    assert ROOT not in made.place.parents
    return made


LOAD_ALL = """
from importlib.metadata import distributions
points = [point for each in distributions() for point in each.entry_points if point.group.startswith("mtrain.")]
for point in points:
    point.load()
assert len({point.value.partition(".")[0] for point in points}) == 7, points
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_plugin_of_the_installed_wheels_can_be_imported(installation: Installation, tmp_path: Path) -> None:
    assert installation.run("python", "-c", LOAD_ALL, folder=tmp_path) == ""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_an_installed_wheel_answers_without_a_checkout(installation: Installation, tmp_path: Path) -> None:
    assert installation.run("mtrain", "--version", folder=tmp_path) == f"mtrain, version {mtrain.__version__}\n"
    assert installation.run("python", "-m", "mtrain", "--version", folder=tmp_path).endswith(f"{mtrain.__version__}\n")
    assert "batch_size" in installation.run("mtrain", "config", "show", "-c", "digits", folder=tmp_path)
    assert "yolov5n" in installation.run("mtrain", "plugins", "list", folder=tmp_path)
    assert "ddp" in installation.run("mtrain", "plan", "-c", "digits", folder=tmp_path)
    assert "torch" in installation.run("mtrain", "doctor", folder=tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_an_installed_wheel_trains_the_demo(installation: Installation, tmp_path: Path) -> None:
    installation.run("mtrain", "train", "-o", "train.updates=4", "train.epochs=null", folder=tmp_path)
    assert list(tmp_path.glob("runs/*/summary.json"))


@pytest.mark.job
def test_type_checkers_follow_an_editable_install(tmp_path):
    """mypy and pyright read the paths of ``.pth`` files, and run no import hook."""
    source, env = tmp_path / "source", tmp_path / "env"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    # Two modules are enough, and cheap to check; what decides is the project's setting for editable installs.
    (source / "mtrain").mkdir()
    for name, text in {"__init__.py": '__version__ = "0.1.0"\nanswer: int = 42\n', "py.typed": ""}.items():
        (source / "mtrain" / name).write_text(text)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(env)], check=True)
    site = sysconfig.get_path("purelib", vars={"base": str(env)})
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-build-isolation", "--no-deps", "--no-index"]
    done = subprocess.run([*install, "--target", site, "-e", str(source)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    program = tmp_path / "elsewhere.py"
    program.write_text("import mtrain\nreveal_type(mtrain.answer)\n")
    check = [sys.executable, "-m", "mypy", "--strict", "--python-executable", str(env / "bin/python"), program.name]
    checked = subprocess.run(check, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert 'Revealed type is "int"' in checked.stdout.replace("builtins.", ""), checked.stdout + checked.stderr
    assert checked.returncode == 0, checked.stdout
