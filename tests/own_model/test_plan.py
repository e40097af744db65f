"""The plan of a user's own model: what it shows, and what it refuses without running any of the user's code."""

from pathlib import Path

import pytest

from mtrain.errors import SpecError, UsageError
from mtrain.jobs.plan.plan import Plan, make_plan
from mtrain.spec import config, references
from tests.own_model.runs import EXAMPLE

SPEC = """
model: {{name: {model}, options: {options}}}
data: {{format: {data}}}
train: {{epochs: 1}}
"""
CODE = """
raise SystemExit("the starter ran the user's code")

class Net(Base):
    def __init__(self, width, depth=2): ...

class Open:
    def __init__(self, **options): ...

def data(split="train"): ...
def metric(a, b): ...
"""


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "code.py").write_text(CODE)
    return tmp_path


def planned(*overrides: str, model="./code.py:Net", data="./code.py:data", options="{width: 3}") -> Plan:
    Path("own.yml").write_text(SPEC.format(model=model, data=data, options=options))
    loaded = config.load("own.yml", overrides=overrides, environ={})
    return make_plan(loaded, run_dir=Path("runs/own"))


def test_the_plan_names_the_code_and_runs_none_of_it(here):
    plan = planned("evaluate.metrics=[./code.py:metric, sklearn.metrics:f1_score]")
    assert plan.numbers["model"] == f"Net of {here}/code.py"
    assert plan.numbers["metric f1_score"] == "f1_score of sklearn.metrics"
    assert plan.files == dict.fromkeys(("model", "data", "metric metric"), f"{here}/code.py")


def test_a_path_is_relative_to_the_file_that_names_it_and_to_the_current_folder_elsewhere(here, monkeypatch):
    (here / "specs").mkdir()
    (here / "specs/base.yml").write_text(
        "model: {name: ../code.py:Net, options: {width: 1}}\ndata: {format: ../code.py:data}\n"
    )
    (here / "own.yml").write_text("_BASE_: specs/base.yml\n")
    assert config.load("own.yml", environ={}).spec.model.name == f"{here}/code.py:Net"
    monkeypatch.chdir("specs")
    loaded = config.load("../own.yml", overrides=["model.name=./mine.py:A"], environ={})
    assert loaded.spec.model.name == f"{here}/specs/mine.py:A"
    assert loaded.spec.data.format == f"{here}/code.py:data"


def test_training_has_the_defaults_of_a_plain_loop():
    spec = config.load(str(EXAMPLE / "own.yml"), environ={}).spec
    assert (spec.task, spec.train.ema, spec.train.clip_norm, spec.train.accumulate) == ("own", None, None, 1)
    assert (spec.optimizer.momentum, spec.schedule.warmup, [g.match for g in spec.optimizer.groups]) == (
        0.9,
        None,
        [""],
    )
    assert spec.evaluate.enabled


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"model": "./none.py:Net"}, "none.py: no such file or directory; name an existing Python file"),
        ({"model": "./code.py:Ne"}, "code.py: defines no 'Ne'; did you mean 'Net'?"),
        ({"model": "./code.py"}, "expected PATH.py:Name"),
        ({"model": "own"}, "model: given 'own', expected PATH.py:Name"),
        ({"model": "no_such_module:Net"}, "there is no module 'no_such_module' here"),
        ({"model": "./bad.py:Net"}, "bad.py:1: is not valid Python"),
        ({"options": "{widht: 3}"}, "model.options.widht: Net takes no such option; did you mean 'width'?"),
        ({"options": "{}"}, "model.options: Net needs the option 'width', which is not given"),
        ({"data": "digits"}, "digits is a data set for detection, but"),
    ],
    ids=lambda value: "-".join(value.values()) if isinstance(value, dict) else "",
)  # fmt: skip
def test_what_the_text_of_the_code_shows_is_refused_at_once(given, sentence):
    Path("bad.py").write_text("def :\n")
    with pytest.raises(UsageError) as caught:
        planned(**given)
    assert sentence in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (
            ["model.framework=paddle"],
            "model.framework: paddle, but backend.name: ddp is on torch; choose a backend on paddle",
        ),
        (["data.workers=2"], "data.workers: 2 given, but a data set of your own is read in the process of each rank"),
        (["train.quantise.start=0"], "train.quantise: mtrain rounds the layers of its neutral models only"),
        (["data.train=a.json"], "data.train: means nothing to a data set of your own"),
        (["evaluate.metrics=[accuracy]"], "given 'accuracy', expected PATH.py:Name"),
        (["evaluate.metrics=[./code.py:nothing]"], "defines no 'nothing'"),
        (["evaluate.enabled=true"], "enabled is true and metrics is empty; name at least one"),
    ],
)
def test_keys_that_cannot_be_followed_are_refused_at_once(overrides, sentence):
    with pytest.raises(UsageError) as caught:
        planned(*overrides)
    assert sentence in str(caught.value)


def test_a_class_with_open_options_takes_any():
    planned(model="./code.py:Open", options="{anything: 1}")


def test_the_spec_of_a_run_folder_runs_no_code_that_only_it_names(here):
    planned()
    run = here / "runs/own"
    run.mkdir(parents=True)
    loaded = config.load("own.yml", environ={})
    (run / "spec.json").write_text(config.resolved_json(loaded.spec))
    (run / "spec.yml").write_text(config.resolved_json(loaded.spec))
    with pytest.raises(SpecError) as caught:
        config.load("runs/own/spec.yml", environ={})
    assert "a run folder is not trusted to run code" in str(caught.value)
    assert f"-o model.name={here}/code.py:Net" in str(caught.value)
    named = [f"model.name={here}/code.py:Net", "data.format=./code.py:data"]
    assert config.load("runs/own/spec.yml", overrides=named, environ={}).spec == loaded.spec


def test_policy_can_forbid_own_code(here):
    Path("plugins.toml").write_text('[models]\ndisabled = ["own"]\n')
    with pytest.raises(SpecError, match="the model 'own' is disabled by plugins"):
        planned()


def test_a_file_is_imported_once_and_may_import_its_neighbours(here):
    (here / "neighbour_of_code.py").write_text("value = 7\n")
    (here / "some_nets.py").write_text(
        "from neighbour_of_code import value\ndef Net(): return value\nloaded = object()\n"
    )
    reference = references.parse(f"{here}/some_nets.py:Net")
    assert references.import_object(reference)() == 7
    import some_nets  # the user's other files get the same module

    assert references.import_object(reference) is some_nets.Net
