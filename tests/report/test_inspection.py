"""Reporters that look at updates: what they see, and that training has the same bits with them and without."""

import json
from pathlib import Path

import pytest
import yaml
from tests.sweeping.jobs import TINY

from tests.own_model.runs import command

pytestmark = pytest.mark.job

# Tries to change what it sees, keeps a record of what it saw, and fails once on rank 1, which must stop nobody.
WATCH = """
import json
from mtrain.core.state.digest import digest


class Watch:
    every_rank = True

    def __init__(self, run, every=1, fails=False):
        self.inspect_every, self.rank, self.fails = every, run.rank, fails
        self.file = (run.folder / f"seen-{run.rank}.jsonl").open("a", buffering=1)

    def inspect(self, update):
        for arrays in (update.before, update.after, update.average, update.moments):
            for array in arrays.values():
                try:
                    array[...] = 0
                except ValueError:
                    continue
                raise AssertionError("an array could be changed")
        if self.fails and self.rank == 1:
            raise KeyError("lost")
        change = {name: float(abs(update.after[name] - update.before[name]).max()) for name in update.trained}
        self.file.write(json.dumps({
            "update": update.update, "before": digest(update.before), "after": digest(update.after), "average": digest(update.average),
            "moments": sorted({name.partition("/")[0] for name in update.moments}), "change": change,
        }) + "\\n")


class Rarely(Watch):
    every_rank = False
"""


def trained(folder: Path, name: str, backend: str, *words: str) -> dict:
    """Run a job of two ranks; return its summary."""
    (folder / "watch.py").write_text(WATCH)
    spec = {**TINY, "cluster": {"threads": 1, "nproc_per_node": 2}, "backend": {"name": backend}}
    (folder / "tiny.yml").write_text(yaml.safe_dump(spec))
    result = command(folder, "train", "-c", "tiny.yml", "--name", name, *words)
    assert result.returncode == 0, result.stdout + result.stderr
    return dict(json.loads((folder / "runs" / name / "summary.json").read_text()))


def seen(folder: Path, name: str, rank: int) -> list[dict]:
    return [json.loads(line) for line in (folder / "runs" / name / f"seen-{rank}.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    "backend", ["ddp", *(pytest.param(name, marks=pytest.mark.slow) for name in ("fleet", "deepspeed"))]
)
def test_looking_at_updates_changes_no_bit_of_them(backend: str, tmp_path: Path) -> None:
    stage = ("-o", "backend.options.stage=3") if backend == "deepspeed" else ()
    plain = trained(tmp_path, "plain", backend, *stage)
    reporters = "report.reporters={./watch.py:Watch: {fails: true}, ./watch.py:Rarely: {every: 5}}"
    looked = trained(tmp_path, "looked", backend, *stage, "-o", reporters)
    assert looked["weights_sha256"] == plain["weights_sha256"]
    assert looked["ema_sha256"] == plain["ema_sha256"]
    records = seen(tmp_path, "looked", 0)
    every, rarely = records, [record["update"] for record in records]
    assert sorted(rarely) == sorted([*range(12), 0, 5, 10])
    of_each = {record["update"]: record for record in every}
    assert all(of_each[k]["before"] == of_each[k - 1]["after"] for k in range(1, 12))
    assert of_each[11]["after"] == plain["weights_sha256"]
    assert of_each[11]["average"] == plain["ema_sha256"]
    assert of_each[3]["moments"] == ["mean", "square"]
    assert max(of_each[3]["change"].values()) > 0
    assert (tmp_path / "runs" / "looked" / "seen-1.jsonl").read_text() == "", "it was switched off"


def test_a_cadence_that_is_no_number_of_updates_is_refused(tmp_path: Path) -> None:
    (tmp_path / "watch.py").write_text(WATCH)
    (tmp_path / "tiny.yml").write_text(yaml.safe_dump(TINY))
    result = command(
        tmp_path, "train", "-c", "tiny.yml", "--name", "a", "-o", "report.reporters={./watch.py:Watch: {every: 0}}"
    )
    assert result.returncode == 2, result.stdout + result.stderr
    assert "inspect_every is 0; expected a whole number of updates >= 1" in result.stdout + result.stderr
