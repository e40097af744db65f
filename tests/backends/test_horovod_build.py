"""The script that builds Horovod: what fails keeps its log and names it. The interpreter and the compilers are stand-ins."""

import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

import mtrain

pytestmark = pytest.mark.job

SCRIPT = Path(mtrain.__file__).parent / "backends/_horovod/build.sh"
PYTHON = """#!/usr/bin/env bash
case "$*" in
  *find_spec*) echo torch ;;
  *get_paths*) echo "$XDG_CACHE_HOME/include" ;;
  *sysconfig*) echo "${DESCRIBED:-torch-9.9-cp312-linux none False}" ;;
  *gloo_built*) [ "$FAULT" = import ] || [ ! -e "$XDG_CACHE_HOME/installed" ] && { echo "undefined symbol: _Z5hello"; exit 1; }; exit 0 ;;
  *"pip download"*)
    [ "$FAULT" = download ] && { echo "no source in sight"; exit 1; }
    folder=${@: -2:1}
    source=horovod-0.28.1
    mkdir -p "$folder" && cd "$folder"
    mkdir -p $source/horovod/torch $source/horovod/common/gloo $source/horovod/runner/http $source/cmake/Modules
    echo 'set(CMAKE_CXX_STANDARD 14)' | tee $source/CMakeLists.txt >$source/horovod/torch/CMakeLists.txt
    echo 'global_ranks_.reserve(size_);' >$source/horovod/common/gloo/gloo_controller.cc
    echo 'self.server.finished_list.clear()' >$source/horovod/runner/http/http_server.py
    echo 'print(True if ((torch.version.cuda is not None) and (CUDA_HOME is not None)) else False)' >$source/cmake/Modules/FindPytorch.cmake
    tar -czf $source.tar.gz $source ;;
  *"pip wheel"*)
    [ "$FAULT" = compile ] && { echo "error: expected a semicolon"; exit 1; }
    folder=${@: -2:1}
    mkdir -p "$folder"
    echo "compiled without complaint"
    cd "${@: -1}"
    { echo "operations: ${HOROVOD_GPU_OPERATIONS-unset}"; cat CMakeLists.txt cmake/Modules/FindPytorch.cmake; } >"$XDG_CACHE_HOME/built"
    touch "$folder/horovod-0.28.1-cp312.whl" ;;
  *"pip install"*) [[ "$*" != *--force-reinstall* ]] || touch "$XDG_CACHE_HOME/installed" ;;
  *) exit 1 ;;
esac
"""


def build(
    folder: Path, tools: Sequence[str] = ("cmake", "g++", "make", "python3-dev"), *words: str, **environ: str
) -> subprocess.CompletedProcess[str]:
    """Run the script where only ``tools`` of the compilers are there, with its cache in ``folder``."""
    programs = folder / "bin"
    programs.mkdir()
    (programs / "python").write_text(PYTHON)
    if "python3-dev" in tools:
        (folder / "include").mkdir()
        (folder / "include" / "Python.h").touch()
    for name in set(tools) - {"python3-dev"}:
        (programs / name).write_text("#!/bin/sh\n")
    for each in programs.iterdir():
        each.chmod(0o755)
    needed = ("bash", "basename", "cat", "dirname", "find", "grep", "head", "mkdir", "mktemp", "mv", "nice", "nproc", "rm", "sed", "tail",
              "tar", "tee", "touch", "gzip", "awk", "id")  # fmt: skip
    for name in needed:
        (programs / name).symlink_to(shutil.which(name) or name)
    environ = {
        "PATH": str(programs),
        "XDG_CACHE_HOME": str(folder),
        "HOME": str(folder),
        "CUDA_HOME": str(folder / "no-cuda"),
        **environ,
    }
    line = [shutil.which("bash") or "bash", str(SCRIPT), *words, str(programs / "python")]
    return subprocess.run(line, capture_output=True, text=True, env=environ, timeout=120, check=False)


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("download", "no source in sight"),
        ("compile", "expected a semicolon"),
        ("import", "undefined symbol: _Z5hello"),
    ],
)
def test_a_build_that_fails_keeps_its_log_and_names_it(fault, said, tmp_path):
    done = build(tmp_path, FAULT=fault)
    assert done.returncode == 2, done.stdout + done.stderr
    assert said in done.stderr
    named = re.search(r"the whole log: (\S+)", done.stderr)
    assert named is not None, done.stderr
    assert said in Path(named[1]).read_text()
    assert list(tmp_path.rglob("*.whl")) == [], "the next call builds another"


