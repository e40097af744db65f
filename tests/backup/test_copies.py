"""Copies in a folder (file://): complete or absent, verified, kept by rule, and nothing in them is believed."""

import hashlib
import json
import logging
import os
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest

from mtrain.core.checkpoint import format as files
from mtrain.core.checkpoint import store
from mtrain.core.checkpoint.store import Checkpoints
from mtrain.core.interfaces import Progress, State
from mtrain.errors import CheckpointError, SpecError, UsageError
from mtrain.jobs.resume import fetch
from mtrain.jobs.resume.find import IF_ANY
from mtrain.jobs.resume.load import load_spec
from mtrain.spec.config import load
from mtrain.spec.model import CheckpointSpec
from mtrain.weights.backup import form, place, run_copies
from mtrain.weights.backup.copier import Copier
from mtrain.weights.backup.form import BadCopy
from mtrain.weights.backup.place import PlaceError, StorageFolder, reason_of
from mtrain.weights.backup.run_copies import KeepingRule, RunCopies

RULE = KeepingRule(newest=2, best=1, check="read")


class Run:
    """A run folder with checkpoints, and the folder that its copies go to."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "runs" / "digits"
        self.bucket = folder / "bucket"
        self.address = f"file://{self.bucket}"
        self.checkpoints = Checkpoints(self.folder / "checkpoints", keep_last=9, keep_best=1, asynchronous=False)
        (self.folder / "spec.yml").write_text("train: {seed: 3}\n")
        (self.folder / "spec.json").write_text("{}")
        (self.folder / "metrics.jsonl").write_text('{"kind": "start"}\n{"kind": "upd')
        self.id = form.write_id(self.folder)
        self.copies = RunCopies(StorageFolder(f"{self.address}/digits"))

    def save(self, update: int, score: float | None = None, numbers: int = 100) -> Path:
        state = State(weights={"w": np.full(numbers, update, dtype=np.float32)})
        self.checkpoints.save(state, Progress(update=update), score=score, spec={}, extra={})
        return store.folder_of(self.checkpoints.folder, update)

    def copy(self, update: int, score: float | None = None, rule: KeepingRule = RULE) -> Path:
        self.copies.claim(self.id)
        self.copies.add(self.save(update, score), self.folder, self.id, rule)
        return self.bucket / "digits" / f"step-{update:08d}"

    def there(self) -> list[str]:
        return sorted(path.name for path in (self.bucket / "digits").glob("step-*"))


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


@pytest.fixture(autouse=True)
def umask():
    """Restoring makes files private, for this process too."""
    before = os.umask(0o022)
    yield
    os.umask(before)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# --------------------------------------------------------------------------------------------------- copying, restoring
def test_a_run_is_restored_from_its_copy_on_a_host_that_has_nothing(run, tmp_path):
    run.copy(10)
    run.copy(20)
    resume = fetch.restore_run(f"{run.address}/digits", tmp_path / "other")
    assert resume.run == tmp_path / "other" / "digits"
    assert resume.checkpoint == resume.run / "checkpoints" / "step-00000020"
    assert contents(resume.checkpoint) == contents(run.checkpoints.folder / "step-00000020")
    assert (resume.run / "spec.yml").read_text() == "train: {seed: 3}\n"
    assert (resume.run / "metrics.jsonl").read_text() == '{"kind": "start"}\n'  # without the torn line
    assert form.own_id(resume.run) == run.id
    assert store.list_all(resume.run / "checkpoints") == [resume.checkpoint]
    modes = {path.stat().st_mode & 0o077 for path in resume.run.rglob("*")}
    assert modes == {0}


def test_the_manifest_is_written_last_and_every_object_is_read_back(run, monkeypatch):
    done = []
    for verb in ("upload", "put", "digest"):
        original = getattr(StorageFolder, verb)

        def noted(self, name, *arguments, verb=verb, original=original, **named):
            done.append((verb, name.partition("/")[2]))
            return original(self, name, *arguments, **named)

        monkeypatch.setattr(StorageFolder, verb, noted)
    run.copy(10)
    written = [name for verb, name in done if verb != "digest" and name]
    assert written[-1] == "MANIFEST.json"
    assert [name for verb, name in done if verb == "digest"] == written


def test_what_arrives_with_other_bits_is_no_copy(run, monkeypatch):
    upload = StorageFolder.upload

    def corrupted(self, name, file):
        upload(self, name, file)
        path = run.bucket / "digits" / name
        path.write_bytes(path.read_bytes()[:-1] + b"?")

    monkeypatch.setattr(StorageFolder, "upload", corrupted)
    with pytest.raises(BadCopy, match="SHA-256 is not the one written"):
        run.copy(10)
    assert run.copies.names() == ([], ["step-00000010"])


def test_sizes_alone_are_compared_where_that_is_asked_for(run, monkeypatch):
    monkeypatch.setattr(StorageFolder, "digest", lambda *_, **__: pytest.fail("read back"))
    run.copy(10, rule=KeepingRule(newest=2, best=1, check="size"))
    assert run.there() == ["step-00000010"]


def test_a_copy_that_is_there_is_not_made_again(run):
    run.copy(10)
    assert run.copies.add(run.checkpoints.folder / "step-00000010", run.folder, run.id, RULE) == 0


def test_a_checkpoint_that_is_deleted_while_it_is_copied_arrives_whole(run, monkeypatch):
    path = run.save(10)
    upload = StorageFolder.upload

    def deleted(self, name, file):
        import shutil

        shutil.rmtree(path, ignore_errors=True)
        upload(self, name, file)

    monkeypatch.setattr(StorageFolder, "upload", deleted)
    run.copies.claim(run.id)
    run.copies.add(path, run.folder, run.id, RULE)
    assert not path.exists()
    assert run.copies.problems(run.copies.list_copies()[0][0]) == []


def test_the_newest_copies_and_the_best_are_kept_and_torn_ones_go(run):
    torn = run.copy(5)
    (torn / "MANIFEST.json").unlink()
    run.copy(10, score=0.9)
    for update in (20, 30, 40):
        run.copy(update, score=0.1)
    assert run.there() == ["step-00000010", "step-00000030", "step-00000040"]
    best = fetch.restore_run(f"{run.address}/digits", run.bucket.parent / "other", best=True)
    assert best.checkpoint.name == "step-00000010"


@pytest.mark.parametrize("damage", ["no manifest", "bits", "short", "missing file", "manifest", "other COPY"])
def test_a_damaged_copy_is_named_and_an_older_intact_one_is_used(run, tmp_path, caplog, damage):
    run.copy(10)
    newest = run.copy(20)
    weights = newest / "weights.safetensors"
    if damage == "no manifest":
        (newest / "MANIFEST.json").unlink()
    elif damage == "bits":
        weights.write_bytes(weights.read_bytes()[:-1] + b"?")
    elif damage == "short":
        weights.write_bytes(weights.read_bytes()[:-1])
    elif damage == "missing file":
        weights.unlink()
    elif damage == "manifest":
        (newest / "MANIFEST.json").write_text("{}")
    else:
        (newest / "COPY.json").write_bytes((newest.parent / "step-00000010" / "COPY.json").read_bytes())
    with caplog.at_level(logging.WARNING):
        resume = fetch.restore_run(f"{run.address}/digits", tmp_path / "other")
    assert resume.checkpoint.name == "step-00000010"
    assert "step-00000020 is passed over" in caplog.text
    assert [path.name for path in (resume.run / "checkpoints").iterdir()] == ["step-00000010"]


# ------------------------------------------------------------------------------------------------------ hostile content
def forge(step: Path, change) -> None:
    """Write a manifest whose own digest is right, as anyone can who may write to the bucket."""
    manifest = json.loads((step / "MANIFEST.json").read_bytes())
    change(manifest)
    content = json.dumps(manifest | {"digest": files._digest_of(manifest)}).encode()
    (step / "MANIFEST.json").write_bytes(content)
    companions = json.loads((step / "COPY.json").read_bytes())
    companions["manifest"] = hashlib.sha256(content).hexdigest()
    (step / "COPY.json").write_text(json.dumps(companions))


def test_a_manifest_with_names_outside_of_a_checkpoint_is_refused(run, tmp_path):
    evil = b"#!/bin/sh\n"
    for name in ("../../../evil", "/evil", "extra.bin", "", "..", "weights.safetensors/../x"):
        step = run.copy(10)
        (step / "extra.bin").write_bytes(evil)
        entry = {"size_bytes": len(evil), "sha256": hashlib.sha256(evil).hexdigest()}
        forge(step, lambda manifest, name=name, entry=entry: manifest["files"].update({name: entry}))
        with pytest.raises(CheckpointError, match="no intact copy"):
            fetch.restore_run(f"{run.address}/digits", tmp_path / "other")
        (step / "MANIFEST.json").unlink()
    assert not (tmp_path / "other").exists()


def test_files_of_the_run_folder_are_those_that_go_along_and_no_others(run, tmp_path):
    step = run.copy(10)
    (step / "run" / "evil").write_bytes(b"x")
    for name in ("../evil", "plan.json", ".bashrc", "checkpoints/step-00000099/MANIFEST.json"):
        companions = json.loads((step / "COPY.json").read_bytes())
        companions["files"][name] = {"size_bytes": 1, "sha256": hashlib.sha256(b"x").hexdigest()}
        (step / "COPY.json").write_text(json.dumps(companions))
        with pytest.raises(CheckpointError, match="no intact copy"):
            fetch.restore_run(f"{run.address}/digits", tmp_path / "other")


@pytest.mark.parametrize("size", [10**18, -1, True, "100", None, 1.5])
def test_sizes_that_no_disk_has_or_that_are_none_are_refused_before_anything_is_fetched(
    run, tmp_path, size, monkeypatch
):
    step = run.copy(10)
    forge(step, lambda manifest: manifest["files"]["state.json"].update(size_bytes=size))
    monkeypatch.setattr(StorageFolder, "chunks", fetched := chunks_of_weights_fail(StorageFolder.chunks))
    with pytest.raises(CheckpointError, match=r"are free on the disk|no intact copy"):
        fetch.restore_run(f"{run.address}/digits", tmp_path / "other")
    assert fetched


def chunks_of_weights_fail(original):
    def chunks(self, name, *, limit):
        assert not name.endswith((".safetensors", "state.json")), name
        return original(self, name, limit=limit)

    return chunks


def test_an_object_that_is_longer_than_listed_fills_no_disk(run, tmp_path):
    step = run.copy(10)
    with (step / "weights.safetensors").open("ab") as file:
        file.truncate(1 << 33)  # 8 GiB of nothing
    taken = []
    original = place.StorageFolder._part

    def counted(file, size):
        part = original(file, size)
        taken.append(len(part))
        return part

    place.StorageFolder._part = staticmethod(counted)
    try:
        with pytest.raises(CheckpointError, match="no intact copy"):
            fetch.restore_run(f"{run.address}/digits", tmp_path / "other")
    finally:
        place.StorageFolder._part = staticmethod(original)
    assert sum(taken) < 1 << 20


def test_a_huge_manifest_is_not_read(run, tmp_path):
    step = run.copy(10)
    with (step / "MANIFEST.json").open("ab") as file:
        file.truncate(1 << 33)
    with pytest.raises(CheckpointError, match="no intact copy"):
        fetch.restore_run(f"{run.address}/digits", tmp_path / "other")


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b'{"format": 1, "id": "../../x"}', b"[" * 100_000, b"\xff"])
def test_an_id_of_a_run_that_mtrain_did_not_write_is_refused(run, tmp_path, content):
    run.copy(10)
    (run.bucket / "digits" / "run.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"no id of a run|damaged"):
        fetch.restore_run(f"{run.address}/digits", tmp_path / "other")


def test_a_pipe_in_place_of_an_object_is_not_waited_for(run, tmp_path):
    step = run.copy(10)
    (step / "weights.safetensors").unlink()
    os.mkfifo(step / "weights.safetensors")
    with pytest.raises(CheckpointError, match="no intact copy"):
        fetch.restore_run(f"{run.address}/digits", tmp_path / "other")


def test_code_that_only_the_spec_of_a_copy_names_is_not_run(run):
    (run.folder / "spec.yml").write_text("model: {name: ./evil.py:Net}\ndata: {format: ./evil.py:Data}\n")
    run.copy(10)
    fetched = fetch.spec_at(f"{run.address}/digits")
    with pytest.raises(UsageError, match="a run folder is not trusted to run code"):
        load(str(fetched))


def test_what_was_chosen_for_a_run_is_taken_from_its_copies_too(run, tmp_path, monkeypatch):
    """A job that goes on from an address is the job that was interrupted, as from the run folder itself."""
    monkeypatch.chdir(tmp_path)
    (run.folder / "spec.json").write_text('{"train": {"seed": 3}, "backend": {"name": "solo"}}')
    (run.folder / "chosen.json").write_text('{"paths": ["train.seed", "backend.name"]}')
    run.copy(10)
    (tmp_path / "own.yml").write_text("_BASE_: digits.yml\n")

    def read(values):
        return load("own.yml", environ={}, run=values)

    loaded = load_spec(read, resume=f"{run.address}/digits", config="own.yml")
    assert (loaded.spec.train.seed, loaded.spec.backend.name) == (3, "solo")


# ----------------------------------------------------------------------------------------------------- whose copies
def test_copies_of_another_run_of_the_same_name_are_left_alone(run, tmp_path):
    run.copy(10)
    other = Run(tmp_path / "elsewhere")
    with pytest.raises(BadCopy, match="those of another run of this name"):
        RunCopies(run.copies.place).claim(other.id)
    with pytest.raises(CheckpointError, match="is another run than"):
        fetch.restore_run(f"{run.address}/digits", tmp_path / "elsewhere" / "runs")


def test_an_address_of_several_runs_says_which_there_are(run, tmp_path):
    run.copy(10)
    with pytest.raises(CheckpointError, match="it holds digits: add one of these names"):
        fetch.restore_run(run.address, tmp_path / "other")
    with pytest.raises(CheckpointError, match=r"no copies of a run are there$"):
        fetch.restore_run(f"{run.address}/nothing", tmp_path / "other")


@pytest.mark.parametrize("requested", [IF_ANY, None])
def test_without_a_local_folder_the_run_goes_on_from_its_copies(run, tmp_path, requested):
    run.copy(10)
    base = tmp_path / "other"
    resume = fetch.fetch_resume(requested, base=base, name="digits", copy_to=run.address)
    assert resume.checkpoint == base / "digits" / "checkpoints" / "step-00000010"


def test_a_copy_that_is_newer_than_the_local_folder_wins_and_an_older_one_does_not(run, tmp_path):
    run.copy(10)
    base = tmp_path / "other"
    fetch.restore_run(f"{run.address}/digits", base)
    run.copy(20)
    resume = fetch.fetch_resume(IF_ANY, base=base, name="digits", copy_to=run.address)
    assert resume.checkpoint.name == "step-00000020"
    newer = run.save(30)
    resume = fetch.fetch_resume(IF_ANY, base=run.folder.parent, name="digits", copy_to=run.address)
    assert resume.checkpoint == newer


def test_if_any_begins_where_there_are_no_copies_and_says_so_where_it_cannot_know(run, tmp_path, monkeypatch):
    base = tmp_path / "other"
    begun = fetch.fetch_resume(IF_ANY, base=base, name="digits", copy_to=run.address)
    assert begun.checkpoint is None

    def unreachable(self):
        raise PlaceError("EndpointConnectionError")

    monkeypatch.setattr(RunCopies, "run", unreachable)
    with pytest.raises(CheckpointError, match="cannot be read: EndpointConnectionError"):
        fetch.fetch_resume(IF_ANY, base=base, name="digits", copy_to=run.address)
    here = run.save(10)
    assert fetch.fetch_resume(IF_ANY, base=run.folder.parent, name="digits", copy_to=run.address).checkpoint == here


# ------------------------------------------------------------------------------------------------ the copying process
def copier(run: Run, timeout_s: float = 60.0) -> Copier:
    return Copier(CheckpointSpec(copy_to=run.address, copy_timeout_s=timeout_s), run.folder)


def settle(copies: Copier, *, within_s: float = 300.0) -> list:
    heard, deadline = [], time.monotonic() + within_s
    while True:
        heard += copies.news()
        if copies.is_settled():
            return heard
        assert time.monotonic() < deadline, heard
        time.sleep(0.05)


@pytest.mark.job
def test_the_newest_checkpoint_is_copied_and_older_ones_do_not_pile_up(run):
    copies = copier(run)
    try:
        copies.add(run.save(10))
        settle(copies)
        os.kill(copies._process.pid, signal.SIGSTOP)
        for update in (20, 30, 40, 50):
            copies.add(run.save(update))
        assert copies.news() == []
        os.kill(copies._process.pid, signal.SIGCONT)
        heard = settle(copies)
        names = [news.fields["name"] for news in heard]
        assert names[-1] == "step-00000050"
        assert len(names) <= 2  # one may have been under way
        assert copies.summary()["copies"]["newest"] == "step-00000050"
    finally:
        copies.close()


@pytest.mark.job
def test_a_process_that_is_killed_is_started_again_for_the_newest_checkpoint(run):
    copies = copier(run)
    try:
        copies.add(run.save(10))
        settle(copies)
        os.kill(copies._process.pid, signal.SIGSTOP)
        copies.add(run.save(20))
        os.kill(copies._process.pid, signal.SIGKILL)
        (news,) = settle(copies)
        assert (news.kind, news.fields["name"]) == ("copy", "step-00000020")
    finally:
        copies.close()


@pytest.mark.job
def test_a_process_that_hangs_is_given_up_and_told_as_failed_in_one_line(run, monkeypatch):
    monkeypatch.setattr("mtrain.weights.backup.copier.EXTRA_S", 0.0)
    copies = copier(run)
    try:
        copies.add(run.save(10))
        settle(copies)
        copies._settings = type(copies._settings)(
            **{name: getattr(copies._settings, name) for name in copies._settings.__slots__} | {"timeout_s": 0.5}
        )
        copies._start, start = lambda: (start(), os.kill(copies._process.pid, signal.SIGSTOP)), copies._start
        os.kill(copies._process.pid, signal.SIGSTOP)
        copies.add(run.save(20))
        (news,) = settle(copies)
        assert news.kind == "warning"
        assert news.fields["message"].count("\n") == 0
        assert "step-00000020 was not copied to file://" in news.fields["message"]
        assert "the newest copy is step-00000010" in news.fields["message"]
        assert copies.summary()["copies"]["failed"] == 1
    finally:
        copies.close()


@pytest.mark.job
def test_a_full_disk_is_told_and_the_older_copy_stays_intact(run, tmp_path):
    run.bucket.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", str(run.bucket)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("a tmpfs cannot be mounted here")
    copies = copier(run)
    try:
        copies.add(run.save(10, numbers=1000))
        copies.add(run.save(20, numbers=200_000))
        *_, news = settle(copies)
        assert news.kind == "warning"
        assert "No space left on device" in news.fields["message"]
        copies.add(run.save(30, numbers=1000))  # there is room again: the torn copy does not take it
        (news,) = settle(copies)
        assert (news.kind, news.fields["name"]) == ("copy", "step-00000030")
        resume = fetch.restore_run(f"{run.address}/digits", tmp_path / "other")
        assert resume.checkpoint.name == "step-00000030"
    finally:
        copies.close()
        subprocess.run(["umount", str(run.bucket)], check=True)


# --------------------------------------------------------------------------------------------------- addresses, secrets
@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("bucket/prefix", "expected one address such as"),
        ("s3://key:hidden@bucket/x", "an address with a password"),
        ("sftp://me:hidden@host/x", "an address with a password"),
        ("simplecache::s3://bucket/x", "expected one address"),
        ("s3://", "the name of a bucket"),
        ("file://relative/path", "three slashes"),
        ("s3://bucket/../x", "without"),
        ("s3://bucket/x?versionId=hidden", "without"),
    ],
)
def test_an_unusable_address_is_refused_and_a_password_not_repeated(address, expected):
    with pytest.raises(SpecError, match=expected) as refused:
        load("vit_digits", overrides=[f"checkpoint.copy_to={address}"])
    with pytest.raises(UsageError, match=expected):
        StorageFolder(address)
    if "@" in address:
        assert "hidden" not in str(refused.value)


def test_secrets_of_the_environment_are_masked_in_reasons(monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wJalrXUtnFEMI")
    error = OSError("denied for wJalrXUtnFEMI at https://me:pass@host/x\nsecond line")
    assert reason_of(error) == "OSError: denied for *** at https://***@host/x"


@pytest.mark.parametrize(("address", "package"), [("gs://bucket/x", "gcsfs"), ("az://box/x", "adlfs")])
def test_a_missing_package_is_named_in_one_sentence(address, package):
    with pytest.raises(UsageError, match=rf"needs the package {package}; install it with `pip install {package}`"):
        StorageFolder(address).check_package()


def test_lists_show_states(run):
    run.copy(10, score=0.5)
    torn = run.copy(20)
    (torn / "MANIFEST.json").unlink()
    _, copies, bad = fetch.states(f"{run.address}/digits")
    assert [copy.name for copy in copies] == ["step-00000010"]
    assert bad == {"step-00000020": "torn: it has no MANIFEST.json"}
    assert run_copies.newest_first(copies, best=True)[0].manifest.score == 0.5


def test_a_copy_that_is_made_again_counts_as_torn_meanwhile(run, monkeypatch):
    copied = run.copy(10)
    again = run.save(10, numbers=200)
    seen = []
    upload = StorageFolder.upload

    def noted(self, name, file):
        seen.append((copied / "MANIFEST.json").exists())
        upload(self, name, file)

    monkeypatch.setattr(StorageFolder, "upload", noted)
    run.copies.add(again, run.folder, run.id, RULE)
    assert seen == [False] * 4
    assert run.copies.problems(run.copies.list_copies()[0][0]) == []


def test_copies_are_listed_verified_and_fetched_by_the_command(run, tmp_path, monkeypatch):
    from click.testing import CliRunner

    from mtrain.commands.checkpoint import checkpoint as command

    run.copy(10, score=0.5)
    damaged = run.copy(20)
    (damaged / "state.json").write_bytes(b"{}")
    address = f"{run.address}/digits"
    called = CliRunner().invoke(command, ["list", address])
    assert [line.split()[::5] for line in called.output.splitlines()[1:]] == [
        ["step-00000010", "whole"],
        ["step-00000020", "whole"],
    ]
    called = CliRunner().invoke(command, ["verify", address])
    assert called.exit_code == 1
    assert f"{address}/step-00000010: intact\n" in called.output
    assert f"{address}/step-00000020: state.json: 2 bytes, expected" in called.output
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    called = CliRunner().invoke(command, ["fetch", address])
    assert called.output.strip().endswith("runs/digits/checkpoints/step-00000010")


def test_weights_at_an_address_are_fetched_before_they_are_used(run, tmp_path, monkeypatch):
    from mtrain.jobs.resume.fetch import TrainedWeights

    run.copy(10, score=0.9)
    run.copy(20, score=0.1)
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    named = TrainedWeights(weights=f"{run.address}/digits").fetch()
    assert named == TrainedWeights(checkpoint="runs/digits/checkpoints/step-00000010")
    assert TrainedWeights(run=f"{run.address}/digits").fetch() == TrainedWeights(run="runs/digits")
    assert TrainedWeights(run="runs/x", weights="a.pt").fetch() == TrainedWeights(run="runs/x", weights="a.pt")


def test_the_end_of_a_job_says_where_its_copies_are_and_what_failed():
    from mtrain.jobs.run.closing import closing_lines

    copies = {"to": "s3://bucket/x", "copied": 1, "failed": 0, "newest": "step-00000010", "error": None}
    assert "copies:      s3://bucket/x (newest step-00000010)" in closing_lines({"copies": copies}, run_dir=None)
    copies |= {"failed": 1, "newest": None, "error": "step-00000010: PermissionError"}
    line = "copies:      s3://bucket/x (none was made; the last one failed: step-00000010: PermissionError)"
    assert line in closing_lines({"copies": copies}, run_dir=None)
    assert not any("copies" in line for line in closing_lines({}, run_dir=None))
