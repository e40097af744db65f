"""Fingerprints: backends that promise the same bits give them, and any difference between two builds is reported."""

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib.metadata import distribution
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from safetensors.numpy import save_file

from tests.parity.fingerprints import __main__ as command
from tests.parity.fingerprints.builds import GUARD, Build, JobError
from tests.parity.fingerprints.digests import Fingerprint, differences, fingerprint
from tests.parity.fingerprints.jobs import JOBS, SPECS, STACKS, Job
from tests.parity.jobs import PARTS, Array

FILES = PARTS
UPDATES = 4


# ------------------------------------------------------------------------------------------------------------ real jobs
@pytest.mark.job
def test_backends_and_a_resumed_job_give_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks of ddp, of Horovod, and of DeepSpeed, which goes on from ddp's checkpoint in the middle of an epoch."""
    for module in ("horovod", "deepspeed"):
        if find_spec(module) is None:
            pytest.skip(f"{module} is not installed here")
    monkeypatch.setattr(command, "JOBS_AT_A_TIME", 1)  # other tests run on the other core
    short = {"train.updates": 4, "checkpoint.every_updates": 2}
    whole = Job(model="yolov5n", stack="ddp", ranks=2, overrides=short)
    other = replace(whole, stack="horovod", same_as=whole.name)
    resumed = replace(whole, stack="deepspeed-1", same_as=whole.name, resumes=whole.name)
    assert command.report([whole, other, resumed], [Build(name="here", folder=tmp_path)], tmp_path / "out") == 0
    content = json.loads((tmp_path / "out" / "here.json").read_text())["jobs"]
    assert len({job["digests"]["weights"] for job in content.values()}) == 1
    updates = {name: job["series"]["update"] for name, job in content.items()}
    assert [len(updates[job.name]) for job in (whole, other, resumed)] == [4, 4, 2]


# ------------------------------------------------------------------------------------------------------- the set of jobs
def test_the_jobs_cover_every_backend_model_and_number_of_ranks() -> None:
    shipped = {point.name for point in distribution("mtrain").entry_points if point.group == "mtrain.backends"}
    assert {STACKS[job.stack][0] for job in JOBS} == shipped
    for model in ("yolov5n", "ppyoloe_s", "vit", "unet"):
        for ranks in (1, 2):
            assert {frameworks(job) for job in JOBS if (job.model, job.ranks) == (model, ranks)} == {"torch", "paddle"}


@pytest.mark.parametrize("option", ["clip_norm", "accumulate", "ema", "sync_batchnorm"])
def test_each_option_is_trained_on_two_ranks_of_torch_and_of_paddle(option: str) -> None:
    unused = {"clip_norm": None, "accumulate": 1, "ema": None, "sync_batchnorm": False}
    trained = {
        frameworks(job)
        for job in JOBS
        if job.ranks == 2 and spec(job).get("train", {}).get(option, unused[option]) != unused[option]
    }
    assert trained == {"torch", "paddle"}


def test_a_job_comes_after_those_it_refers_to() -> None:
    names = [job.name for job in JOBS]
    assert len(set(names)) == len(names)
    for place, job in enumerate(JOBS):
        assert {job.same_as, job.resumes} - {""} <= set(names[:place])


def test_jobs_are_resumed_in_the_middle_of_an_epoch() -> None:
    for job in JOBS:
        if job.resumes:
            values = spec(job)
            if job.model == "script":  # which says both itself
                values |= {"data": {"options": {"train": 40}}, "train": {"batch_size": 8}}
            updates_per_epoch = values["data"]["options"]["train"] // values["train"]["batch_size"]
            assert values["checkpoint"]["every_updates"] % updates_per_epoch != 0


def frameworks(job: Job) -> str:
    return "paddle" if "paddle" in job.stack or job.stack == "fleet" else "torch"


def spec(job: Job) -> Mapping[str, Any]:
    values: Mapping[str, Any] = yaml.safe_load((SPECS / f"{job.model}.yml").read_text())
    return values


