"""The interpreter of the ranks is looked at before anything starts: real ones, and one that has nothing."""

import re
import shutil
import subprocess
import sys
import venv
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from shlex import quote

import pytest

import mtrain
from mtrain.commands import main
from mtrain.errors import UsageError
from mtrain.spec.model import Spec
from mtrain.spec.resolved import Resolved
from mtrain.system import interpreter, interpreter_probe

pytestmark = pytest.mark.smoke

ROOT = Path(__file__).parents[2]


def spec(python: object, *, backend: str = "fleet", **options: str) -> Spec:
    chosen = {"name": backend, "python": None if python is None else str(python), "options": options}
    return Spec.model_validate({"backend": chosen, "data": {"format": "digits"}, "model": {"name": "yolov5n"}})


def refusal(python: object) -> str:
    with pytest.raises(UsageError) as error:
        interpreter.check(Resolved.of(spec(python)))
    return str(error.value)


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter without mtrain."""
    folder = tmp_path_factory.mktemp("bare")
    venv.create(folder, with_pip=False)
    return folder / "bin" / "python"


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)


def provide(python: Path, package: str, content: str = "", **others: str) -> None:
    """Put a package, and other files in its folder, beside an interpreter's own."""
    where = "import sysconfig; print(sysconfig.get_path('purelib'))"
    target = Path(subprocess.check_output([python, "-c", where], text=True).strip()) / package
    target.mkdir(parents=True)
    for name, text in {"__init__.py": content, **others}.items():
        (target / name).write_text(text)


@pytest.mark.job
@pytest.mark.skipif(find_spec("paddle") is None, reason="Paddle is not installed")
def test_this_interpreter_will_do(monkeypatch):
    interpreter.check(Resolved.of(spec(None)))
    monkeypatch.setenv("PYTHONPATH", str(Path(mtrain.__file__).parents[1]))
    interpreter.check(Resolved.of(spec(sys.executable)))


def test_a_backend_that_runs_on_another_framework_too_says_so(monkeypatch):
    monkeypatch.setattr(interpreter, "find_spec", lambda name: None if name == "torch" else object())
    with pytest.raises(
        UsageError, match=r"runs on torch, .* paddle is: -o backend.options.framework=paddle; or install"
    ):
        interpreter.check(Resolved.of(Spec.model_validate({"backend": {"name": "solo"}})))
    with pytest.raises(UsageError, match="runs on torch, which is not installed; install it with"):
        interpreter.check(Resolved.of(Spec.model_validate({"backend": {"name": "ddp"}})))


@pytest.mark.job
def test_one_without_mtrain_is_refused_with_the_command_that_installs_it(bare):
    message = refusal(bare)
    assert message.startswith(f"backend.python: {bare} has no mtrain, expected {mtrain.__version__} as here; ")
    assert message.endswith(f"{bare} -m pip install -e {quote(f'{ROOT}/packages/mtrain-trace')} -e '{ROOT}[fleet-cpu]'")


@pytest.mark.job
def test_one_with_another_mtrain_is_refused(bare, tmp_path):
    shutil.copytree(bare.parents[1], tmp_path / "other", symlinks=True)
    python = tmp_path / "other" / "bin" / "python"
    provide(python, "mtrain", '__version__ = "0.0.9"\n')
    assert f"{python} has mtrain 0.0.9, expected {mtrain.__version__} as here" in refusal(python)


@pytest.mark.job
def test_one_without_the_framework_is_refused_for_the_backend_that_needs_it_alone(bare, tmp_path):
    shutil.copytree(bare.parents[1], tmp_path / "other", symlinks=True)
    python = tmp_path / "other" / "bin" / "python"
    provide(python, "mtrain", f'__version__ = "{mtrain.__version__}"\n')
    assert f"{python} has no mtrain-trace, which mtrain needs; install both there with: {python} -m pip" in refusal(
        python
    )
    (tmp_path / "mtrain_trace").mkdir()  # What is left where the files of a package were: no package.
    assert f"{python} has no mtrain-trace" in refusal(python)
    provide(python, "mtrain_trace")
    assert f"{python} has no backend 'fleet' (known: none)" in refusal(python)
    points = "[mtrain.backends]\nfleet = a:B\nddp = a:B\nsolo = a:B\n"
    provide(python, "mtrain-0.dist-info", "", **{"entry_points.txt": points, "METADATA": "Name: mtrain\nVersion: 0\n"})
    assert refusal(python).endswith(
        f"has no paddle, which backend fleet runs on; install it there with: {python} -m pip install "
        f"-e {quote(f'{ROOT}/packages/mtrain-trace')} -e '{ROOT}[fleet-cpu]'"
    )
    provide(python, "torch", "raise RuntimeError('it is looked for, not imported')\n")
    interpreter.check(Resolved.of(spec(python, backend="ddp")))
    with pytest.raises(UsageError, match="has no paddle, which backend solo runs on"):
        interpreter.check(Resolved.of(spec(python, backend="solo", framework="paddle")))


