"""What ``--resume`` was given and cannot be resumed is named for what it is, with what to give in its place."""

import os
from pathlib import Path

import pytest

from mtrain.errors import CheckpointError
from mtrain.jobs.resume import find
from mtrain.system import runfolder


def refused(path: Path) -> str:
    with pytest.raises(CheckpointError) as told:
        find.find_resume(str(path), base=path.parent, name="job")
    return str(told.value)


def test_a_folder_that_is_not_there_is_no_run_without_checkpoints(tmp_path: Path) -> None:
    assert "no such folder; give that of a run" in refused(tmp_path / "none")
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    assert "no such folder, a link to nothing" in refused(tmp_path / "link")


def test_a_file_of_weights_leads_to_its_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "step-1").mkdir()
    weights = tmp_path / "step-1" / "weights.safetensors"
    weights.write_bytes(b"x")
    told = refused(weights)
    assert "it is a file" in told
    assert told.endswith(f"give {tmp_path / 'step-1'}")


def test_a_folder_of_runs_names_the_runs(tmp_path: Path) -> None:
    (tmp_path / "runs" / "mine" / "checkpoints").mkdir(parents=True)
    assert f"it is a folder of runs; give one of them: {tmp_path / 'runs' / 'mine'}" in refused(tmp_path / "runs")


def test_a_run_whose_checkpoints_are_gone_is_told_as_before(tmp_path: Path) -> None:
    (tmp_path / "mine" / "checkpoints").mkdir(parents=True)
    assert f"no intact checkpoint in {tmp_path / 'mine' / 'checkpoints'}; give the path" in refused(tmp_path / "mine")


def test_folders_of_others_beside_the_runs_are_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "runs" / "mine" / "checkpoints").mkdir(parents=True)
    (tmp_path / "runs" / "another's").mkdir()
    real = os.stat

    def stat(path: Path, **options: bool) -> os.stat_result:
        if "another's/" in str(path):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, **options)

    monkeypatch.setattr(os, "stat", stat)
    assert f"give one of them: {tmp_path / 'runs' / 'mine'}" in refused(tmp_path / "runs")


def test_a_run_named_through_the_link_to_the_latest_goes_on_in_its_own_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The link is pointed to the run that goes on, which would be itself."""
    checkpoint = tmp_path / "mine" / "checkpoints" / "step-1"
    checkpoint.mkdir(parents=True)
    runfolder.point_latest(tmp_path / "mine")
    monkeypatch.setattr(find.store, "newest", lambda folder: folder / "step-1")
    monkeypatch.setattr(find.store, "is_checkpoint", lambda path: path.name.startswith("step-"))
    monkeypatch.setattr(find.store, "verify", lambda path: [])
    latest = tmp_path / "latest"
    for requested in (latest, latest / "checkpoints" / "step-1"):
        resume = find.find_resume(str(requested), base=tmp_path, name="job")
        assert resume == find.Where(tmp_path / "mine", checkpoint)
        runfolder.point_latest(resume.run)
        assert latest.resolve() == tmp_path / "mine"
    own = tmp_path / "link"  # A link of the user's own is never pointed elsewhere.
    own.symlink_to(tmp_path / "mine")
    assert find.find_resume(str(own), base=tmp_path, name="job").run == own