# ---------------------------------------------------------------------------------------------------------- differences
def write_run(
    run: Path,
    *,
    change: Callable[[dict[str, dict[str, Array]]], None] = lambda _: None,
    losses: tuple[float, ...] = (4.0, 3.0, 2.5, 2.25),
    update: int = UPDATES,
) -> Path:
    """The files of a run that a fingerprint is made of."""
    generator = np.random.default_rng(0)
    arrays: dict[str, dict[str, Array]] = {
        part: {name: generator.normal(size=(3, 2)).astype(np.float32) for name in ("a.weight", "b.weight")}
        for part in FILES
    }
    change(arrays)
    checkpoint = run / "checkpoints" / f"step-{UPDATES:08d}"
    checkpoint.mkdir(parents=True)
    for part, file in FILES.items():
        save_file(arrays[part], checkpoint / file)
    state = {"progress": {"update": update}, "counters": {"averaged": update}, "spec": {"report": {"dir": str(run)}}}
    (checkpoint / "state.json").write_text(json.dumps(state))
    rows = [{"kind": "start"}]
    for place, loss in enumerate(losses, start=1):
        row = {
            "kind": "update",
            "update": place,
            "losses": {"total": loss, "box": 1.0},
            "norm": 1.5,
            "learning_rates": [0.1],
        }
        rows.append(row | {"seconds": float(np.random.default_rng().random())})
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return run


def changed_run_differences(tmp_path: Path, **changed: Any) -> list[str]:
    """Return the differences between a run and a copy with something changed."""
    before = fingerprint(write_run(tmp_path / "before"))
    return differences(before, fingerprint(write_run(tmp_path / "after", **changed)))


def test_runs_that_differ_only_in_time_and_place_have_the_same_fingerprint(tmp_path: Path) -> None:
    assert changed_run_differences(tmp_path) == []


@pytest.mark.parametrize("part", list(FILES))
def test_one_changed_bit_of_an_array_is_reported_with_its_size(tmp_path: Path, part: str) -> None:
    def change(arrays: dict[str, dict[str, Array]]) -> None:
        array = arrays[part]["b.weight"]
        array[1, 1] = np.nextafter(array[1, 1], np.float32(np.inf))

    (line,) = changed_run_differences(tmp_path, change=change)
    assert line.startswith(f"{part}: 1 of 2 arrays differ: b.weight; largest relative difference ")
    assert 0 < float(line.split()[-3].rstrip(",")) < 1e-6
    assert line.endswith("in b.weight")


def test_a_loss_that_differs_in_its_last_bit_is_reported_with_its_update(tmp_path: Path) -> None:
    (line,) = changed_run_differences(tmp_path, losses=(4.0, 3.0, float(np.nextafter(2.5, 3)), 2.25))
    assert "losses.total: differs in 1 of 4 updates, first in update 3: 2.5 (0x1.4000000000000p+1) before" in line
    assert "largest relative difference 1.8e-16" in line


def test_a_loss_that_is_no_number_differs_from_a_number(tmp_path: Path) -> None:
    (line,) = changed_run_differences(tmp_path, losses=(4.0, float("nan"), 2.5, 2.25))
    assert "first in update 2" in line
    assert "largest relative difference inf" in line


def test_fewer_updates_are_reported(tmp_path: Path) -> None:
    assert "losses.total: 4 updates before, 3 after" in changed_run_differences(tmp_path, losses=(4.0, 3.0, 2.5))


def test_arrays_that_come_go_or_change_type_or_shape_are_reported(tmp_path: Path) -> None:
    def change(arrays: dict[str, dict[str, Array]]) -> None:
        arrays["weights"]["c.weight"] = arrays["weights"].pop("b.weight")
        arrays["ema"]["a.weight"] = arrays["ema"]["a.weight"].astype(np.float64)
        arrays["moments"]["a.weight"] = arrays["moments"]["a.weight"].reshape(2, 3)

    assert changed_run_differences(tmp_path, change=change) == [
        "weights: 1 arrays only before: b.weight",
        "weights: 1 arrays only after: c.weight",
        "ema: 1 of 2 arrays differ: a.weight; largest relative difference 0.0e+00, in a.weight",
        "moments: 1 of 2 arrays differ: a.weight; largest relative difference inf, in a.weight",
    ]


