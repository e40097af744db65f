"""The lines that YOLOv5's and PaddleDetection's users type become values of a spec, or are answered in one sentence."""

import json
import re
import shlex

import pytest
from click.testing import CliRunner

from mtrain.commands import front, main
from mtrain.commands.foreign_flags import MEGATRON
from mtrain.errors import SpecError
from mtrain.jobs.preflight.job_checks import check
from mtrain.spec.resolved import Resolved
from tests.commands.test_front_door import here, parse  # noqa: F401  # the fixture empties the folder and the environment


def flags(line: str, config: str = "yolov5n"):
    from mtrain.commands.options import load_job

    return load_job(parse("-c", config, *shlex.split(line)))


VALUES = {
    "--img 320": {"data.image_size": 320},
    "--imgsz=320": {"data.image_size": 320},
    "--img_size 320": {"data.image_size": 320},
    "--batch 32": {"train.batch_size": 32},
    "--weights start.pt": {"model.weights": "start.pt"},
    "--cfg models/yolov5s.yaml": {"model.name": "yolov5s"},
    "--workers 3": {"data.workers": 3},
    "--cache": {"data.cache": "ram"},
    "--cache disk": {"data.cache": "disk"},
    "--noval": {"evaluate.every_epochs": None, "evaluate.every_updates": None},
    "--patience 7": {"train.patience": 7},
    "--freeze 2": {"train.freeze": [r"^model\.(0|1)\."]},
    "--freeze 0 4 --seed 3": {"train.freeze": [r"^model\.(0|4)\."], "train.seed": 3},
    "--save_period 5": {"checkpoint.every_epochs": 5},
    "--label-smoothing 0.1": {"model.options.label_smoothing": 0.1},
    "--label_smoothing=0.1": {"model.options.label_smoothing": 0.1},
    "--cos-lr": {"schedule.name": "cosine"},
    "--image-weights": {"data.image_weights": True},
    "--single-cls": {"data.classes.*": "item"},
    "--multi-scale": {"data.augment.multi_scale": 0.5},
    "--cos_lr": {"schedule.name": "cosine"},
    "--optimizer AdamW": {"optimizer.rule": "adamw"},
    "--project 'my runs'": {"report.dir": "my runs"},
    "--noplots": {"report.plots": False},
    "--fleet": {"backend.name": "fleet"},
    "--use_vdl true": {"report.reporters.visualdl": True},
    "--use-vdl=false": {"report.reporters.visualdl": False},
    "--use_vdl=True": {"report.reporters.visualdl": True},
    "--use-vdl": {"report.reporters.visualdl": True},
    "--use_vdl --seed 3": {"report.reporters.visualdl": True, "train.seed": 3},
    "--num-gpus 4": {"cluster.nproc_per_node": 4},
    "--num_gpus=4": {"cluster.nproc_per_node": 4},
    "--num_nodes 2": {"cluster.nodes": 2},
    "--global-batch-size 48": {"train.batch_size": 48},
}


@pytest.mark.parametrize("line", VALUES)
def test_a_flag_of_another_project_becomes_values_of_the_spec_with_the_flag_as_their_origin(line):
    from mtrain.spec.provenance import lookup

    loaded = flags(line)
    for path, value in VALUES[line].items():
        assert lookup(loaded.values, tuple(path.split("."))) == value
        assert loaded.origin(path).kind == "flag"
        assert str(loaded.origin(path)).startswith("--")


def test_two_flags_say_what_a_spec_may_be_without():
    assert flags("--patience 0", config="yolov5n_bccd").spec.train.patience is None
    loaded = flags("--weights ''")
    assert loaded.spec.model.weights is None
    assert str(loaded.origin("model.weights")) == "--weights ''"


