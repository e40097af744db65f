"""Hosts, places and ports are facts of one start: a resumed job finds those of its own start, or refuses."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from mtrain.commands import main
from mtrain.core.checkpoint.format import Saved, write
from mtrain.core.interfaces import Progress, State
from mtrain.errors import UsageError
from mtrain.jobs.resume import choices, load
from mtrain.spec import config

pytestmark = pytest.mark.smoke

OWN = "_BASE_: digits.yml\ntrain: {epochs: 1}\n"
HERE, ELSEWHERE, FURTHER = "127.0.0.1", "203.0.113.1", "203.0.113.2"
"""An address of this machine, and two that belong to no machine."""
PLACE = (
    "cluster.node_rank=0",
    f"cluster.master_addr={ELSEWHERE}",
    "cluster.master_port=29700",
    "cluster.control_port=29800",
    "cluster.start_port=29900",
    "cluster.interface=eth7",
)
RESUMES = pytest.mark.parametrize("own", [None, "own.yml"])


def started(folder: Path, *overrides: str) -> None:
    """Make the folder `runs/own` of a run that was started with these values."""
    (folder / "own.yml").write_text(OWN)
    values = ["backend.name=ddp", "cluster.nproc_per_node=2", *overrides]
    loaded = config.load("own.yml", overrides=values, environ={})
    run = folder / "runs/own"
    (run / "checkpoints").mkdir(parents=True)
    (run / "spec.json").write_text(config.resolved_json(loaded.spec))
    (run / "spec.yml").write_text(yaml.safe_dump(dict(loaded.values)))
    (run / "chosen.json").write_text(json.dumps(choices.describe(loaded, ())))
    write(run / "checkpoints/step-00000001", Saved(state=State(weights={}), progress=Progress(update=1), spec={}))


def resumed(own: str | None, *overrides: str) -> config.Loaded:
    source = own or config.RunSpec("runs/own/spec.yml")
    return load.load_spec(
        lambda run: config.load(source, overrides=overrides, environ={}, run=run), resume="runs/own", config=own
    )


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@RESUMES
def test_the_place_and_the_ports_of_a_start_are_not_those_of_the_next(here: Path, own: str | None) -> None:
    started(here, f"cluster.ips=[{HERE},{ELSEWHERE}]", *PLACE)
    loaded = resumed(own)
    cluster = loaded.spec.cluster
    assert (cluster.node_rank, cluster.master_addr, cluster.interface) == (None, None, None)
    assert (cluster.master_port, cluster.control_port, cluster.start_port) == ("auto", "auto", "auto")
    assert (loaded.spec.backend.name, cluster.nproc_per_node) == ("ddp", 2), "they are the job's own choice"
    assert cluster.ips == [HERE, ELSEWHERE], "this machine is one of them"
    assert any("cluster.node_rank 0" in note and "cluster.master_port 29700" in note for note in loaded.notes)
    assert resumed(own, "cluster.node_rank=1", "cluster.master_port=29701").spec.cluster.node_rank == 1


@RESUMES
def test_hosts_without_this_machine_are_refused_until_those_of_now_are_named(here: Path, own: str | None) -> None:
    started(here, f"cluster.ips=[{ELSEWHERE},{FURTHER}]", "cluster.slots=[2,1]", "cluster.nproc_per_node=auto")
    with pytest.raises(UsageError, match=f"{ELSEWHERE}, {FURTHER}.* --ips"):
        resumed(own)
    cluster = resumed(own, f"cluster.ips=[{HERE},{FURTHER}]").spec.cluster
    assert (cluster.ips, cluster.slots) == ([HERE, FURTHER], None)
    assert resumed(own, "cluster.nodes=1").spec.cluster.ips == []


@RESUMES
def test_a_run_of_one_host_goes_on_on_another(here: Path, own: str | None) -> None:
    started(here, f"cluster.ips=[{ELSEWHERE}]")
    cluster = resumed(own).spec.cluster
    assert (cluster.ips, cluster.nproc_per_node) == ([], 2)


@RESUMES
def test_a_cluster_that_reaches_its_hosts_from_anywhere_keeps_them(here: Path, own: str | None) -> None:
    started(here, f"cluster.ips=[{ELSEWHERE},{FURTHER}]", "cluster.name=ssh")
    assert resumed(own).spec.cluster.ips == [ELSEWHERE, FURTHER]


@pytest.mark.job
def test_hosts_that_a_scheduler_gave_are_asked_for_anew(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from mtrain.jobs.hosts import allocated_hosts

    def allocation(hosts: str, job: str) -> dict[str, str]:
        return {"SLURM_JOB_ID": job, "SLURM_JOB_NODELIST": hosts, "SLURM_JOB_NUM_NODES": "2", "SLURM_NNODES": "2"}

    started(here)
    first = allocated_hosts.complete(config.load("own.yml", environ={}), allocation("a[1-2]", "7"))
    assert first.spec.cluster.ips == ["a1", "a2"]
    run = here / "runs/own"
    (run / "spec.json").write_text(config.resolved_json(first.spec))
    (run / "spec.yml").write_text(yaml.safe_dump(dict(first.values)))
    (run / "chosen.json").write_text(json.dumps(choices.describe(first, ())))
    for name, value in allocation("b[3-4]", "8").items():
        monkeypatch.setenv(name, value)
    assert main(["plan", "--json", "--resume", "runs/own"]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert [command["host"] for command in planned["commands"]] == ["b3", "b4"]


# -------------------------------------------------------------------------------- a folder that does not say what was chosen
SCRIPT = "import mtrain\nmtrain.session()\n"


def test_a_script_without_a_record_of_choices_takes_the_spec_of_its_run_and_says_so(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from mtrain.jobs.run.request_files import write_spec

    (here / "r.py").write_text(SCRIPT)
    words = ["run", "--backend", "solo", "--seed", "42", "-o", "train.clip_norm=0.5"]
    loaded = script_job(here, *words)
    run = here / "runs/own"
    (run / "checkpoints").mkdir(parents=True)
    write_spec(loaded, run)
    write(run / "checkpoints/step-00000001", Saved(state=State(weights={}), progress=Progress(update=1), spec={}))
    again = script_job(here, "run", "--resume", "runs/own")
    train = again.spec.train
    assert (again.spec.backend.name, train.seed, train.clip_norm) == ("solo", 42, 0.5)
    line = next(note for note in again.notes if "chosen.json" in note)
    assert "backend.name solo" in line
    assert "train.seed 42" in line
    typed = script_job(here, "run", "--resume", "runs/own", "--seed", "7")
    assert typed.spec.train.seed == 7
    assert any("train.seed 42 there, 7 here (--seed 7)" in note for note in typed.notes)
    assert main(["plan", "--resume", "runs/own"]) == 2
    assert "mtrain run --resume runs/own" in capsys.readouterr().err


def script_job(folder: Path, *words: str) -> config.Loaded:
    """Return the spec that `mtrain run` reads for `r.py` with these words."""
    from mtrain.commands import train as command
    from mtrain.commands.training_request import TrainRequest
    from mtrain.jobs.job import Outcome

    found = []

    def train(request: TrainRequest, **rest: Any) -> Outcome:
        found.append(request.load())
        return Outcome(code=0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command, "run_training", train)
        assert main([*words, str(folder / "r.py")]) == 0
    return found[0]


def test_a_spec_beside_a_run_without_a_record_of_choices_is_told(here: Path) -> None:
    started(here, "train.seed=42")
    (here / "runs/own/chosen.json").unlink()
    notes = resumed("own.yml").notes
    assert any("no chosen.json" in note for note in notes)
    assert any("train.seed 42 there, 0 here" in note for note in notes)
    assert resumed(None).spec.train.seed == 42
    assert not any("chosen.json" in note for note in resumed(None).notes), "the spec of the run has all its values"


def test_what_was_typed_for_a_start_is_named_unless_something_else_is_typed_or_a_scheduler_chooses(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started(here, "cluster.master_port=29700", "cluster.interface=eth7")
    whole = "cluster.master_port 29700, cluster.interface eth7; type those that hold here"
    assert [note for note in resumed("own.yml").notes if whole in note]
    (note,) = [note for note in resumed("own.yml", "cluster.interface=eth1").notes if "facts of its start" in note]
    assert note.endswith(": cluster.master_port 29700; type those that hold here")
    assert not [note for note in resumed("own.yml", *PLACE[4:], "cluster.master_port=1").notes if "facts of" in note]
    # In a job of a scheduler nobody types hosts.
    for name, value in {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_NUM_NODES": "2"}.items():
        monkeypatch.setenv(name, value)
    (note,) = [note for note in resumed("own.yml").notes if "facts of its start" in note]
    assert note.endswith("cluster.interface eth7; they are found anew")