@pytest.mark.job
def test_a_path_that_is_no_interpreter_is_refused(tmp_path):
    assert f"{tmp_path / 'nothing'} is not there; give the path of the Python" in refusal(tmp_path / "nothing")
    other = tmp_path / "other"
    other.write_text("#!/bin/sh\necho hello\n")
    other.chmod(0o755)
    assert f"{other} does not answer as Python does" in refusal(other)
    other.write_text("#!/bin/sh\necho no such thing >&2; exit 3\n")
    assert f"{other}: no such thing" in refusal(other)


@pytest.mark.job
def test_one_that_is_too_old_is_refused(tmp_path):
    python = tmp_path / "python3.9"
    python.write_text(
        """#!/bin/sh\necho '{"python": "3.9.2", "modules": {}, "packages": {}, "code": null, "backends": []}'\n"""
    )
    python.chmod(0o755)
    assert f"{python} is Python 3.9.2, expected 3.11 or newer" in refusal(python)


@pytest.mark.job
def test_training_is_refused_before_a_run_folder_is_made(bare, tmp_path, capsys):
    assert main(["-c", "digits", "-b", "fleet", "-o", f"backend.python={bare}", f"report.dir={tmp_path / 'runs'}"]) == 2
    assert "has no mtrain" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("found", ["2.7.1", "2.7.1+cu128", "2.7.0a0+git"])
def test_a_framework_older_than_its_backend_needs_is_refused(monkeypatch, found):
    job = Resolved.of(Spec.model_validate({"backend": {"name": "fsdp"}}))
    monkeypatch.setattr(interpreter, "version", lambda name: found)
    with pytest.raises(UsageError, match=f"fsdp needs torch 2.8 or newer, {re.escape(found)} is installed"):
        interpreter.check(job)
    monkeypatch.setattr(interpreter, "version", lambda name: "2.10.0+cpu")
    interpreter.check(job)


@pytest.mark.job
def test_a_framework_of_another_interpreter_older_than_its_backend_needs_is_refused(bare, tmp_path):
    shutil.copytree(bare.parents[1], tmp_path / "other", symlinks=True)
    python = tmp_path / "other" / "bin" / "python"
    provide(python, "mtrain", f'__version__ = "{mtrain.__version__}"\n')
    provide(python, "mtrain_trace")
    points = "[mtrain.backends]\nfsdp = a:B\n"
    provide(python, "mtrain-0.dist-info", "", **{"entry_points.txt": points, "METADATA": "Name: mtrain\nVersion: 0\n"})
    provide(python, "torch")
    interpreter.check(Resolved.of(spec(python, backend="fsdp")))
    provide(python, "torch-2.6.0.dist-info", "", METADATA="Name: torch\nVersion: 2.6.0\n")
    with pytest.raises(UsageError, match=r"other/bin/python: backend fsdp needs torch 2.8 or newer, 2.6.0 is"):
        interpreter.check(Resolved.of(spec(python, backend="fsdp")))


def test_the_distributions_of_modules_are_those_that_python_itself_finds(tmp_path):
    def install(name: str, version: str, **files: str) -> None:
        folder = tmp_path / f"{name}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        for file, text in files.items():
            (folder / file.replace("_txt", ".txt")).write_text(text)

    install("declares", "1.0", top_level_txt="one\ntwo\n", RECORD="three/__init__.py,,\n")
    install("lists", "2.0", RECORD="two/part.py,sha256=a,1\nfour.py,,\nfour_more/__init__.py,,\nfive/data.txt,,\n")
    there = list(metadata.distributions(path=[str(tmp_path)]))
    assert interpreter_probe._providers(["one", "two", "three", "four", "five"], there) == {
        "one": "declares 1.0",
        "two": "declares 1.0, lists 2.0",
        "four": "lists 2.0",
    }
    found = metadata.packages_distributions()
    modules = [name for name in ("torch", "numpy", "yaml", "cv2", "PIL", "pytest", "mtrain_trace") if name in found]
    expected = {
        name: ", ".join(f"{each} {metadata.version(each)}" for each in sorted({*found[name]})) for name in modules
    }
    assert interpreter_probe._providers(modules, metadata.distributions()) == expected