def test_a_data_yaml_replaces_the_data_of_the_spec(here):  # noqa: F811
    (here / "mine.yml").write_text("_BASE_: yolov5n_bccd\ndata: {classes: [RBC]}\n")
    (here / "my data").mkdir()
    (here / "my data" / "cells.yaml").write_text("path: .\ntrain: images\nval: images\nnames: [a]\n")
    data = flags("--data 'my data/cells.yaml'", config="mine.yml").spec.data
    assert (data.format, data.root, data.options) == ("yolo", "my data", {"description": "cells.yaml"})
    assert (data.train, data.val, data.images, data.names) == (None, None, None, None)
    assert data.classes == ["RBC"]  # the file chooses none: those that it does not have are refused when it is read
    data = flags("--single-cls --data 'my data/cells.yaml'", config="yolov5n_bccd").spec.data
    assert (data.format, data.classes) == ("yolo", {"*": "item"})


def test_without_c_the_recipe_is_the_shipped_one_that_cfg_names_and_never_the_demos(here, capsys):  # noqa: F811
    from mtrain.commands.options import load_job

    (here / "cells.yaml").write_text("path: .\ntrain: images\nval: images\nnames: [a]\n")
    loaded = load_job(parse("--data", "cells.yaml", "--cfg", "models/yolov5n.yaml"))
    assert loaded.name == "yolov5n"
    assert loaded.spec.model.name == "yolov5n"
    assert loaded.spec.optimizer == load_job(parse("-c", "yolov5n")).spec.optimizer
    assert main(["train", "--data", "cells.yaml"]) == 2
    assert "--data cells.yaml: no spec is given" in capsys.readouterr().err
    (here / "mtrain.yml").write_text("_BASE_: yolov5s\n")
    assert load_job(parse("--data", "cells.yaml")).spec.model.name == "yolov5s"


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("yolov5s.pt", "yolov5s"),
        ("weights/yolov5n.pt", "yolov5n"),
        ("ppyoloe_crn_s_300e_coco.pdparams", "ppyoloe_s"),
        ("ppyoloe_plus_crn_m_80e_coco.pdparams", "ppyoloe_plus_m"),
    ],
)
def test_published_weights_name_the_recipe_where_nothing_else_does(file, name, here):  # noqa: F811
    from mtrain.commands.options import load_job

    loaded = load_job(parse("--weights", file))
    assert (loaded.name, loaded.spec.model.name, loaded.spec.model.weights) == (name, name, file)
    assert load_job(parse("--weights", file, "--cfg", "yolov5m.yaml")).name == "yolov5m"
    assert load_job(parse("--weights", file, "-c", "digits")).name == "digits"
    assert load_job(parse("--weights", "best.pt")).name == "digits"


def test_a_job_without_a_length_is_refused_by_its_plan(here, capsys):  # noqa: F811
    assert main(["plan", "-c", "yolov5n", "-o", "train.epochs=null"]) == 2
    assert "neither `epochs` nor `updates` is given" in capsys.readouterr().err


def test_curves_for_visualdl_leave_the_other_reporters_of_the_spec(here):  # noqa: F811
    (here / "mine.yml").write_text("_BASE_: yolov5n\nreport: {reporters: {csv: true}}\n")
    assert dict(flags("--use_vdl true", config="mine.yml").spec.report.reporters) == {"csv": True, "visualdl": True}


def test_four_gpus_are_four_ranks(here, capsys):  # noqa: F811
    assert main(["plan", "--json", "-c", "digits", "-b", "ddp", "--num-gpus", "4", "--devices", "cpu"]) == 0
    assert json.loads(capsys.readouterr().out)["numbers"]["ranks"].startswith("4 ")


@pytest.mark.job
@pytest.mark.parametrize("line", [flag.replace("=", " 2") for flag in MEGATRON])
def test_what_is_said_on_a_flag_of_megatron_can_be_typed(line, capsys, here):  # noqa: F811
    (here / "r.py").write_text("import mtrain\n")
    for command in (["train", "-c", "vit_digits"], ["run"]):
        script = ["r.py"] if command == ["run"] else []
        assert main([*command, *line.split(), *script]) == 2
        told = capsys.readouterr().err.splitlines()[-1]
        assert told.startswith(f"error: {line}: ")
        if (setting := re.search(r"-o ('[^']*'|\S+)", told)) is not None:
            words = ["-b", "deepspeed"] if "-b deepspeed" in told else []
            if "-b fsdp" in told:
                words = ["-b", "fsdp", "--nproc-per-node", "2", "--devices", "cpu"]
            spec = "gpt_docs" if "data.length" in told else "vit_digits"
            assert main(["plan", "-c", spec, *words, "-o", setting[1].strip("';,")]) == 0, told
            capsys.readouterr()


