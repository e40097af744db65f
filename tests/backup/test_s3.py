"""Copies on a real server of S3, faults of the server and of the way to it included.

The client's library and the server need an environment of their own: ``make test-others`` runs this file there.
"""

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("s3fs", reason="S3 is tested in an environment of its own")
pytest.importorskip("moto", reason="S3 is tested in an environment of its own")

from mtrain.core.checkpoint import store
from mtrain.errors import CheckpointError
from mtrain.jobs.resume import fetch
from mtrain.spec.model import CheckpointSpec
from mtrain.weights.backup.copier import Copier
from mtrain.weights.backup.place import PlaceError, StorageFolder
from tests.backup.s3 import BUCKET, KEY, SECRET, s3
from tests.backup.test_copies import Run, contents, settle, umask  # noqa: F401

pytestmark = [pytest.mark.job, pytest.mark.filterwarnings("ignore")]  # of the server's libraries


@pytest.fixture
def served(monkeypatch, tmp_path):
    with s3() as (server, road):
        for name, value in environment(road).items():
            monkeypatch.setenv(name, value)
        yield server, road


def environment(road) -> dict[str, str]:
    return {
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_ENDPOINT_URL_S3": road.url,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_CONFIG_FILE": "/nonexistent",
        "AWS_SHARED_CREDENTIALS_FILE": "/nonexistent",
        "AWS_EC2_METADATA_DISABLED": "true",
    }


@pytest.fixture
def run(tmp_path):
    return Run(tmp_path)


def copier(run: Run, timeout_s: float = 30.0) -> Copier:
    return Copier(CheckpointSpec(copy_to=f"s3://{BUCKET}/team", copy_timeout_s=timeout_s), run.folder)


ADDRESS = f"s3://{BUCKET}/team/digits"


def test_a_run_is_restored_from_the_bucket_and_retention_holds_there(served, run, tmp_path):
    copies = copier(run)
    try:
        for update, score in ((10, 0.9), (20, 0.1), (30, 0.1), (40, None)):
            copies.add(run.save(update, score, numbers=3_000_000 if update == 40 else 100))  # 12 MB: in parts
            (news,) = settle(copies)
            assert news.kind == "copy", news
    finally:
        copies.close()
    _, listed, bad = fetch.states(ADDRESS)
    assert [copy.name for copy in listed] == ["step-00000010", "step-00000030", "step-00000040"]
    assert bad == {}
    resume = fetch.restore_run(ADDRESS, tmp_path / "other")
    assert contents(resume.checkpoint) == contents(run.checkpoints.folder / "step-00000040")
    older = fetch.restore_run(f"{ADDRESS}/step-00000010", tmp_path / "other")
    assert older.checkpoint.name == "step-00000010"
    assert fetch.spec_at(ADDRESS).read_text() == "train: {seed: 3}\n"


def failure(copies: Copier) -> str:
    """The one line that tells of a failed copy; it holds no secret."""
    (news,) = settle(copies)
    assert news.kind == "warning", news
    message = news.fields["message"]
    assert "\n" not in message
    assert SECRET not in message
    assert "the job goes on" in message
    return message


def faulty(run: Run, road, fault: str, timeout_s: float = 30.0) -> str:
    """Copy one checkpoint, meet the fault at the next, and copy the one after; return how the failure was told."""
    copies = copier(run, timeout_s)
    try:
        copies.add(run.save(10))
        assert [news.kind for news in settle(copies)] == ["copy"]
        road.fault, road.passed, road.limit = fault, 0, 3_000_000
        copies.add(run.save(20, numbers=1_500_000))
        message = failure(copies)
        assert "step-00000020 was not copied to s3://" in message
        assert "the newest copy is step-00000010" in message
        road.fault = ""
        older = fetch.restore_run(ADDRESS, run.folder.parent.parent / "meanwhile")
        assert older.checkpoint.name == "step-00000010"
        copies.add(run.save(30))
        assert [news.kind for news in settle(copies)] == ["copy"]
        assert copies.summary()["copies"] == {
            "to": ADDRESS,
            "copied": 2,
            "failed": 1,
            "newest": "step-00000030",
            "error": None,
        }
    finally:
        copies.close()
    return message


def test_a_connection_that_is_cut_in_the_middle_of_a_copy(served, run, caplog):
    with caplog.at_level(logging.WARNING):
        message = faulty(run, served[1], "cut")
    assert "s3://" in message


def test_a_bucket_that_is_full(served, run):
    assert "The quota of the bucket is used up" in faulty(run, served[1], "full")


@pytest.mark.slow
def test_a_server_that_hangs_is_given_up_after_copy_timeout_s(served, run):
    assert "for 30 s (checkpoint.copy_timeout_s)" in faulty(run, served[1], "silent", timeout_s=30.0)


