"""A resumed job has the spec of its run with the typed values on top; nothing that only the run folder names is run."""

import json
import shutil
import sys
from pathlib import Path

import pytest
import yaml

from mtrain.commands import main
from mtrain.errors import SpecError
from mtrain.spec import config, run_spec
from mtrain.spec.sources import Files
from mtrain.spec.yaml_reader import dump
from tests.commands.run_folders import make_run

OWN = "_BASE_: digits.yml\ntrain: {epochs: 1}\n"


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Return the folder of a run of ZeRO on two ranks with a checkpoint, as a command line has started it."""
    monkeypatch.chdir(tmp_path)
    Path("own.yml").write_text(OWN)
    overrides = ["backend.name=deepspeed", "backend.options.stage=2", "cluster.nproc_per_node=2", "train.seed=42"]
    return make_run("own.yml", "own", *overrides)


def plan(capsys, *words) -> tuple[dict, str]:
    code = main(["plan", "--json", *words])
    out, err = capsys.readouterr()
    assert code == 0, err
    return json.loads(out), err


@pytest.mark.parametrize(
    "words",
    [
        ["--resume", "runs/own"],
        ["--resume", "runs/own", "-c", "own.yml"],
        ["--resume", "-c", "own.yml"],
        ["--resume", "if-any", "-c", "own.yml"],
        ["--resume", "runs/own/checkpoints/step-00000001", "-c", "own.yml"],
    ],
)
def test_a_resumed_job_keeps_backend_ranks_and_options_of_its_run(run, capsys, words):
    planned, told = plan(capsys, *words)
    assert planned["backend"] == "deepspeed"
    assert planned["numbers"]["ranks"] == 2 or "2" in str(planned["numbers"]["ranks"])
    assert planned["run_dir"].endswith("runs/own")
    assert "not as in the run" not in told


STEP = "runs/own/checkpoints/step-00000001"


@pytest.mark.parametrize("named", [["--name", "other"], ["-o", "report.name=other"], ["--name", "own-2"]])
@pytest.mark.parametrize("resumed", ["runs/own", "runs/own/checkpoints", STEP, "runs/latest", f"{STEP}/"])
def test_another_name_for_a_run_that_goes_on_is_refused_and_nothing_is_changed(run, capsys, resumed, named):
    (run.parent / "latest").symlink_to("own")
    before = sorted(run.rglob("*"))
    message = refused(capsys, "train", "--resume", resumed, *named)
    name = named[-1].removeprefix("report.name=")
    assert f"--resume {resumed} and --name {name}: the run own goes on in its own folder" in message
    assert "leave --name out" in message
    assert f"cp -r {run} {run.parent}/{name}" in message, "a run of another name begins as a copy"
    assert sorted(run.rglob("*")) == before


@pytest.mark.job
def test_a_copy_of_a_run_goes_on_beside_it(run, capsys):
    shutil.copytree(run, run.parent / "other")
    planned, _ = plan(capsys, "--resume", STEP.replace("own", "other"), "--name", "other")
    assert planned["run_dir"].endswith("runs/other")


@pytest.mark.parametrize("folder", ["own", "own-2"])
def test_the_name_that_a_run_was_given_may_be_typed_again(run, capsys, folder):
    run.rename(run.parent / folder)
    planned, _ = plan(capsys, "--resume", f"runs/{folder}", "--name", "own")
    assert planned["run_dir"].endswith(f"runs/{folder}")


def test_what_is_typed_on_top_is_told_with_both_values(run, capsys):
    Path("own.yml").write_text(OWN + "optimizer: {learning_rate: 0.123}\n")
    planned, told = plan(capsys, "--resume", "runs/own", "-c", "own.yml", "-b", "ddp", "--seed", "7")
    assert planned["backend"] == "ddp"
    line = next(line for line in told.splitlines() if "not as in the run" in line)
    for change in ("backend.name deepspeed there, ddp here (--backend ddp)", "train.seed 42 there, 7 here (--seed 7)"):
        assert change in line
    assert "optimizer.learning_rate" in line
    assert "own.yml:3" in line


def test_a_submission_types_anew_what_is_not_as_it_was_chosen_for_the_run(run, capsys):
    words = ["submit", "-c", "own.yml", "--cluster", "slurm", "--dry-run"]
    assert main([*words, "--resume", "runs/own", "--seed", "7"]) == 0
    assert "-o train.seed=7" in capsys.readouterr().out
    assert main([*words, "--name", "own"]) == 0
    assert "-o train.seed" not in capsys.readouterr().out


def test_a_comparison_of_plans_goes_on_from_the_run_too(run, capsys):
    code = main(["plan", "--diff", "deepspeed", "ddp", "--resume", "runs/own", "-c", "own.yml"])
    difference = capsys.readouterr().out
    assert code == 0
    assert "--nproc-per-node=1" not in difference, "both have the ranks of the run"


def test_functions_of_python_take_the_spec_of_the_run_too(run):
    import mtrain

    for spec in (None, "own.yml"):
        planned = mtrain.plan(spec, resume="runs/own")
        assert (planned.backend, planned.size) == ("deepspeed", 2)
    assert mtrain.plan("own.yml", resume="auto", ranks=1).size == 1


def edited(run, **sections):
    values = yaml.safe_load((run / "spec.yml").read_text())
    for name, content in sections.items():
        values[name] = {**values[name], **content} if isinstance(content, dict) else content
    (run / "spec.yml").write_text(yaml.safe_dump(values))


def refused(capsys, *words) -> str:
    assert main(list(words)) == 2
    return capsys.readouterr().err


COMMANDS = [["plan", "--resume", "runs/own"], ["train", "--resume", "runs/own"], ["evaluate", "--run", "runs/own"]]


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("with_json", [True, False])
def test_code_that_only_a_run_folder_names_is_refused_and_not_run(run, capsys, command, with_json):
    if not with_json:  # a folder that somebody has made by hand is trusted no more
        (run / "spec.json").unlink()
    evil = run / "evil.py"
    evil.write_text(f"#!{sys.executable}\nopen({str(run / 'ran')!r}, 'w')\nclass Evil: pass\n")
    evil.chmod(0o755)
    toml = run / "evil.toml"
    toml.write_text('[backends.deepspeed]\nmodule = "evil:Evil"\n')
    spec = (run / "spec.yml").read_text()
    for sections, words in (
        ({"backend": {"python": str(evil)}}, f"-o backend.python={evil}"),
        ({"plugins": str(toml)}, f"-o plugins={toml}"),
        ({"report": {"reporters": {f"{evil}:Evil": True}}}, "-o 'report.reporters="),
    ):
        (run / "spec.yml").write_text(spec)
        edited(run, **sections)
        message = refused(capsys, *command)
        assert "not trusted to run code" in message
        assert words in message
    (run / "spec.yml").write_text(spec)
    shutil.move(toml, run / "plugins.toml")
    assert f"-o plugins={run / 'plugins.toml'}" in refused(capsys, *command)
    assert not (run / "ran").exists()


def test_lines_for_a_shell_in_a_run_folder_are_refused(run, capsys):
    edited(run, cluster={"name": "slurm", "options": {"setup": ["touch ran"]}, "nodes": 1})
    assert "-o 'cluster.options.setup=" in refused(capsys, "plan", "-c", "runs/own/spec.yml")


def test_a_reporter_that_the_run_and_the_typed_spec_both_name_is_one(run, capsys):
    Path("watch.py").write_text("def told(record, a=0): pass\n")
    edited(run, report={"reporters": {f"{Path('watch.py').resolve()}:told": {"a": 1}}})
    Path("own.yml").write_text(OWN + "report: {reporters: {./watch.py:told: {a: 2}}}\n")
    plan(capsys, "--resume", "runs/own", "-c", "own.yml")


@pytest.mark.parametrize("command", [*COMMANDS, ["plan", "-c", "runs/own/spec.yml"]])
def test_an_emptied_or_shortened_spec_in_a_run_folder_is_named_and_not_taken_for_the_default_job(run, capsys, command):
    file = run / "spec.yml"
    whole = file.read_text()
    for content, what in (
        ("", "is empty"),
        ("# all gone\n", "is empty"),
        (whole[: whole.index("\ntrain:") + 1], "lacks train"),
    ):
        file.write_text(content)
        message = refused(capsys, *command)
        assert f"runs/own/spec.yml: {what}" in message
        assert "cp runs/own/spec.json runs/own/spec.yml" in message
        assert "yolov5n" not in message
    shutil.copy(run / "spec.json", file)
    assert plan(capsys, "--resume", "runs/own")[0]["backend"] == "deepspeed", "the remedy works"
    file.write_text("")
    (run / "spec.json").unlink()
    message = refused(capsys, "plan", "--resume", "runs/own")
    assert "runs/own/spec.yml: is empty" in message
    assert "-c" in message


def test_the_spec_of_a_run_that_ends_at_any_line_is_refused(tmp_path):
    values = dict(config.load("gpt_docs", environ={}).values)
    assert isinstance(list(values.values())[-1], dict), "a section is last"
    lines = dump(values).splitlines(keepends=True)
    file = tmp_path / "spec.yml"
    file.with_suffix(".json").write_text(json.dumps(values))
    for count in range(len(lines)):
        file.write_text("".join(lines[:count]))
        with pytest.raises(SpecError, match=r"lacks|is empty"):
            run_spec.check_whole(Files.read(file), file)
    file.write_text("".join(lines))
    run_spec.check_whole(Files.read(file), file)


def test_the_current_folder_is_no_way_around(run, capsys, monkeypatch):
    (run / "plugins.toml").write_text("")
    monkeypatch.chdir(run)
    assert "not trusted to run code" in refused(capsys, "plan", "--resume", ".")


@pytest.mark.parametrize("name", ["spec.json", "chosen.json"])
def test_an_emptied_file_of_a_run_folder_is_named(run, capsys, name):
    (run / name).write_text("")
    assert f"runs/own/{name}: cannot be read" in refused(capsys, "plan", "--resume", "runs/own", "-c", "own.yml")