CUDA_TORCH = "torch-2.14.1_cu130-cp312-linux cu13.0"


@pytest.mark.parametrize(
    ("described", "environ", "standard"),
    [
        ("torch-2.13.0-cp312-linux none False", {}, 17),
        (f"{CUDA_TORCH} False", {}, 20),  # what pip brings on a machine without a GPU
        (f"{CUDA_TORCH} True", {"HOROVOD_GPU_OPERATIONS": ""}, 20),
        ("tensorflow-2.15.1-cp312-linux none False", {"HOROVOD_GPU_OPERATIONS": "NCCL"}, 17),
    ],
)
def test_horovod_is_built_for_gloo_where_no_gpu_is_seen_whatever_torch_is_built_for(
    described, environ, standard, tmp_path
):
    done = build(tmp_path, DESCRIBED=described, **environ)
    assert done.returncode == 0, done.stdout + done.stderr
    built = (tmp_path / "built").read_text()
    operations, language, asks_for_cuda = built.splitlines()
    assert (operations, asks_for_cuda) == ("operations: unset", "print(True if (False) else False)"), (
        "no NCCL, no toolkit"
    )
    assert language == f"set(CMAKE_CXX_STANDARD {standard})", "as the framework's headers need it"
    assert [path.parent.name.rpartition("-")[2] for path in tmp_path.rglob("*.whl")] == ["cpu"]
    assert ("HOROVOD_GPU_OPERATIONS=NCCL" in done.stdout) == (described == f"{CUDA_TORCH} False"), "how to get NCCL"


@pytest.mark.parametrize(
    ("described", "environ"),
    [(f"{CUDA_TORCH} True", {}), (f"{CUDA_TORCH} False", {"HOROVOD_GPU_OPERATIONS": "NCCL"})],
)
def test_horovod_is_built_with_nccl_where_a_gpu_is_seen_or_it_is_asked_for(described, environ, tmp_path):
    done = build(tmp_path, ("cmake", "g++", "make", "python3-dev", "nvcc"), DESCRIBED=described, **environ)
    assert done.returncode == 0, done.stdout + done.stderr
    built = (tmp_path / "built").read_text()
    assert built.startswith("operations: NCCL\n")
    assert "CUDA_HOME is not None" in built
    assert [path.parent.name.rpartition("-")[2] for path in tmp_path.rglob("*.whl")] == ["cu13.0"]


def test_without_a_toolkit_nccl_is_refused_with_both_ways_out(tmp_path):
    done = build(tmp_path, DESCRIBED=f"{CUDA_TORCH} True")
    assert done.returncode == 2
    assert "needs the toolkit of CUDA 13.0 (there is no nvcc)" in done.stderr
    assert "set CUDA_HOME" in done.stderr
    assert "HOROVOD_GPU_OPERATIONS= " in done.stderr


@pytest.mark.parametrize("tools", [(), ("cmake", "make", "python3-dev"), ("cmake", "g++", "make")])
def test_missing_compilers_are_named_and_nothing_is_installed_where_it_must_not_be(tools, tmp_path):
    done = build(tmp_path, tools, NO_APT="1")
    missing = " ".join(name for name in ("cmake", "g++", "make", "python3-dev") if name not in tools)
    assert done.returncode == 2
    assert f"(Debian: apt-get install {missing})" in done.stderr


def test_a_wheel_can_be_built_without_being_installed_and_is_kept_for_the_next_call(tmp_path):
    first = build(tmp_path, ("cmake", "g++", "make", "python3-dev"), "--wheel")
    assert first.returncode == 0, first.stdout + first.stderr
    assert len(list(tmp_path.rglob("*.whl"))) == 1
    assert not (tmp_path / "installed").exists()
    (tmp_path / "built").unlink()
    shutil.rmtree(tmp_path / "bin")
    shutil.rmtree(tmp_path / "include")
    second = build(tmp_path, ())
    assert second.returncode == 0, second.stdout + second.stderr
    assert (tmp_path / "installed").exists()
    assert not (tmp_path / "built").exists(), "no compiler is needed any more"
