"""The script that builds Horovod: what fails keeps its log and names it. The interpreter and the compilers are stand-ins."""

import os
import re
import subprocess
from pathlib import Path

import pytest

import mtrain

SCRIPT = Path(mtrain.__file__).parent / "backends/_horovod/build.sh"
PYTHON = """#!/usr/bin/env bash
case "$*" in
  *find_spec*) echo torch ;;
  *sysconfig*) echo torch-9.9-cp312-linux-cpu ;;
  *gloo_built*) echo "undefined symbol: _Z5hello"; exit 1 ;;
  *"pip download"*)
    [ "$FAULT" = download ] && { echo "no source in sight"; exit 1; }
    folder=${@: -2:1}
    mkdir -p "$folder/horovod-0.28.1/horovod/torch" "$folder/horovod-0.28.1/horovod/common/gloo"
    cd "$folder"
    echo 'set(CMAKE_CXX_STANDARD 14)' | tee horovod-0.28.1/CMakeLists.txt >horovod-0.28.1/horovod/torch/CMakeLists.txt
    echo 'global_ranks_.reserve(size_);' >horovod-0.28.1/horovod/common/gloo/gloo_controller.cc
    tar -czf horovod-0.28.1.tar.gz horovod-0.28.1 ;;
  *"pip wheel"*)
    [ "$FAULT" = compile ] && { echo "error: expected a semicolon"; exit 1; }
    folder=${@: -2:1}
    mkdir -p "$folder"
    echo "compiled without complaint"
    touch "$folder/horovod-0.28.1-cp312.whl" ;;
  *"pip install"*) ;;
  *) exit 1 ;;
esac
"""


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("download", "no source in sight"),
        ("compile", "expected a semicolon"),
        ("import", "undefined symbol: _Z5hello"),
    ],
)
def test_a_build_that_fails_keeps_its_log_and_names_it(fault, said, tmp_path):
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("python", "cmake", "g++", "make"):
        (tools / name).write_text(PYTHON if name == "python" else "#!/bin/sh\n")
        (tools / name).chmod(0o755)
    environ = {**os.environ, "PATH": f"{tools}:{os.environ['PATH']}", "XDG_CACHE_HOME": str(tmp_path), "FAULT": fault}
    line = ["bash", str(SCRIPT), str(tools / "python")]
    done = subprocess.run(line, capture_output=True, text=True, env=environ, timeout=120, check=False)
    assert done.returncode == 2, done.stdout + done.stderr
    assert said in done.stderr
    named = re.search(r"the whole log: (\S+)", done.stderr)
    assert named is not None, done.stderr
    assert said in Path(named[1]).read_text()
    assert list(tmp_path.rglob("*.whl")) == [], "the next call builds another"