def test_a_server_that_is_killed_in_the_middle_of_a_copy_and_comes_back(served, run, tmp_path):
    server, _ = served
    copies = copier(run)
    try:
        copies.add(run.save(10))
        assert [news.kind for news in settle(copies)] == ["copy"]
        server.stop()
        copies.add(run.save(20))
        failure(copies)
        server.start()
        copies.add(run.save(30))
        assert [news.kind for news in settle(copies)] == ["copy"]
    finally:
        copies.close()


def test_a_wrong_key_is_told_without_the_key(served, run, tmp_path):
    server, _ = served
    server.check_keys(True)
    try:
        copies = copier(run)
        copies.add(run.save(10))
        message = failure(copies)
        copies.close()
        assert "this job has made no copy so far" in message
        assert "access is denied: check the credentials" in message
        with pytest.raises(CheckpointError, match="cannot be read") as refused:
            fetch.restore_run(ADDRESS, tmp_path / "other")
        assert SECRET not in str(refused.value)
    finally:
        server.check_keys(False)


def test_a_refusal_of_head_that_has_a_body_is_told_as_the_refusal(served):
    """The client's library takes the body for another answer, and tells "unhandled exception: 400"."""
    place = StorageFolder(ADDRESS)
    place.put("a", b"content")
    served[1].fault = "denied"
    for ask in (lambda: place.size("a"), lambda: place.read("a", limit=100)):
        with pytest.raises(PlaceError, match=r"You may not read this \(access is denied: check the cred") as refused:
            ask()
        assert refused.value.lasting
        assert not refused.value.missing
    served[1].fault = ""
    assert (place.size("a"), place.read("a", limit=100)) == (7, b"content")


def test_a_bucket_that_does_not_exist_and_missing_credentials_are_told(served, run, tmp_path, monkeypatch):
    with pytest.raises(CheckpointError, match="no copies of a run are there"):
        fetch.restore_run("s3://nobucket/team/digits", tmp_path / "other")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    with pytest.raises(CheckpointError, match="credentials"):
        fetch.restore_run(ADDRESS, tmp_path / "other")


# ------------------------------------------------------------------------------------------------------------ whole jobs
SETTINGS = (
    "cluster.threads=1", "train.epochs=1", "train.batch_size=64", "report.plots=false", "report.tensorboard=false",
    "evaluate.enabled=false", "report.display=plain", "data.workers=1",
)  # fmt: skip


def mtrain(folder: Path, *words: str, road=None) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    environ = {**os.environ, "HOME": str(folder), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "mtrain", *words]
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, check=False, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def summary(folder: Path) -> dict:
    return json.loads((folder / "runs" / "digits" / "summary.json").read_text())


@pytest.mark.parametrize("backend", ["ddp", pytest.param("fleet", marks=pytest.mark.slow)])
def test_a_job_goes_on_from_the_bucket_on_an_empty_host_to_the_same_bits(served, tmp_path, backend):
    job = [
        "train",
        "-c",
        "vit_digits",
        "--backend",
        backend,
        "--nproc-per-node",
        "2",
        "--name",
        "digits",
        "-o",
        *SETTINGS,
    ]
    copied = [
        "checkpoint.every_updates=10",
        "checkpoint.every_epochs=null",
        "checkpoint.copies_kept=99",
        "train.epochs=4",
        f"checkpoint.copy_to=s3://{BUCKET}/{backend}",
    ]
    mtrain(tmp_path / "first", *job, *copied)
    undisturbed = summary(tmp_path / "first")
    assert undisturbed["copies"]["failed"] == 0
    _, copies, _ = fetch.states(f"s3://{BUCKET}/{backend}/digits")
    early = copies[0].name
    assert early < copies[-1].name  # which of the others are made depends on how fast they are
    text = mtrain(tmp_path / "second", "train", "--resume", f"s3://{BUCKET}/{backend}/digits/{early}")
    assert f"goes on from runs/digits/checkpoints/{early}" in text
    resumed = summary(tmp_path / "second")
    for name in ("weights_sha256", "ema_sha256", "updates"):
        assert resumed[name] == undisturbed[name]
    for folder in ("first", "second"):
        for path in (tmp_path / folder / "runs").rglob("*"):
            assert not path.is_file() or SECRET.encode() not in path.read_bytes(), path


def test_a_job_whose_bucket_refuses_it_trains_to_its_end(served, tmp_path):
    server, _ = served
    server.check_keys(True)
    try:
        text = mtrain(
            tmp_path, "train", "-c", "vit_digits", "--backend", "solo", "--name", "digits", "-o", *SETTINGS,
            f"checkpoint.copy_to=s3://{BUCKET}/x",
        )  # fmt: skip
    finally:
        server.check_keys(False)
    assert text.count("was not copied to s3://checkpoints/x/digits") == 1
    result = summary(tmp_path)
    assert result["reason"] == "done"
    assert result["copies"]["failed"] == 1
    assert result["copies"]["error"].startswith("step-00000022: ")
    assert store.newest(tmp_path / "runs" / "digits" / "checkpoints") is not None
