"""The scripts of the tutorial do what the page says."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.script.runs import done, run, summary

PAGE = Path(__file__).parents[2] / "docs/tutorial-script.md"


@pytest.mark.slow
def test_the_script_of_the_tutorial_ends_with_the_same_weights_on_two_backends_and_after_an_interruption(tmp_path):
    plain, script = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    (tmp_path / "plain.py").write_text(plain)
    subprocess.run([sys.executable, "plain.py"], cwd=tmp_path, check=True, timeout=300)
    (tmp_path / "train.py").write_text(script)
    done(tmp_path, "--nproc-per-node", "2", "--name", "ddp", "train.py")
    zero = ("--backend", "deepspeed", "-o", "backend.options.stage=2", "--nproc-per-node", "2", "--name", "zero")
    done(tmp_path, *zero, "train.py")
    digest = summary(tmp_path, "ddp")["weights_sha256"]
    assert summary(tmp_path, "zero")["weights_sha256"] == digest
    assert summary(tmp_path, "ddp")["best"]["accuracy"] > 0.9
    ending = script.replace("        optimizer.update(", "        ends(session)\n        optimizer.update(")
    (tmp_path / "ending.py").write_text(ending.replace("with mtrain", f"{ENDS}\n\nwith mtrain"))
    assert run(tmp_path, "--nproc-per-node", "2", "--name", "again", "ending.py").returncode == 143
    done(tmp_path, "--resume", "runs/again", "train.py")
    assert summary(tmp_path, "again")["weights_sha256"] == digest


ENDS = """
def ends(session):
    import os, signal
    if session.progress.update == 37 and session.rank == 0:
        os.kill(os.getpid(), signal.SIGTERM)
"""