def test_another_place_in_the_job_is_reported(tmp_path: Path) -> None:
    assert [line.split()[0] for line in changed_run_differences(tmp_path, update=3)] == ["progress", "counters"]


# ---------------------------------------------------------------------------------------------------- the command's code
Main = Callable[..., int]


@pytest.fixture
def main(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Main:
    """The command, with runs that are written instead of trained; ``changed``: what ``write_run`` does for the working
    tree."""

    def run(*arguments: str, changed: Mapping[str, Any] | None = None, job: str = "", fails: bool = False) -> int:
        """``job``: the only one that is changed or fails; empty: all."""

        def train(self: Build, trained: Job) -> Path:
            concerned = self.name == "tree" and job in trained.name
            if concerned and fails:
                raise JobError("exit code 2: error: no such key")
            return write_run(self.folder / "runs" / trained.name, **(dict(changed or {}) if concerned else {}))

        monkeypatch.setattr(Build, "train", train)
        monkeypatch.setattr(command, "build", lambda _, *, name, folder: Build(name=name, folder=folder))
        monkeypatch.setattr(command, "tree_name", lambda: "tree")
        monkeypatch.setattr(command, "commit_of", lambda revision: "base" if revision == "HEAD" else None)
        return command.main([*arguments, "--out", str(tmp_path / "out")])

    return run


def test_the_code_is_0_where_two_builds_give_the_same_bits(main: Main, capsys: pytest.CaptureFixture[str]) -> None:
    assert main("--base", "HEAD", "--only", "vit") == 0
    assert "every bit is the same as in base" in capsys.readouterr().out


def test_the_code_is_1_where_two_builds_differ_and_the_job_is_named(
    main: Main, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main("--base", "HEAD", "--only", "vit", changed={"losses": (4.0, 3.0, 2.5, 2.2)}, job="vit-fleet-x2") == 1
    lines = capsys.readouterr().out.splitlines()
    (place,) = [place for place, line in enumerate(lines) if line.endswith("DIFFERS")]
    assert lines[place].startswith("vit-fleet-x2")
    assert lines[place + 1].startswith("    losses.total: differs in 1 of 4 updates, first in update 4")


@pytest.mark.parametrize("base", [("--base", "HEAD"), ()])
def test_the_code_is_1_where_a_job_fails(main: Main, base: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(*base, "--only", "vit-solo-torch", fails=True) == 1
    assert "failed with the working tree: exit code 2: error: no such key" in capsys.readouterr().out


def test_a_failed_job_is_not_said_to_equal_the_one_it_must_agree_with(
    main: Main, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main("--base", "HEAD", "--only", "vit-fleet-x1", job="vit-fleet-x1", fails=True) == 1
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("vit-fleet-x1")]
    assert "DIFFERS" in line
    assert "=" not in line


def test_the_code_is_1_where_jobs_of_one_build_part_that_must_agree(
    main: Main, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main("--only", "vit-ddp-x2,vit-fsdp-x2") == 0
    assert main("--only", "vit-ddp-x2,vit-fsdp-x2", changed={"losses": (4.0, 3.0, 2.5, 2.2)}, job="vit-fsdp-x2") == 1
    assert "must give the same bits as vit-ddp-x2:" in capsys.readouterr().out


def test_some_jobs_do_not_replace_the_file_of_all(main: Main, tmp_path: Path) -> None:
    assert main() == 0
    content = (tmp_path / "out" / "tree.json").read_text()
    assert json.loads(content)["jobs"].keys() == {job.name for job in JOBS}
    assert main("--only", "vit", changed={"update": 3}) == 0
    assert (tmp_path / "out" / "tree.json").read_text() == content


def test_the_file_has_every_digest_and_what_they_depend_on(main: Main, tmp_path: Path) -> None:
    main("--only", "vit-solo-torch")
    content = json.loads((tmp_path / "out" / "tree-part.json").read_text())
    assert {"cpu", "python", "versions"} <= content["environment"].keys()
    assert "numpy" in content["environment"]["versions"]
    job = content["jobs"]["vit-solo-torch-x1"]
    assert job["series"]["losses.total"][0] == (4.0).hex()
    assert set(job["arrays"]) == set(FILES)
    assert all(len(text) == 64 for names in job["arrays"].values() for text in names.values())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--base", "nowhere"), "git knows no commit nowhere; give a commit, a branch or HEAD~N"),
        (("--only", "resnet"), "no job has resnet in its name; there are yolov5n-solo-torch-x1"),
    ],
)
def test_bad_arguments_are_refused_with_what_to_give(
    main: Main, arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(*arguments)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


# --------------------------------------------------------------------------------------- jobs use the build they belong to
def make_site(folder: Path, *, files: Mapping[str, str]) -> Build:
    """A build that has nothing but ``files``."""
    site = folder / "site"
    for name, text in {"sitecustomize.py": GUARD, **files}.items():
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_text(text)
    return Build(name="base", folder=folder, site=site)


@pytest.mark.job
def test_a_build_without_mtrain_is_refused_and_the_installed_one_is_not_taken(tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"mtrain is not in .*/site"):
        make_site(tmp_path, files={}).check()


@pytest.mark.job
def test_a_build_without_metadata_is_refused_because_its_plugins_would_be_those_of_another(tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"jobs would use .*, expected what is in"):
        make_site(tmp_path, files={"mtrain/__init__.py": ""}).check()


@pytest.mark.job
def test_a_job_whose_ranks_import_another_mtrain_is_refused(tmp_path: Path) -> None:
    """This one has a command line that starts its rank without the build's search path."""
    start = f"import os, subprocess; subprocess.run([{sys.executable!r}, '-c', 'import mtrain'], env={{}}, check=True)"
    one = make_site(tmp_path, files={"mtrain/__init__.py": "", "mtrain/__main__.py": start})
    with pytest.raises(JobError, match=r"only 1 processes imported mtrain from .*, expected at least 2"):
        one.train(Job(model="vit", stack="solo-torch"))


@pytest.mark.job
def test_a_job_counts_the_command_line_and_each_rank_that_imports_the_build(tmp_path: Path) -> None:
    start = f"import subprocess; subprocess.run([{sys.executable!r}, '-c', 'import mtrain'], check=True)"
    one = make_site(tmp_path, files={"mtrain/__init__.py": "", "mtrain/__main__.py": start})
    assert one.train(Job(model="vit", stack="solo-torch")) == tmp_path / "runs" / "vit-solo-torch-x1"


def test_settings_of_the_caller_do_not_reach_a_job(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MTRAIN_TRAIN__SEED", "5")
    assert not any(name.startswith("MTRAIN_") for name in Build(name="here", folder=tmp_path).environment())


@pytest.mark.job
def test_a_failed_job_tells_the_end_of_its_output(tmp_path: Path) -> None:
    start = "import sys; sys.exit('error: train.batch_sise: unknown key')"
    one = make_site(tmp_path, files={"mtrain/__init__.py": "", "mtrain/__main__.py": start})
    with pytest.raises(JobError, match=r"exit code 1: error: train.batch_sise: unknown key"):
        one.train(Job(model="vit", stack="solo-torch"))


def test_a_fingerprint_reads_back_from_the_files_alone(tmp_path: Path) -> None:
    one = fingerprint(write_run(tmp_path / "run"))
    again = Fingerprint(series=one.series, arrays=one.arrays, state=one.state)
    assert (again, again.digests()) == (one, one.digests())
