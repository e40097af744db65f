"""Command lines become a spec or a clear refusal."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import click
import numpy as np
import pytest
from safetensors.numpy import save_file

from mtrain.commands import Front, front, helping, main, verbs
from mtrain.commands.options import JobCommand, job_options, load_job, spread_values
from mtrain.errors import SpecError
from mtrain.spec.sources import shipped_names


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current folder and no MTRAIN_ variables."""
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("MTRAIN_") or name == "FLAGS_START_PORT"]:
        monkeypatch.delenv(name)
    return tmp_path


def parse(*args: str) -> dict:
    """Return the arguments that a job command receives for ``args``."""

    @click.command(cls=JobCommand)
    @job_options
    def job(**params):
        return params

    return job.main(list(args), standalone_mode=False)


def spec(*args: str):
    return load_job(parse("-c", "yolov5n_bccd", *args)).spec


# ---------------------------------------------------------------------------------------------------------------- flags
def test_every_flag_reaches_its_place_in_the_spec():
    actual = spec(
        "--backend", "solo", "--ips", "10.0.0.1,10.0.0.2", "--node-rank", "1", "--master-addr", "10.0.0.1",
        "--master-port", "4000", "--nproc-per-node", "2", "--gpus", "0,1", "--start-port", "6170", "--log-dir", "logs",
        "--max-restarts", "3", "--nnodes", "2", "--amp", "--sync-bn", "--seed", "7", "--epochs", "9",
        "--batch-size", "32", "--name", "5",
    )  # fmt: skip
    assert actual.backend.name == "solo"
    cluster = actual.cluster
    assert (cluster.ips, cluster.node_rank, cluster.master_addr) == (["10.0.0.1", "10.0.0.2"], 1, "10.0.0.1")
    assert (cluster.master_port, cluster.nproc_per_node, cluster.devices) == (4000, 2, [0, 1])
    assert (cluster.start_port, cluster.log_dir, cluster.max_restarts) == (6170, "logs", 3)
    assert (actual.train.precision, actual.train.sync_batchnorm, actual.train.seed) == ("bf16", True, 7)
    assert (actual.train.epochs, actual.train.batch_size, actual.report.name) == (9, 32, "5")


@pytest.mark.parametrize("flag", ["--devices", "--gpus", "--selected_gpu", "--selected-gpu", "--device"])
def test_devices_have_many_names(flag):
    assert spec(flag, "0,1").cluster.devices == [0, 1]
    assert spec(f"{flag}=cpu").backend.options == {"device": "cpu"}


@pytest.mark.parametrize("flags", [("--nproc_per_node", "3"), ("--nproc-per-node=3",)])
def test_dashes_and_underscores_are_alike(flags):
    assert spec(*flags).cluster.nproc_per_node == 3


def test_flags_that_are_not_typed_change_nothing():
    params = parse()
    assert params["resume"] is None
    assert not params["dry_run"]
    assert load_job(parse("-c", "yolov5n_bccd")).spec == spec()


@pytest.mark.parametrize(
    ("args", "precision"), [(("--amp",), "bf16"), (("--amp=fp16",), "fp16"), (("--no-amp",), "fp32")]
)
def test_amp_is_a_precision(args, precision):
    assert spec(*args, "-o", "train.seed=1").train.precision == precision


@pytest.mark.parametrize(
    ("args", "resume"),
    [((), None), (("--resume",), "auto"), (("--resume", "-o", "a=1"), "auto"), (("--resume", "runs/a"), "runs/a")],
)
def test_resume_takes_a_path_or_none(args, resume):
    assert parse(*args)["resume"] == resume


def test_no_override_is_lost_however_they_are_written():
    params = parse("-o", "a.b=1", "c.d=2", "--override=e=3", "f=4", "--seed", "1", "--opt", "g=5", "-oh=6", "i=7")
    assert params["overrides"] == ("a.b=1", "c.d=2", "e=3", "f=4", "g=5", "h=6", "i=7")
    assert params["seed"] == 1
    assert spread_values(["-o", "a=1", "--", "b=2"]) == ["-o", "a=1", "--", "b=2"]