ANSWERED = {
    "--batch -1": "-o train.max_micro_batch=auto",
    "--batch-size=-1": "-o train.max_micro_batch=auto",
    "--hyp 'my hyp.yaml'": "--hyp 'my hyp.yaml': hyper-parameters are part of the spec: mtrain config import 'my hyp.yaml' ",
    "--slim_config prune.yml": "--slim-config prune.yml: pruning, quantisation and distillation are sections of a spec",
    "--evolve": "--evolve: the search is a command of its own: mtrain sweep",
    "--rect": "--rect: training images are square here",
    "--nosave": "checkpoint.keep_last=1",
    "--data nowhere.yaml": "--data nowhere.yaml: no such file; expected YOLOv5's data YAML",
    "--cfg models/mine.yaml": "--cfg models/mine.yaml: 'mine' is no model here",
    "--freeze backbone": "--freeze backbone: expected numbers of YOLOv5's layers",
    "--save-period -1": "--save-period -1: mtrain always saves",
    "--fleet --backend ddp": "--fleet and --backend ddp are both given",
    "--eval --noval": "--eval and --noval are both given",
}


@pytest.mark.parametrize("line", ANSWERED)
def test_what_has_no_counterpart_is_answered_in_a_sentence_with_exit_code_2(line, capsys, here):  # noqa: F811
    assert main(["-c", "yolov5n", *shlex.split(line)]) == 2
    stderr = capsys.readouterr().err
    assert ANSWERED[line] in stderr.splitlines()[-1]
    assert not list(here.iterdir())


@pytest.mark.parametrize("spelling", ["-r runs/a", "--resume runs/a", "--resume=runs/a"])
def test_resume_has_the_short_name_that_paddledetection_gives_it(spelling):
    assert parse(*shlex.split(spelling))["resume"] == "runs/a"


def test_layers_that_the_model_does_not_have_are_refused_before_any_rank_starts(here, capsys):  # noqa: F811
    sizes = ["data.options={train: 4, val: 2, size: 64}", "data.image_size=64", "train.batch_size=2"]
    arguments = ["-c", "digits", "-b", "solo", "-o", "model.name=yolov5n", "data.root=d", *sizes]
    for line, told in (
        (
            "--freeze 77 78",
            "train.freeze: '^model\\\\.(77|78)\\\\.' is found in no parameter name; they are like model.0.",
        ),
        ("--freeze 25", "leaves no parameter to train; freeze fewer"),
    ):
        assert main([*arguments, *shlex.split(line)]) == 2
        assert told in capsys.readouterr().err
    assert not (here / "runs").exists()


def test_the_start_says_how_much_is_frozen(here):  # noqa: F811
    sizes = "'data.options={train: 4, val: 2, size: 64}' data.root=d data.image_size=64 train.batch_size=2"
    spec = flags(f"-b solo --freeze 2 -o model.name=yolov5n {sizes}", config="digits").spec
    assert [note for note in check(Resolved.of(spec), size=1) if "freeze" in note] == [
        "train.freeze: 6 of 178 arrays, 0.4% of their numbers, are not trained"
    ]


