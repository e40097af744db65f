"""Real fleet ranks that are killed, asked to end, or raise: one clear end, nothing left running, and the same bits later."""

import signal
import textwrap
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.faults.conftest import UPDATES, Runner, family, is_worker, ranks_of, survivors

pytestmark = pytest.mark.skipif(find_spec("paddle") is None, reason="Paddle is not installed")

PLUGIN = """
    from mtrain.models.yolov5.model import YOLOv5n


    class Failing(YOLOv5n):
        calls = 0

        def build(self, task, collective):
            module = super().build(task, collective)
            if collective.rank == 1:
                module.register_forward_pre_hook(self.count)
            return module

        def count(self, *_):
            self.calls += 1
            if self.calls == 4:
                raise ValueError("the seventh image is upside down")
"""


def arguments(runner: Runner, name: str, ranks: int = 2) -> list[str]:
    return runner.arguments(backend="fleet", ranks=ranks, name=name)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, digits) -> dict:
    runner = Runner(tmp_path_factory.mktemp("undisturbed"), digits)
    code, output = runner.run(arguments(runner, "whole"))
    assert code == 0, output
    return runner.summary("whole")


def rank_numbered(number: int, process):
    return next(rank for rank in ranks_of(process) if rank.environ().get("PADDLE_TRAINER_ID") == str(number))


@pytest.mark.parametrize("number", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_a_killed_rank_is_named_and_the_job_goes_on_later_to_the_same_bits(runner, undisturbed, number):
    process = runner.start(arguments(runner, "killed"))
    runner.wait_for_update("killed", 3, process)
    everybody = family(process)
    assert any(not is_worker(member.cmdline()) for member in everybody), "the agent"
    rank_numbered(number, process).kill()
    code, output = runner.finish(process)
    assert code == 1, output
    assert output.rstrip().splitlines()[-1].startswith(f"error: rank {number} was ended by signal 9 (SIGKILL)"), output
    assert survivors(everybody) == []
    code, output = runner.run([*arguments(runner, "killed"), "--resume", str(runner.run_folder("killed"))])
    assert code == 0, output
    assert runner.summary("killed")["updates"] == UPDATES
    assert runner.summary("killed")["weights_sha256"] == undisturbed["weights_sha256"]
    assert runner.summary("killed")["ema_sha256"] == undisturbed["ema_sha256"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "expected"),
    [(signal.SIGTERM, 143), (signal.SIGINT, 130)],
    ids=["SIGTERM", "Ctrl-C"],
)
def test_a_job_that_is_asked_to_end_saves_and_goes_on_later_to_the_same_bits(runner, undisturbed, number, expected):
    process = runner.start(arguments(runner, "asked"))
    runner.wait_for_update("asked", 1, process)
    everybody = family(process)
    process.send_signal(number)
    code, output = runner.finish(process)
    assert code == expected, output
    assert "state saved" in output
    assert survivors(everybody) == []
    code, output = runner.run([*arguments(runner, "asked"), "--resume", str(runner.run_folder("asked"))])
    assert code == 0, output
    assert runner.summary("asked")["weights_sha256"] == undisturbed["weights_sha256"]


def test_a_rank_that_raises_is_told_last_and_takes_the_others_along(runner, tmp_path):
    Path(tmp_path, "failing.py").write_text(textwrap.dedent(PLUGIN))
    Path(tmp_path, "plugins.toml").write_text('[models.failing]\nmodule = "failing:Failing"\n')
    process = runner.start([*arguments(runner, "raising"), "-o", "model.name=failing"])
    runner.wait_for_update("raising", 0, process)
    everybody = family(process)
    code, output = runner.finish(process)
    assert code == 1, output
    assert "rank 1 on " in output
    assert output.rstrip().endswith("ValueError: the seventh image is upside down")
    assert survivors(everybody) == []


@pytest.mark.slow
def test_three_ranks_go_on_bit_for_bit_from_a_checkpoint(runner):
    code, output = runner.run([*arguments(runner, "whole", ranks=3), "-o", "train.batch_size=6", "train.updates=5"])
    assert code == 0, output
    process = runner.start([*arguments(runner, "cut", ranks=3), "-o", "train.batch_size=6", "train.updates=5"])
    runner.wait_for_update("cut", 2, process)
    process.send_signal(signal.SIGTERM)
    code, output = runner.finish(process)
    assert code == 143, output
    again = [*arguments(runner, "cut", ranks=3), "-o", "train.batch_size=6", "train.updates=5"]
    code, output = runner.run([*again, "--resume", str(runner.run_folder("cut"))])
    assert code == 0, output
    assert runner.summary("cut")["weights_sha256"] == runner.summary("whole")["weights_sha256"]