def test_a_flag_and_an_override_of_one_key_are_refused_unless_they_agree():
    assert spec("--seed", "3", "-o", "train.seed=3").train.seed == 3
    with pytest.raises(SpecError, match=r"--seed 3: -o train\.seed=2 gives train\.seed another value"):
        spec("--seed", "3", "-o", "train.seed=2")


def test_a_host_file_gives_hosts_and_ranks(here):
    (here / "hosts").write_text("# two machines\n10.0.0.1 slots=2\n\n10.0.0.2:2  # the other\n")
    cluster = spec("--hostfile", "hosts").cluster
    assert (cluster.ips, cluster.nproc_per_node) == (["10.0.0.1", "10.0.0.2"], 2)
    (here / "hosts").write_text("fe80::1 slots=2\n[fe80::2] slots=2\n")
    cluster = spec("--hostfile", "hosts").cluster
    assert (cluster.ips, cluster.nproc_per_node) == (["fe80::1", "fe80::2"], 2)
    assert spec("-H", "[fe80::1]:2,[fe80::2]:2").cluster.ips == ["fe80::1", "fe80::2"]
    assert spec("-H", "fe80::1,fe80::2").cluster.ips == ["fe80::1", "fe80::2"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("-H", "a:1,b"), "of every host, or of none"),
        (("-H", "a:x"), "not HOST or HOST:RANKS"),
        (("-H", "a:²"), "not HOST or HOST:RANKS"),
        (("-H", "a:" + "9" * 5000), "not HOST or HOST:RANKS"),
        (("-H", "[::1"), "not HOST or HOST:RANKS"),
        (("-H", ","), "names no host"),
        (("-H", "a", "--hostfile", "b"), "both given"),
        (("--hostfile", "absent"), "--hostfile absent: no such file"),
        (("--hostfile", "/dev/zero"), "--hostfile /dev/zero: is no file"),
        (("--nnodes", "3", "-H", "a,b"), "--ips names 2"),
        (("--nnodes", "1:4", "-H", "a,b"), "--ips names 2"),
        (("--nnodes", "4:1"), "the fewest hosts come first; 1:4"),
        (("--nnodes", "1:"), "expected a number of hosts"),
        (("--nnodes", "²"), "expected a number of hosts"),
        (("--devices", "zero"), "expected numbers such as 0,1"),
        (("--devices", "²"), "expected numbers such as 0,1"),
        (("--amp", "--no-amp"), "both given"),
    ],
)
def test_flags_that_contradict_are_refused(args, message):
    with pytest.raises(click.UsageError, match=message):
        spec(*args)


def test_a_wrong_value_of_a_flag_is_told_with_the_flag():
    with pytest.raises(SpecError) as caught:
        spec("--batch-size", "0")
    assert caught.value.problems == ("--batch-size 0: train.batch_size: given 0, expected an integer > 0",)


@pytest.mark.parametrize(("flag", "meant"), [("--batchsize", "--batch-size"), ("--nproc-per-nod", "--nproc-per-node")])
def test_a_misspelt_flag_is_refused_with_the_nearest_and_never_becomes_an_argument(flag, meant):
    with pytest.raises(click.NoSuchOption) as caught:
        parse(flag, "8")
    assert meant in caught.value.format_message()
    assert caught.value.exit_code == 2


def test_lr_is_the_learning_rate_and_quiet_and_verbose_choose_the_display(capsys):
    assert spec("--lr", "0.5").optimizer.learning_rate == 0.5
    assert spec("-q").report.display == "quiet"
    assert spec("-v").report.display == "verbose"
    assert main(["plan", "-q", "-v"]) == 2
    assert "--quiet and --verbose are both given" in capsys.readouterr().err