# ------------------------------------------------------------------------------------------------------------- --eval
def test_eval_evaluates_while_training_and_changes_nothing_where_the_spec_does_so(monkeypatch):
    assert flags("--eval").spec == flags("").spec
    with pytest.raises(
        SpecError, match=r"--eval: -o evaluate\.every_epochs=null gives evaluate\.every_epochs another value"
    ):
        flags("--eval -o evaluate.every_epochs=null")
    monkeypatch.setenv("MTRAIN_EVALUATE__EVERY_EPOCHS", "null")
    loaded = flags("--eval")
    assert loaded.spec.evaluate.every_epochs == 1
    assert str(loaded.origin("evaluate.every_epochs")) == "--eval"
    every = flags("--eval -o evaluate.every_epochs=null evaluate.every_updates=5").spec.evaluate
    assert (every.every_epochs, every.every_updates) == (None, 5)


def test_the_help_of_a_command_lists_its_own_flags_only():
    def help_of(*words: str) -> str:
        return CliRunner().invoke(front, [*words, "--help"], prog_name="mtrain").output

    for words in (("evaluate",), ("config", "show"), ("config", "explain"), ("data", "check")):
        shown = help_of(*words)
        assert "--opt" in shown
        assert not [
            flag for flag in ("--epochs", "--seed", "--resume", "--dry-run", "--eval ", "--freeze") if flag in shown
        ]
    assert "--batch-size" in help_of("evaluate")
    assert "--epochs" in help_of("train")


# ------------------------------------------------------------------------------------------------ one rule for all commands
def test_two_values_after_one_o_flag_are_two_overrides_for_every_command(capsys, here):  # noqa: F811
    for command in (["config", "show"], ["plan"], ["data", "check"], ["evaluate"]):
        assert main([*command, "-o", "train.batch=1", "train.seeds=2"]) == 2
        stderr = capsys.readouterr().err
        assert "-o train.batch=1: unknown key" in stderr, command
        assert "-o train.seeds=2: unknown key" in stderr, command
    assert main(["data", "check", "digits", "-c", "digits"]) == 2
    assert "digits and -c digits are both given" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["predict x.jpg", "compare -b ddp", "data check", "plugins test ddp"])
def test_out_and_output_are_one_flag(command, capsys, here):  # noqa: F811
    for flag in ("--out", "--output"):
        main([*command.split(), flag])
        assert f"error: {flag}: no value is given; expected" in capsys.readouterr().err


# --------------------------------------------------------------------------------------------------------- suggestions
def test_a_message_never_suggests_what_was_written(here, capsys):  # noqa: F811
    (here / "plugins.toml").write_text("[launchers.slurm]\nenabled = true\n")
    (here / "a.yml").write_text("train: {plugins: x.toml}\n")
    assert main(["config", "validate", "a.yml"]) == 2
    stderr = capsys.readouterr().err
    assert "did you mean 'enabled'" not in stderr
    assert (
        'launchers.slurm.enabled: unknown key; a list in [launchers] says which plugins may be used: enabled = ["slurm"]'
        in stderr
    )
    assert "train.plugins: unknown key; 'plugins' belongs to no section: it is a key at the top" in stderr


# ------------------------------------------------------------------------------------------------------------- aliases
def test_an_override_changes_one_use_of_a_yaml_alias_and_not_its_twin(here):  # noqa: F811
    from mtrain.spec import config

    (here / "a.yml").write_text(
        "_BASE_: yolov5n\n"
        "optimizer: {groups: [&plain {match: a, weight_decay: 0.0}, *plain, {match: ''}]}\n"
        "data:\n  resize: stretch\n  augment: {mosaic: 0, translate: 0, scale: 0, hsv_h: 0, hsv_s: 0, hsv_v: 0,\n"
        "    distort: {contrast: &span [0.5, 1.5], brightness: *span}}\n"
    )
    overrides = ["optimizer.groups.0.match=b", "data.augment.distort.contrast.0=0.7"]
    spec = config.load("a.yml", overrides=overrides, environ={}).spec
    assert [group.match for group in spec.optimizer.groups] == ["b", "a", ""]
    assert spec.data.augment.distort is not None
    assert list(spec.data.augment.distort.contrast) == [0.7, 1.5]
    assert list(spec.data.augment.distort.brightness) == [0.5, 1.5]
