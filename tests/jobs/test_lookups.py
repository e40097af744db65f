"""How often the process that starts a job reads the policy of plugins, imports each plugin and makes the plan."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.job

COUNT = """
import collections, json, sys
from mtrain.commands import main
from mtrain.jobs.hosts import only_host, this_host
from mtrain.jobs.plan import plan
from mtrain.jobs.run.supervisor import Result
from mtrain.spec import plugins

counts = collections.Counter()

def counted(name, key, module=plugins):
    function = getattr(module, name)

    def call(*args, **more):
        counts[key(*args)] += 1
        return function(*args, **more)

    setattr(module, name, call)

counted("load", lambda kind, name: f"{kind} {name}")
counted("read_policy", lambda *_: "the policy")
for module in (plan, this_host, only_host):
    counted("make_plan", lambda *_: "the plan", module)
this_host.ThisHost.run = lambda self, plan: Result(code=1, text="no rank is started here")
code = main(sys.argv[1:])
print(json.dumps([code, counts]))
"""


@pytest.mark.smoke
@pytest.mark.parametrize(("command", "expected"), [("plan", 0), ("train", 1)])
def test_a_job_on_this_host_is_planned_once_and_looks_each_thing_up_once(
    tmp_path: Path, command: str, expected: int
) -> None:
    argv = [command, "-c", "digits", "-b", "ddp", "--nproc-per-node", "2"]
    process = subprocess.run(
        [sys.executable, "-c", COUNT, *argv], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=True
    )
    code, counts = json.loads(process.stdout.splitlines()[-1])
    assert code == expected, process.stderr
    assert {"the policy", "the plan", "backends ddp", "launchers torchrun", "models yolov5n"} <= counts.keys()
    assert {name: count for name, count in counts.items() if count > 1} == {}
