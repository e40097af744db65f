"""Without mtrain-clusters: what it brings is named with the package, and no job starts as if it were alone in an allocation."""

import pytest

from mtrain.commands import main
from tests.absent import absent
from tests.cluster import test_allocation as recorded

OF_CORE = ("torchrun", "horovodrun", "fleetrun", "openmpi", "openmpi-1-each", "kubeflow-v1", "kubeflow-v1-pet")
"""Environments that the core's own readers recognise."""
OF_PACKAGE = [name for name in (*recorded.STARTED, *recorded.GIVEN) if name not in OF_CORE]
SHOWN = {
    "slurm": "SLURM_",
    "mpich": "PMI_SIZE=",
    "jsrun": "LSB_MCPU_HOSTS=",
    "lsf": "LSB_MCPU_HOSTS=",
    "pbs": "PBS_NODEFILE=",
    "kubeflow": "PET_NNODES=",
    "sagemaker": "SM_",
    "kubernetes": "JOB_COMPLETION_INDEX=",
}
"""Beginning of an environment's name -> the variable that the message has to name."""
DRY = ("train", "-c", "digits", "--devices", "cpu", "--dry-run")


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def enter(name, monkeypatch):
    for variable, value in recorded.environ(name).items():
        monkeypatch.setenv(variable, value)


def error_of(words, capsys):
    assert main(list(words)) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    return line


@pytest.mark.parametrize("name", OF_PACKAGE)
def test_a_job_does_not_start_alone_where_the_package_would_have_read_the_hosts(name, monkeypatch, capsys):
    enter(name, monkeypatch)
    with absent("mtrain-clusters"):
        line = error_of(DRY, capsys)
    assert SHOWN[name.partition("-")[0]] in line
    assert "mtrain-clusters, which is not installed: pip install " in line
    assert "--nnodes 1" in line


@pytest.mark.parametrize("name", OF_PACKAGE)
@pytest.mark.parametrize("words", [["--nnodes", "1"], ["--ips", "203.0.113.1,203.0.113.2", "--nproc-per-node", "1"]])
def test_a_wish_for_this_process_alone_and_hosts_that_are_named_are_obeyed(name, words, monkeypatch, capsys):
    enter(name, monkeypatch)
    with absent("mtrain-clusters"):
        assert main([*DRY, *words]) == 0, capsys.readouterr().err


@pytest.mark.parametrize("name", recorded.ALONE)
def test_a_process_that_is_alone_trains_without_the_package(name, monkeypatch, capsys):
    enter(name, monkeypatch)
    with absent("mtrain-clusters"):
        assert main(list(DRY)) == 0, capsys.readouterr().err


@pytest.mark.parametrize(
    ("variable", "value", "is_refused"),
    [
        ("SLURM_NNODES", "1", False),
        ("SLURM_NNODES", "02", False),
        ("SLURM_NNODES", "10", True),
        ("LSB_MCPU_HOSTS", "a 4", False),
        ("PET_NNODES", "1:1", False),
        ("PET_NNODES", "1:3", True),
        ("SM_HOSTS", '["a"]', False),
        ("SM_HOSTS", "[" + '"a",' * 20_000, True),
        ("SM_RESOURCE_CONFIG", '"hosts":[' * 10_000, False),
        ("PBS_NODEFILE", "/nonexistent", False),
        ("PBS_NODEFILE", "/dev/zero", False),
        ("JOB_COMPLETION_INDEX", "first", False),
    ],
)
def test_what_shows_several_is_neither_guessed_nor_slow(variable, value, is_refused, monkeypatch, capsys):
    monkeypatch.setenv(variable, value)
    with absent("mtrain-clusters"):
        assert main(list(DRY)) == (2 if is_refused else 0)
    assert len(capsys.readouterr().err) < 1000


def test_a_reader_that_the_user_has_disabled_is_not_missed(tmp_path, monkeypatch, capsys):
    enter("lsf", monkeypatch)
    (tmp_path / "plugins.toml").write_text('[allocations]\ndisabled = ["lsf"]\n')
    assert main(list(DRY)) == 0, capsys.readouterr().err
    with absent("mtrain-clusters"):
        assert main(list(DRY)) == 0, capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["train", "-c", "digits", "--cluster", "slurm"], "the cluster 'slurm' is"),
        (["plan", "-c", "digits", "--cluster", "kubernetes"], "the cluster 'kubernetes' is"),
        (["run", "--cluster", "ray", "script.py"], "the cluster 'ray' is"),
        (["submit", "-c", "digits"], "submit"),
        (["status"], "status"),
        (["logs", "-f"], "logs"),
        (["cancel", "7"], "cancel"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_the_package_brings_is_named_with_it(words, what, tmp_path, monkeypatch, capsys):
    (tmp_path / "script.py").write_text("")
    with absent("mtrain-clusters"):
        line = error_of(words, capsys)
    assert what in line
    assert " of mtrain-clusters, which is not installed: pip install " in line
    assert not (tmp_path / "runs").exists()