# ----------------------------------------------------------------------------------------------------------- front door
@pytest.mark.parametrize(
    ("typed", "run"),
    [([], ["train"]), (["-c", "x"], ["train", "-c", "x"]), (["plan", "-c", "x"], ["plan", "-c", "x"])],
)
def test_without_a_command_train_is_meant(typed, run, monkeypatch):
    calls = []

    def command(name):
        @click.command(name, context_settings={"ignore_unknown_options": True})
        @click.argument("rest", nargs=-1)
        def stand_in(rest):
            calls.extend([name, *rest])

        return stand_in

    monkeypatch.setattr(Front, "get_command", lambda self, ctx, name: command(name))
    assert main(typed) == 0
    assert calls == run


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["trian"], "did you mean 'train'?"),
        (["yolov5.yml"], "mtrain -c yolov5.yml"),
        (["config", "explain", "train.batch"], "did you mean 'train.batch_size'?"),
        (["config", "show", "-c", "absent.yml"], "error: absent.yml: no such file"),
        (["config", "show", "-o", "x"], "error: -o x: expected PATH=VALUE"),
        (["config", "validate"], "error: FILE... is missing; the command is: mtrain config validate"),
        (["evaluate", "--run", "absent"], "error: absent: no such run folder"),
        (
            ["predict", "--weights", __file__, __file__],
            "test_front_door.py: not a file of weights; expected .safetensors",
        ),
    ],
)
def test_wrong_use_ends_with_2_and_says_what_is_meant(args, message, capsys):
    assert main(args) == 2
    shown = capsys.readouterr()
    assert message in shown.err
    assert "Traceback" not in shown.err


def test_a_file_of_weights_without_classes_asks_for_them(tmp_path, capsys):
    save_file({"weight": np.zeros(1, np.float32)}, tmp_path / "plain.safetensors")
    assert main(["predict", "--weights", str(tmp_path / "plain.safetensors"), __file__]) == 2
    assert "-o data.names=cat,dog" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("train --batchsize 8", "--batchsize: `mtrain train` has no such flag; did you mean --batch-size?"),
        ("train --seed three", "--seed three: expected a whole number"),
        ("train --seed", "--seed: no value is given; expected a whole number"),
        ("train --dry-run=1", "--dry-run: expected no value; the flag stands alone"),
        ("train --ssh-port 99999", "--ssh-port 99999: expected a whole number >= 1 and <= 65535"),
        ("export --iou-threshold 0", "--iou-threshold 0.0: expected a number > 0 and <= 1"),
        ("train --use-vdl=perhaps", "--use-vdl perhaps: expected true or false"),
        ("plan --diff ddp", "--diff: no value is given; expected 2 values, BACKEND BACKEND"),
        ("plugins list modls", "did you mean 'models'?"),
        ("data convert x --to cocoo", "--to cocoo: expected coco, voc or yolo; did you mean 'coco'?"),
        ("predict", "for example: mtrain predict runs/digits photos/"),
        ("train spec.yml", "spec.yml: no such file, and no shipped config of that name"),
        ("plan digits -c digits", "two specs are given: digits and -c digits; keep one"),
        ("train a.b=3", "values of the spec are given with -o: mtrain train -o a.b=3"),
        ("report a b", "b: not expected here; the command is: mtrain report [OPTIONS] RUN"),
        ("config shw", "config has no command 'shw'; did you mean 'show'?"),
        ("export a --run b", "two runs are given: a and --run b; keep one"),
        ("predict run", "run is a run folder, and images are missing; give both: mtrain predict run IMAGES..."),
    ],
)
def test_every_error_is_one_line_in_the_same_words(line, message, here, capsys):
    (here / "run").mkdir()
    (here / "run/metrics.jsonl").touch()
    assert main(line.split()) == 2
    (told,) = capsys.readouterr().err.splitlines()
    assert told.startswith("error: ")
    assert message in told


