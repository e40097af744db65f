"""No process of a job ever imports two frameworks: real ranks report at their end what they hold."""

import json
import textwrap
from importlib.util import find_spec
from pathlib import Path

import pytest

FRAMEWORKS = {"ddp": "torch", "fleet": "paddle"}
PLUGIN = """
    import atexit, json, os, sys
    from pathlib import Path
    from mtrain.models.yolov5.model import YOLOv5n


    class Reporting(YOLOv5n):
        def build(self, task, collective):
            held = Path(__file__).with_name(f"held-{collective.rank}.json")
            atexit.register(lambda: held.write_text(json.dumps(sorted({"torch", "paddle"} & set(sys.modules)))))
            return super().build(task, collective)
"""


@pytest.mark.skipif(
    not all(find_spec(name) for name in FRAMEWORKS.values()),
    reason="only where both are installed can both be imported",
)
@pytest.mark.parametrize("backend", FRAMEWORKS)
def test_a_rank_holds_its_own_framework_alone(runner, tmp_path, backend):
    Path(tmp_path, "reporting.py").write_text(textwrap.dedent(PLUGIN))
    Path(tmp_path, "plugins.toml").write_text('[models.reporting]\nmodule = "reporting:Reporting"\n')
    everything = ["model.name=reporting", "train.updates=2", "report.tensorboard=true", "report.plots=true"]
    code, output = runner.run([*runner.arguments(backend=backend, name="job"), "-o", *everything])
    assert code == 0, output
    assert list(runner.run_folder("job").rglob("events.out.tfevents*"))
    assert (runner.run_folder("job") / "results.png").exists()
    weights = [json.loads((tmp_path / f"held-{rank}.json").read_text()) for rank in range(2)]
    assert weights == [[FRAMEWORKS[backend]]] * 2
