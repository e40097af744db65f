"""Trials at the same time divide the GPUs of the host. Devices are files of a stand-in for /dev."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.sweeping.jobs import TINY, InstantJob, sweep_request

import mtrain
from mtrain.errors import UsageError
from mtrain_sweep import gpus, starting
from mtrain_sweep import search as sweep
from mtrain_sweep.definition import SweepDefinition
from mtrain_sweep.gpus import shares
from mtrain_sweep.space import read_over


def made(folder: Path, count: int) -> Path:
    for number in range(count):
        (folder / f"nvidia{number}").touch()
    return folder


def definition(cluster: dict[str, Any], *over: str, device: str = "auto") -> SweepDefinition:
    base = {"cluster": cluster, "backend": {"name": "ddp", "options": {"device": device}}, "report": {}}
    return SweepDefinition(sampler="random", pruner="none", metric="score", direction="max", seed=0, trials=2, folder="/", base=base,
                   parameters=tuple(read_over(over)))  # fmt: skip


@pytest.mark.parametrize(
    ("cluster", "over", "environ", "expected"),
    [
        ({"nproc_per_node": 1}, (), {}, (("0",), ("1",))),
        ({"nproc_per_node": 2}, (), {}, (("0", "1"), ("2", "3"))),
        ({"nproc_per_node": "auto"}, (), {}, (("0", "1"), ("2", "3"))),
        ({"nproc_per_node": 1}, ("ranks=1,2",), {}, (("0", "1"), ("2", "3"))),
        ({"nproc_per_node": 1}, (), {"CUDA_VISIBLE_DEVICES": "3, 1"}, (("3",), ("1",))),
        ({"nproc_per_node": 1}, (), {"CUDA_VISIBLE_DEVICES": "GPU-8a,GPU-9b"}, (("GPU-8a",), ("GPU-9b",))),
        ({"nproc_per_node": 1, "devices": [2, 3]}, (), {}, (("2",), ("3",))),
        ({"nproc_per_node": 1}, (), {"CUDA_VISIBLE_DEVICES": ""}, ()),
        ({"nproc_per_node": 1, "devices": []}, (), {}, ()),
    ],
)
def test_two_trials_get_gpus_of_their_own(
    cluster: dict[str, Any], over: tuple[str, ...], environ: dict[str, str], expected: Any, tmp_path: Path
) -> None:
    asked = definition(cluster, *over)
    assert shares(asked, jobs=2, environ=environ, dev=made(tmp_path, 4)) == expected
    assert shares(asked, jobs=1, environ=environ, dev=tmp_path) == ()


def test_nothing_is_divided_on_the_cpu(tmp_path: Path) -> None:
    assert shares(definition({"nproc_per_node": 1}), jobs=2, environ={}, dev=tmp_path) == ()
    assert shares(definition({"nproc_per_node": 1}, device="cpu"), jobs=2, environ={}, dev=made(tmp_path, 4)) == ()


def test_more_trials_than_there_are_gpus_for_are_refused(tmp_path: Path) -> None:
    made(tmp_path, 4)
    with pytest.raises(
        UsageError, match=r"3 trials of 2 ranks need 6 GPUs, but 4 can be used \(0, 1, 2, 3\); give --jobs 2"
    ):
        shares(definition({"nproc_per_node": 2}), jobs=3, environ={}, dev=tmp_path)
    with pytest.raises(UsageError, match="give --jobs 4"):
        shares(definition({"nproc_per_node": "auto"}), jobs=5, environ={}, dev=tmp_path)


def test_running_trials_never_share_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Patient(InstantJob):
        """A job that is asked a few times before it has ended: trials of a lower number longer."""

        def __init__(self, *arguments: Any, **named: Any) -> None:
            super().__init__(*arguments, **named)
            self.asked = 0
            running.append(self)

        def poll(self) -> Any:
            self.asked += 1
            numbers = {job._place.number: gpus_of[job._place.number] for job in running}
            assert len(set(numbers.values())) == len(numbers)
            if self.asked < 6 - self._place.number:
                return None
            running.remove(self)
            return super().poll()

    class Known(dict[int, str]):
        def __missing__(self, number: int) -> str:
            text = (folder / "gpus.txt").read_text()
            return dict(line.split() for line in text.splitlines())[str(number)]

    folder, running, gpus_of = tmp_path / "sweep", [], Known()
    monkeypatch.setattr(sweep, "LocalJob", Patient)
    monkeypatch.setattr(sweep, "POLL_S", 0.0)
    monkeypatch.setattr(sweep, "refuse_what_cannot_work", lambda plan: None)
    monkeypatch.setattr(InstantJob, "metrics", staticmethod(lambda place: [0.5]), raising=False)
    monkeypatch.setattr(gpus, "visible", lambda environ, dev: ["0", "1", "2", "3"])
    spec = {**TINY, "cluster": {"nproc_per_node": 1, "threads": 1, "devices": [4, 5, 7]}}
    for loaded in (TINY, spec):
        plan = starting.prepare(
            sweep_request(folder, load=partial(mtrain.load_spec, loaded), trials=5, jobs=3, sampler="random")
        )
        sweep.run(plan)
        used = {line.split()[1] for line in (folder / "gpus.txt").read_text().splitlines()}
        written = [yaml.safe_load(file.read_text())["cluster"]["devices"] for file in folder.glob("specs/*.yml")]
        assert used == ({"0", "1", "2"} if loaded is TINY else {"4", "5", "7"})
        assert {str(one) for one in written} == ({"None"} if loaded is TINY else {"[4]", "[5]", "[7]"})
        folder = tmp_path / "another"


def test_a_trial_is_started_with_its_gpus_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mtrain_sweep import trial_jobs
    from mtrain_sweep.places import TrialFiles

    seen: list[dict[str, str]] = []
    monkeypatch.setattr(trial_jobs, "end_leftovers", lambda place: None)
    monkeypatch.setattr(trial_jobs.processes, "start", lambda argv, *, env, log: seen.append(env))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    trial_jobs.LocalJob(TrialFiles(tmp_path, 0), gpus=("2", "3"))
    trial_jobs.LocalJob(TrialFiles(tmp_path, 1))
    assert [env["CUDA_VISIBLE_DEVICES"] for env in seen] == ["2,3", "0,1,2,3"]
