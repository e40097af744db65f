"""What is published: wheel, source distribution, version, and what an installation without a checkout can do."""

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
from importlib import metadata
from pathlib import Path

import pytest
import yaml

import mtrain
import mtrain_trace
from tests.starts import starts_processes

ROOT = Path(__file__).parents[2]


def sources() -> list[str]:
    """Files of the checkout: tracked ones, and those that could be."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    return [name for name in listed.stdout.decode().split("\0") if name and (ROOT / name).is_file()]


def build(source: Path, out: Path, *what: str) -> Path:
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), *what, str(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = out.iterdir()
    return built


@pytest.fixture(scope="module")
@starts_processes
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkout's files without its caches and former builds."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in sources():
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes((ROOT / name).read_bytes())
    return folder


@pytest.fixture(scope="module")
def sdist(copy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(copy, tmp_path_factory.mktemp("sdist"), "--sdist")


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel that the source distribution builds, as `make dist` does."""
    folder = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(sdist) as archive:
        archive.extraction_filter = getattr(tarfile, "data_filter", None)  # not in Python 3.11.3
        archive.extractall(folder)
    (unpacked,) = folder.iterdir()
    return build(unpacked, tmp_path_factory.mktemp("wheel"), "--wheel")


def contents(wheel: Path) -> Mapping[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


@pytest.mark.timeout(300)
def test_the_wheel_has_every_file_of_the_package_and_nothing_else(wheel: Path) -> None:
    packed = contents(wheel)
    info = {name for name in packed if name.startswith("mtrain-") and ".dist-info/" in name}
    written = "mtrain/spec/typed.py"  # by the build
    assert set(packed) - info == {written, *(name for name in sources() if name.startswith("mtrain/"))}
    assert {name.split("/", 1)[1] for name in info} == {
        "METADATA",
        "RECORD",
        "WHEEL",
        "entry_points.txt",
        "licenses/LICENSE",
        "top_level.txt",
    }


@pytest.mark.timeout(300)
def test_the_source_distribution_has_the_documents_and_no_tests(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    assert {"LICENSE", "README.md", "CHANGELOG.md", "CITATION.cff", "SECURITY.md", "docs/spec.md"} <= names
    assert not [name for name in names if name.startswith(("tests", "benchmarks", "packages"))]


@pytest.mark.timeout(300)
def test_descriptions_of_the_distributions_pass_the_check_of_package_indexes(wheel: Path, sdist: Path) -> None:
    command = [sys.executable, "-m", "twine", "check", "--strict", str(wheel), str(sdist)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_checkout_and_source_distribution_build_the_same_wheel(copy: Path, wheel: Path, tmp_path: Path) -> None:
    direct = contents(build(copy, tmp_path, "--wheel"))
    assert {name: text for name, text in contents(wheel).items() if not name.endswith("RECORD")} == {
        name: text for name, text in direct.items() if not name.endswith("RECORD")
    }


def test_the_version_is_the_same_wherever_it_stands() -> None:
    changelog = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert changelog is not None
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert {metadata.version("mtrain"), changelog[1], citation["version"]} == {mtrain.__version__}


def test_each_package_has_the_version_of_mtrain_and_mtrain_requires_exactly_that() -> None:
    """A package is installed from the clone that mtrain is from; with another version of it mtrain was not tested."""
    assert metadata.version("mtrain-trace") == mtrain_trace.__version__ == mtrain.__version__
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    needed = [line for line in project["dependencies"] if line.startswith("mtrain")]
    assert needed == [f"mtrain-trace == {mtrain.__version__}"]
    assert sorted(os.listdir(ROOT / "packages")) == ["mtrain-trace"], (
        "each package that mtrain requires, and no other yet"
    )


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
    """Wheels in an environment of its own, which borrows the libraries of the one that runs the tests."""

    def __init__(self, wheels: Sequence[Path], folder: Path) -> None:
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
        self._folder = folder
        self._bin = folder / "bin"
        self._libraries = Path(self._python("import sysconfig; print(sysconfig.get_path('purelib'))").strip())
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
        borrowed = [sysconfig.get_path("purelib"), *(path for path in sys.path if path.endswith("site-packages"))]
        (self._libraries / "zz_borrowed.pth").write_text("\n".join(dict.fromkeys(borrowed)), encoding="utf-8")
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
def installation(copy: Path, wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installation:
    trace = build(copy / "packages" / "mtrain-trace", tmp_path_factory.mktemp("trace"), "--wheel")
    made = Installation([trace, wheel], tmp_path_factory.mktemp("environment") / "venv")
    assert ROOT not in made.place.parents
    return made


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