def test_a_spec_is_the_argument_of_the_commands_that_take_one(capsys):
    for command in ("plan digits", "train digits --dry-run", "config show digits"):
        assert main(command.split()) == 0, command
        assert re.search(r"mtrain/configs/digits\.yml", capsys.readouterr().out), command


def test_a_run_comes_before_the_images_of_predict(here, monkeypatch):
    from mtrain.commands import predict

    asked = []
    monkeypatch.setattr(
        predict, "predict_on", lambda request: asked.append(request) or predict.Prediction(code=0, out=here)
    )
    (here / "run").mkdir()
    (here / "run/metrics.jsonl").touch()
    assert main(["predict", "run", "a.jpg", "b.jpg"]) == 0
    assert main(["predict", "a.jpg", "b.jpg"]) == 0
    assert main(["predict", "--run", "other", "run", "a.jpg"]) == 0
    assert [(each.run, list(each.sources)) for each in asked] == [
        ("run", ["a.jpg", "b.jpg"]), (None, ["a.jpg", "b.jpg"]), ("other", ["run", "a.jpg"])
    ]  # fmt: skip


def test_four_mistakes_are_four_error_lines(here, capsys):
    (here / "a.yml").write_text(
        "train:\n  batch_size: eight\noptimizer:\n  momentun: 0.9\n  rule: sdg\nmodel: {name: yolov5q}\n"
    )
    assert main(["config", "validate", "a.yml"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(": ")[0] for line in lines] == ["error"] * 4
    assert [line.split()[1] for line in lines] == ["a.yml:2", "a.yml:4", "a.yml:5", "a.yml:6"]


def test_a_traceback_is_shown_when_asked_for(monkeypatch, capsys):
    monkeypatch.setenv("MTRAIN_DEBUG", "1")
    assert main(["config", "show", "-c", "absent.yml"]) == 2
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize(("raised", "code"), [(KeyboardInterrupt(), 130), (RuntimeError("broken"), 1)])
def test_interrupts_and_faults_have_their_exit_codes(raised, code, monkeypatch, capsys):
    def get_command(self, ctx, name):
        raise raised

    monkeypatch.setattr(Front, "get_command", get_command)
    assert main(["train"]) == code
    assert ("Traceback" in capsys.readouterr().err) == (code == 1)


def test_show_prints_a_spec_that_loads_as_itself(here, capsys):
    assert main(["config", "show", "-c", "yolov5n_bccd", "-o", "train.seed=5"]) == 0
    (here / "again.yml").write_text(capsys.readouterr().out)
    assert load_job({"config": "again.yml"}).spec == spec("-o", "train.seed=5")


def test_explain_says_value_meaning_type_default_and_what_was_replaced(capsys):
    assert main(["config", "explain", "train.batch_size", "-c", "yolov5n_bccd", "-o", "train.batch_size=4"]) == 0
    shown = capsys.readouterr().out
    for part in ("train.batch_size = 4", "GLOBAL batch", "an integer > 0", "default  16", "-o train.batch_size=4"):
        assert part in shown
    assert "over     8  from mtrain/configs/yolov5n_bccd.yml:" in shown


def test_the_schema_has_the_keys_of_all_tasks_and_of_one_spec(capsys):
    assert main(["config", "schema"]) == 0
    shown = capsys.readouterr().out
    assert '"batch_size"' in shown
    assert '"mosaic"' in shown
    assert main(["config", "schema", "-c", "vit_digits"]) == 0
    assert '"mosaic"' not in capsys.readouterr().out


def test_every_flag_of_train_is_in_a_group_and_those_of_other_programs_are_last(capsys):
    command = front.get_command(click.Context(front), "train")
    shown = {each.name for each in command.params if isinstance(each, click.Option) and not each.hidden}
    assert shown - {"help_all"} <= {name for names in helping.GROUPS.values() for name in names}
    assert main(["train", "--help-all"]) == 0
    headings = [line for line in capsys.readouterr().out.splitlines() if re.fullmatch(r"[A-Z].*:", line)]
    assert headings == [*(f"{heading}:" for heading in helping.GROUPS), "Other:", "Examples:"]


@pytest.mark.parametrize("words", [["train"], ["submit"], ["run"], ["plan"], ["doctor"]])
def test_the_help_of_a_job_shows_usual_flags_and_help_all_the_rest(words, capsys):
    assert main([*words, "--help"]) == 0
    usual = capsys.readouterr().out
    assert main([*words, "--help-all"]) == 0
    every = capsys.readouterr().out
    assert {"--config", "--backend", "--nproc-per-node", "--help-all"} <= flags_in(usual) < flags_in(every)
    assert flags_in(every) - flags_in(usual) >= {"--launcher", "--start-port", "--ssh-port", "--hang-timeout"}
    assert len(usual.splitlines()) <= 70


def test_the_help_of_a_command_with_few_flags_is_whole(capsys):
    assert main(["predict", "--help"]) == 0
    assert "--help-all" not in capsys.readouterr().out


def flags_in(text):
    """The flags that a help lists, each at the beginning of its line."""
    return {flag for line in text.splitlines() if line.startswith("  -") for flag in re.findall(r"--[a-z][\w-]+", line)}


def leaves(group, words=()):
    """Return the words and the command of every command of a group, and of its groups."""
    for name in group.list_commands(click.Context(group)):
        command = group.get_command(click.Context(group), name)
        if isinstance(command, click.Group):
            yield from leaves(command, (*words, name))
        else:
            yield " ".join((*words, name)), command


def test_every_example_of_a_help_can_be_typed(here):
    commands = dict(leaves(front))
    (here / "runs/digits").mkdir(parents=True)
    (here / "yolov5s.pt").touch()
    missing = {path for path, command in commands.items() if not getattr(command, "examples", ())}
    assert missing == {"checkpoint fetch", "config import"}, "each other one has examples"
    for path, command in commands.items():
        for line, _ in getattr(command, "examples", ()):
            words = shlex.split(line.partition(">")[0])[1:] or ["train"]
            words = words if words[0] in verbs.find_verbs() else ["train", *words]
            named = max((each for each in commands if " ".join(words).startswith(each)), key=len)
            assert named == path or path == "submit", line
            commands[named].make_context(named, words[len(named.split()) :])


def test_the_help_of_a_command_ends_with_its_examples(capsys):
    assert main(["config", "list", "--help"]) == 0
    assert capsys.readouterr().out.endswith("Examples:\n  mtrain config list  # the names that -c takes\n")


def test_the_list_of_specs_has_the_shipped_ones_and_those_here(here, capsys):
    (here / "mine.yml").write_text("_BASE_: yolov5n\n")
    (here / "other.yml").write_text("services: {}\n")
    assert main(["config", "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:-2]] == shipped_names()
    assert next(line for line in lines if " yolov5n " in line).split(maxsplit=1)[1] == (
        "YOLOv5n (nano) on COCO from scratch, 300 epochs"
    )
    assert lines[-2:] == ["in this folder:", "  mine.yml"]


@pytest.mark.smoke
@pytest.mark.job
def test_help_lists_every_command_and_imports_nothing_that_takes_long():
    code = "import sys; from mtrain.commands import main; main(['--help']); print(*sys.modules)"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    shown, _, loaded = process.stdout.rstrip().rpartition("\n")
    assert all(f"  {name} " in shown for name in verbs.find_verbs())
    assert [line.strip(":") for line in shown.splitlines() if re.fullmatch("[A-Z][a-z]+:", line)] == [
        "Options",
        *verbs.HEADINGS,
    ]
    slow = ("asyncio", "cv2", "matplotlib", "numpy", "pydantic", "rich", "sklearn", "torch", "yaml")
    assert [name for name in slow if name in loaded.split()] == []
