"""A spec is read from many sources; every value knows its origin and every mistake is told at once."""

import json
import math
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mtrain.errors import SpecError
from mtrain.spec import config
from mtrain.spec.building import Tasks
from mtrain.spec.schema import dot, model_of, walk
from mtrain.spec.yaml_reader import dump, flow, parse, parse_value


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def load(path=None, *overrides, flags=None, environ=None):
    return config.load(path, overrides=overrides, flags=flags or {}, environ=environ or {})


def problems(path=None, *overrides, flags=None, environ=None) -> tuple[str, ...]:
    with pytest.raises(SpecError) as caught:
        load(path, *overrides, flags=flags, environ=environ)
    return caught.value.problems


# ------------------------------------------------------------------------------------------------------ where and what
def test_without_a_name_the_embedded_demo_is_loaded_and_said(here):
    loaded = load()
    assert loaded.name == "digits"
    assert "embedded demo" in loaded.source
    assert loaded.spec.data.format == "digits"


def test_without_a_name_mtrain_yml_here_wins_over_the_demo(here):
    (here / "mtrain.yml").write_text("train: {batch_size: 3, epochs: 1}\n")
    loaded = load()
    assert loaded.spec.train.batch_size == 3
    assert loaded.source == "mtrain.yml in the current folder"


def test_a_file_here_wins_over_a_shipped_config_of_the_same_name(here):
    assert load("yolov5.yml").spec.model.name == "yolov5s"
    assert load("yolov5").spec.model.name == "yolov5s"
    (here / "yolov5.yml").write_text("model: {name: yolov5x}\n")
    assert load("yolov5.yml").spec.model.name == "yolov5x"


def test_a_file_is_shipped_by_where_it_lies_and_not_by_how_its_path_reads(here):
    assert load("yolov5").source.startswith("the shipped config mtrain/configs/")
    (here / "mtrain" / "configs").mkdir(parents=True)
    (here / "mtrain" / "configs" / "mine.yml").write_text("train: {epochs: 1}\n")
    (here / "mtrain" / "configs" / "plugins.toml").write_text("")
    loaded = load("mtrain/configs/mine.yml")
    assert loaded.source == "mtrain/configs/mine.yml"
    assert loaded.values["plugins"] == str(here / "mtrain" / "configs" / "plugins.toml")


def test_a_name_that_is_nowhere_is_answered_with_the_closest(here):
    assert problems("yolov5n_bcd") == (
        "yolov5n_bcd: no such file, and no shipped config of that name; did you mean 'yolov5n_bccd'?",
    )


@pytest.mark.parametrize("name", config.shipped_names())
def test_every_shipped_config_is_valid(name, here):
    spec = load(name).spec
    assert spec.train.epochs or spec.train.updates


# ------------------------------------------------------------------------------------------------ precedence and origin
def test_each_source_wins_over_the_weaker_ones_and_history_keeps_what_it_replaced(here):
    (here / "base.yml").write_text("train:\n  batch_size: 2\n  epochs: 5\n")
    (here / "a.yml").write_text("_BASE_: base.yml\ntrain:\n  seed: 1\n  batch_size: 3\n")
    steps = [
        (load("base.yml"), 2, "base.yml:2"),
        (load("a.yml"), 3, "a.yml:4"),
        (load("a.yml", environ={"MTRAIN_TRAIN__BATCH_SIZE": "4"}), 4, "MTRAIN_TRAIN__BATCH_SIZE=4"),
        (
            load("a.yml", "train.batch_size=5", environ={"MTRAIN_TRAIN__BATCH_SIZE": "4"}),
            5,
            "-o train.batch_size=5",
        ),
    ]
    for loaded, value, origin in steps:
        assert loaded.spec.train.batch_size == value
        assert str(loaded.origin("train.batch_size")) == origin
    loaded = load(
        "a.yml",
        environ={"MTRAIN_TRAIN__BATCH_SIZE": "4"},
        flags={"train.batch_size": config.Given(6, "--batch-size 6")},
    )
    assert loaded.spec.train.batch_size == 6
    assert loaded.origin("train.batch_size").kind == "flag"
    replaced = [(value, str(origin)) for value, origin in loaded.history["train.batch_size"]]
    assert replaced == [
        (2, "base.yml:2"),
        (3, "a.yml:4"),
        (4, "MTRAIN_TRAIN__BATCH_SIZE=4"),
    ]
    assert loaded.origin("train.clip_norm").kind == "default"
    assert loaded.provenance["train.epochs"].kind == "base"


def test_flags_and_overrides_of_one_command_line_give_way_to_no_other_of_them(here):
    """What is typed for a plugin that is typed too is for that plugin: a misspelt option is no leftover of another."""
    deepspeed = {"backend.name": config.Given("deepspeed", "-b deepspeed")}
    assert load("digits", "backend.options.stage=3", flags=deepspeed).spec.backend.options == {"stage": 3}
    assert problems("digits", "backend.options.stge=3", flags=deepspeed) == (
        "-o backend.options.stge=3: unknown key; did you mean 'stage'?",
    )
    for overrides, flags in (
        (["train.seed=1"], {"train.seed": config.Given(2, "--seed 2")}),
        (["backend.name=ddp"], deepspeed),
    ):
        (line,) = problems("digits", *overrides, flags=flags)
        assert f"-o {overrides[0]}" in line
        assert "keep one of them" in line
    assert load("digits", "train.seed=2", flags={"train.seed": config.Given(2, "--seed 2")}).spec.train.seed == 2


def test_bases_merge_mappings_and_replace_lists_and_the_later_wins(here):
    (here / "sub").mkdir()
    (here / "sub" / "one.yml").write_text("data: {names: [a, b], root: x}\ntrain: {seed: 1}\n")
    (here / "two.yml").write_text("data: {names: [c]}\ntrain: {seed: 2}\n")
    (here / "a.yml").write_text("_BASE_: [yolov5n_bccd, sub/one.yml, two.yml]\ndata: {root: y}\n")
    spec = load("a.yml").spec
    assert spec.data.names == ["c"]
    assert spec.data.root == "y"
    assert spec.train.seed == 2
    assert spec.data.image_size == 320


def test_a_length_in_updates_replaces_one_in_epochs_of_a_weaker_source_only(here):
    spec = load("yolov5n_bccd", "train.updates=7").spec
    assert (spec.train.epochs, spec.train.updates) == (None, 7)
    assert problems("yolov5n_bccd", "train.updates=7", "train.epochs=3") == (
        "-o train.updates=7: epochs (3) and updates (7) are both given; keep one and set the other to null",
    )


def test_ranges_that_freeze_before_they_are_observed_are_refused(here):
    assert problems("yolov5n_bccd", "train.quantise={start: 9, freeze: 9}") == (
        "-o train.quantise={start: 9, freeze: 9}: freeze (9) is not after start (9), so no range would be observed; give a "
        "later update",
    )


def test_circular_bases_are_named(here):
    (here / "a.yml").write_text("_BASE_: b.yml\n")
    (here / "b.yml").write_text("_BASE_: a.yml\n")
    assert problems("a.yml") == ("a.yml: _BASE_ goes round in a circle: a.yml -> b.yml -> a.yml",)


def test_a_missing_base_is_named_with_its_line(here):
    (here / "a.yml").write_text("train: {epochs: 1}\n_BASE_: yolov5nn\n")
    (line,) = problems("a.yml")
    assert line.startswith("a.yml:2 _BASE_: no file 'yolov5nn'")
    assert "did you mean 'yolov5n'?" in line


def test_the_foreign_port_variable_is_read(here):
    assert load(environ={"FLAGS_START_PORT": "6170"}).spec.cluster.start_port == 6170


def test_variables_that_are_no_values_of_a_spec_are_refused_with_the_nearest(here):
    assert problems(environ={"MTRAIN_TRAIN__BATC_SIZE": "8", "MTRAIN_HOME": "/x", "MTRAIN_DEBUG": "1"}) == (
        "MTRAIN_TRAIN__BATC_SIZE=8: not a value of a spec; did you mean MTRAIN_TRAIN__BATCH_SIZE?",
    )


# ------------------------------------------------------------------------------------------------------------- mistakes
def test_four_mistakes_in_one_file_give_four_messages(here):
    (here / "a.yml").write_text(
        "train:\n  batch_size: eight\noptimizer:\n  momentun: 0.9\n  rule: sdg\nmodel: {name: yolov5q}\n"
    )
    first, second, third, fourth = problems("a.yml")
    assert first == "a.yml:2 train.batch_size: given 'eight', expected an integer > 0"
    assert second == "a.yml:4 optimizer.momentun: unknown key; did you mean 'momentum'?"
    rules = "'sgd', 'adam', 'adamw', 'lion', 'rmsprop', 'lamb' or 'muon'"
    assert third == f"a.yml:5 optimizer.rule: given 'sdg', expected {rules}; did you mean 'sgd'?"
    assert fourth.startswith("a.yml:6 model.name: no model 'yolov5q' (known: ")
    assert "hf, liteseg, ppyoloe_l, " in fourth


def test_mistakes_of_several_sources_are_told_together(here):
    (here / "base.yml").write_text("a: [1,\n")
    (here / "a.yml").write_text("_BASE_: base.yml\ntrain:\n  seed: -1\n")
    lines = problems("a.yml", "a.b", "train.batch_siz=8", environ={"MTRAIN_TRAIN__EMA__DECAY": "2"})
    assert lines[0].startswith("base.yml:2: not valid YAML: ")
    assert set(lines[1:]) == {
        "-o a.b: expected PATH=VALUE, for example -o train.batch_size=8",
        "a.yml:3 train.seed: given -1, expected an integer >= 0 and < 2147483648",
        "-o train.batch_siz=8: unknown key; did you mean 'batch_size'?",
        "MTRAIN_TRAIN__EMA__DECAY=2: given 2, expected a number >= 0 and < 1",
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("train: 5", "a.yml:1 train: given 5, expected a section with the keys epochs, updates, "),
        ("optimiser: {learning_rate: 1}", "a.yml:1 optimiser: unknown key; did you mean 'optimizer'?"),
        ("train: {momentum: 0.9}", "a.yml:1 train.momentum: unknown key; did you mean 'optimizer.momentum'?"),
        ("train: {lr: 0.1}", "a.yml:1 train.lr: unknown key; did you mean 'optimizer.learning_rate'?"),
        ("lr: 0.1", "a.yml:1 lr: unknown key; did you mean 'optimizer.learning_rate'?"),
        ("batch: 8", "a.yml:1 batch: unknown key; did you mean 'train.batch_size'?"),
        ("optimizer: {AMP: true}", "a.yml:1 optimizer.AMP: unknown key; did you mean 'train.precision'?"),
        ("train:\n  seed: yes", "a.yml:2 train.seed: given 'yes', expected an integer"),
        ("train:\n  seed: true", "a.yml:2 train.seed: given true, expected an integer"),
        ("report:\n  plots: on", "a.yml:2 report.plots: given 'on', expected true or false"),
        (
            "train:\n  updates: 010",
            "a.yml:2 train.updates: given '010', expected an integer > 0 or null; a number has no 0 in front (10; or 0o10, which is 8)",
        ),
        (
            "optimizer:\n  learning_rate: 00.1",
            "a.yml:2 optimizer.learning_rate: given '00.1', expected a number > 0; a number has no 0 in front (0.1)",
        ),
        ("train:\n  clip_norm: .inf", "a.yml:2 train.clip_norm: given inf, expected a number > 0 or null"),
        ("report: {name: 5}", "a.yml:1 report.name: given 5, expected text or null; put it in quotes"),
        ("data:\n  names:\n  - a\n  - 1", "a.yml:4 data.names.1: given 1, expected text"),
        ("optimizer:\n  groups:\n  - match: ''\n  - {mach: x}", "a.yml:4 optimizer.groups.1.match: missing; expected"),
        ("train: {freeze: ['(']}", "a.yml:1 train.freeze.0: given '(', expected a regular expression"),
        ("train: {epochs: 1}\ntrain: {epochs: 2}", "a.yml:2 train: given twice, first on line 1; keep one"),
        ("schedule: {name: step}", "a.yml:1 schedule: name is 'step' and milestones is empty"),
        ("- 1", "a.yml:1: expected `key: value` lines"),
        ("train: !!python/object:os.system x", "a.yml:1 train: the tag !!python/object:os.system is not allowed"),
        ("a: b: c", "a.yml:1: not valid YAML: mapping values are not allowed here"),
        ("backend: {options: {devise: cpu}}", "a.yml:1 backend.options.devise: unknown key; did you mean 'device'?"),
        ("backend: {name: dpp}", "a.yml:1 backend.name: no backend 'dpp' (known: "),
        (
            "cluster: {master_port: 70000}",
            "a.yml:1 cluster.master_port: given 70000, expected an integer > 0 and < 65536",
        ),
    ],
)
def test_a_mistake_names_file_line_path_given_and_expected(text, message, here):
    (here / "a.yml").write_text(text)
    assert any(line.startswith(message) for line in problems("a.yml")), problems("a.yml")


def test_a_file_that_is_not_text_is_named(here):
    (here / "a.yml").write_bytes(b"\xff\xfe\x00")
    assert problems("a.yml") == ("a.yml: is not UTF-8 text",)


@pytest.mark.parametrize(
    "text",
    [
        "a: &a [1,1,1,1,1,1,1,1,1,1]\n"
        + "".join(
            f"{new}: &{new} [{','.join([f'*{old}'] * 10)}]\n" for old, new in zip("abcdefgh", "bcdefghi", strict=True)
        ),
        "x: &x\n  y: *x\n",
        "[" * 100_000,
        "a: " + "{a: " * 5_000,
    ],
    ids=["bomb", "itself", "brackets", "braces"],
)
@pytest.mark.timeout(20)
def test_hostile_nesting_is_refused_at_once(text):
    (line,) = parse(text, name="a.yml").problems
    assert line.startswith("a.yml")


# ------------------------------------------------------------------------------------------------------------ overrides
def test_overrides_reach_lists_nulls_and_free_keys(here):
    spec = load(
        "yolov5n_bccd",
        "cluster.ips=10.0.0.1,10.0.0.2",
        "data.names=[a, b]",
        "optimizer.groups.0.weight_decay=1e-3",
        "train.clip_norm=null",
        "schedule.warmup=null",
        "model.options.box=0.1",
        "optimizer.learning_rate=1e-3",
        "train.freeze=model",
    ).spec
    assert spec.cluster.ips == ["10.0.0.1", "10.0.0.2"]
    assert spec.data.names == ["a", "b"]
    assert spec.optimizer.groups[0].weight_decay == 1e-3
    assert spec.optimizer.groups[0].match == r"\.bias$"
    assert spec.train.clip_norm is None
    assert spec.schedule.warmup is None
    assert spec.model.options["box"] == 0.1
    assert spec.optimizer.learning_rate == 1e-3
    assert spec.train.freeze == ["model"]


def test_an_override_reaches_a_list_that_only_the_schema_gives(here):
    (here / "a.yml").write_text("train: {epochs: 1}\n")
    groups = load("a.yml", "optimizer.groups.1.weight_decay=0.5").spec.optimizer.groups
    assert [group.weight_decay for group in groups] == [0.0, 0.5, None]
    assert problems("a.yml", "optimizer.groups.7.weight_decay=1") == (
        "-o optimizer.groups.7.weight_decay=1: optimizer.groups is a list of 3; use 0 to 2, not 7",
    )


def test_text_stays_text_where_text_is_expected(here):
    spec = load(None, "report.name=1e3", "data.root=a,b", "data.names=1,true", "cluster.log_dir=null").spec
    assert spec.report.name == "1e3"
    assert spec.data.root == "a,b"
    assert spec.data.names == ["1", "True"]
    assert spec.cluster.log_dir is None


def test_a_path_through_a_plain_value_is_refused(here):
    assert problems("yolov5n_bccd", "train.batch_size.x=1") == (
        "-o train.batch_size.x=1: train.batch_size is 8, which has no keys",
    )


_NUMBERS = [
    dot(path)
    for path, field in walk(Tasks().schemas["detection"])
    if field.annotation is float
    and 0 not in path
    and model_of(field.annotation) is None
    # The former has to be below train.prune.end; the latter are not with the letterbox of the spec that is used here.
    and dot(path) != "train.prune.start"
    and not dot(path).startswith(("data.augment.distort.", "data.augment.expand."))
]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.dictionaries(
        st.sampled_from(_NUMBERS), st.floats(1e-6, 9e-4).filter(lambda x: "E" not in repr(x)), min_size=1, max_size=6
    )
)
def test_no_override_is_lost_whatever_their_number(chosen):
    loaded = config.load("yolov5n_bccd", overrides=[f"{path}={value!r}" for path, value in chosen.items()], environ={})
    for path, value in chosen.items():
        actual = loaded.values
        for key in path.split("."):
            actual = actual[key]
        assert actual == value


_PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(min_size=1, max_size=60), inner, max_size=3),
    max_leaves=8,
)
"""Keys are short: YAML ends a key on one line at 1024 characters. Whole numbers are those that a spec may hold."""


@pytest.mark.parametrize("text", ["A\n", "true\n", "null\n", "1\n", "1.5\n", ".inf\n", "\n"])
def test_a_last_newline_of_a_text_is_kept(text):
    for value in ([text], {"key": text}, {text: 1}):
        assert parse(f"value: {flow(value)}", name="x").values["value"] == value
        assert parse_value(flow(value)) == value


@settings(max_examples=150, deadline=None)
@given(_PLAIN)
def test_what_is_printed_reads_back_as_itself(value):
    assert parse(f"value: {flow(value)}", name="x").values["value"] == value


@settings(max_examples=100, deadline=None)
@given(_PLAIN.filter(lambda value: not isinstance(value, str)))
def test_an_override_value_reads_back_as_itself(value):
    assert parse_value(flow(value)) == value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 1e-3),
        ("no", "no"),
        ("on", "on"),
        ("1:30", "1:30"),
        ("2024-01-01", "2024-01-01"),
        ("~", None),
        ("0x10", 16),
        ("0o10", 8),
        ("0", 0),
        ("-0.5", -0.5),
        ("1_000", 1000),
        ("1_000.5", 1000.5),
        ("1" * 3002, math.inf),
    ],
)
def test_scalars_follow_the_core_schema_of_yaml_1_2(text, value):
    actual = parse(f"a: {text}", name="x").values["a"]
    assert (actual, type(actual)) == (value, type(value))


@pytest.mark.parametrize("text", ["010", "-010", "08", "00", "0_1", "01.5", "01e3", "1__0", "1_", "1_.5"])
def test_what_readers_of_yaml_take_for_different_numbers_is_text_and_stays_that(text):
    assert parse(f"a: {text}", name="x").values["a"] == text
    assert parse_value(text) == text
    for written in (dump({"a": text}), f"a: {flow(text)}"):
        assert parse(written, name="x").values["a"] == text
        assert f"'{text}'" in written, "another reader would take it for a number"


# ------------------------------------------------------------------------------------------------------------ hand over
def test_a_spec_handed_to_ranks_is_the_same_spec(here):
    spec = load("yolov5n_bccd", "train.precision=bf16").spec
    config.dump(spec, here / "spec.json")
    assert config.read(here / "spec.json") == spec
    assert config.from_json(config.resolved_json(spec)) == spec
    (here / "spec.json").write_text(json.dumps({"train": {"batch": 1}}))
    with pytest.raises(SpecError, match=r"spec.json train.batch"):
        config.read(here / "spec.json")
    with pytest.raises(SpecError, match="cannot be read"):
        config.read(here / "absent.json")


def test_every_key_of_the_schema_is_described():
    fields = [entry for schema in Tasks().schemas.values() for entry in walk(schema)]
    assert [dot(path) for path, field in fields if not field.description] == []


def test_a_value_read_again_as_a_list_or_text_replaces_nothing_in_its_history():
    loaded = config.load("digits", overrides=["data.names=a", "model.weights=7"], environ={})
    assert (loaded.spec.data.names, loaded.spec.model.weights) == (["a"], "7")
    assert all(
        "-o" not in str(origin)
        for path in ("data.names", "model.weights")
        for _, origin in loaded.history.get(path, ())
    )


@pytest.mark.parametrize("text", ['train.freeze=["a\\.b"]', "cluster.ips=[a,b", "model.options={a: 1"])
def test_an_override_that_begins_as_a_list_or_mapping_and_is_none_is_refused(text):
    with pytest.raises(SpecError) as caught:
        config.load("digits", overrides=[text], environ={})
    assert any(line.startswith(f"-o {text}: ") and "and is none" in line for line in caught.value.problems)


# ------------------------------------------------------------------------------------------- another backend than the file's
def test_options_of_the_files_backend_are_left_out_where_a_flag_chooses_another(here):
    Path("a.yml").write_text("backend: {name: deepspeed, options: {stage: 2, device: cpu}}\n")
    loaded = config.load("a.yml", flags={"backend.name": config.Given("solo", "--backend solo")}, environ={})
    assert loaded.spec.backend.options == {"device": "cpu"}
    (note,) = loaded.notes
    assert note.startswith(
        "backend.options.stage (a.yml:1): left out, was given for backend.name deepspeed; it is solo"
    )
    assert note.endswith("now (--backend solo)")
    assert config.load("a.yml", environ={}).spec.backend.options == {"stage": 2, "device": "cpu"}


def test_options_of_the_environment_give_way_to_an_override_of_the_backend_and_not_the_other_way_round(here):
    option = {"MTRAIN_BACKEND__OPTIONS__STAGE": "2", "MTRAIN_BACKEND__NAME": "deepspeed"}
    loaded = config.load("digits", overrides=["backend.name=solo"], environ=option)
    assert "stage" not in loaded.spec.backend.options
    overrides = ["backend.name=deepspeed", "backend.options.stage=2"]
    with_both = config.load("digits", overrides=overrides, environ={"MTRAIN_BACKEND__NAME": "solo"})
    assert (with_both.spec.backend.name, with_both.spec.backend.options["stage"]) == ("deepspeed", 2)


def test_an_unknown_option_is_refused_where_it_is_typed_for_the_backend_or_the_backend_is_the_same(here):
    Path("a.yml").write_text("backend: {name: deepspeed, options: {stage: 2}}\n")
    chosen = {"backend.name": config.Given("solo", "--backend solo")}
    chosen["backend.options.stagee"] = config.Given(1, "-o stagee")
    with pytest.raises(SpecError, match=r"backend\.options\.stagee: unknown key"):
        config.load("a.yml", flags=chosen, environ={})
    Path("b.yml").write_text("backend: {name: solo, options: {stage: 2}}\n")
    with pytest.raises(SpecError, match=r"backend\.options\.stage: unknown key"):
        config.load("b.yml", flags={"backend.name": config.Given("solo", "--backend solo")}, environ={})


def test_an_empty_list_where_one_must_have_entries_is_told_so(here):
    with pytest.raises(SpecError, match=r"data\.augment\.sizes=\[\]: given \[\], expected a list of at least 1, each"):
        config.load("digits", overrides=["data.augment.sizes=[]"], environ={})


# -------------------------------------------------------------------------------------------- another format of the data
COCO_BASE = (
    "data: {format: coco, root: data/x, train: a.json, val: b.json, images: pics, names: [a, b], options: {o: 1}}\n"
)


@pytest.mark.parametrize(
    ("text", "overrides", "environ"),
    [
        ("_BASE_: base.yml\ndata: {format: voc}\n", (), {}),
        ("_BASE_: base.yml\n", ("data.format=voc",), {}),
        ("_BASE_: base.yml\n", (), {"MTRAIN_DATA__FORMAT": "voc"}),
    ],
)
def test_another_data_format_leaves_out_the_paths_of_the_former_one(here, text, overrides, environ):
    (here / "base.yml").write_text(COCO_BASE)
    (here / "mine.yml").write_text(text)
    loaded = load("mine.yml", *overrides, environ=environ)
    data = loaded.spec.data
    assert (data.train, data.val, data.images, data.options) == (None, None, None, {})
    assert (data.root, data.names) == ("data/x", ["a", "b"])  # which mean the same in every format
    (note,) = loaded.notes
    assert note.startswith("data.train (base.yml:1), data.val (base.yml:1), data.images (base.yml:1), data.options.o")
    assert "given for data.format coco; it is voc now" in note


def test_what_is_given_beside_the_data_format_or_by_a_stronger_source_stays(here):
    (here / "base.yml").write_text(COCO_BASE)
    (here / "mine.yml").write_text("_BASE_: base.yml\ndata: {format: voc, train: list.txt}\n")
    loaded = load("mine.yml", "data.images=JPEGImages", environ={"MTRAIN_DATA__OPTIONS__USE_DIFFICULT": "false"})
    data = loaded.spec.data
    assert (data.train, data.val, data.images, data.options) == (
        "list.txt",
        None,
        "JPEGImages",
        {"use_difficult": False},
    )
    assert "data.train" not in loaded.notes[0]


def test_the_same_data_format_keeps_the_paths_of_a_base(here):
    (here / "base.yml").write_text(COCO_BASE.replace(", options: {o: 1}", ""))
    (here / "mine.yml").write_text("_BASE_: base.yml\ndata: {format: coco, root: there}\n")
    loaded = load("mine.yml")
    assert (loaded.spec.data.train, loaded.spec.data.images, loaded.notes) == ("a.json", "pics", ())


@pytest.mark.parametrize("name", ["yolov5s", "yolov5n_bccd", "ppyoloe_s"])
@pytest.mark.parametrize("kind", ["voc", "yolo"])
def test_a_shipped_spec_has_no_paths_left_for_own_data_of_another_format(here, name, kind):
    loaded = load(name, f"data.format={kind}", "data.root=mine")
    assert (loaded.spec.data.train, loaded.spec.data.val, loaded.spec.data.images) == (None, None, None)


KUBERNETES = ("cluster.name=kubernetes", "cluster.options.image=registry.example/mtrain:1")


@pytest.mark.parametrize(
    ("typed", "begins"),
    [
        (  # the section as a whole is wrong: the key that the message names is to blame, not the one that was typed last
            (*KUBERNETES, "cluster.options.env.HOME=/x", "cluster.options.user=5"),
            "-o cluster.options.env.HOME=/x: cluster.options: env: HOME is set by mtrain",
        ),
        (  # what is missing was typed nowhere
            ("cluster.name=kubernetes", "cluster.options.data_claim=d"),
            "cluster.options.image: missing",
        ),
        (("data.augment.scale=[1,2]", "train.epochs=0"), "-o train.epochs=0: "),
    ],
)
def test_a_refusal_names_what_was_typed_for_the_value_that_is_refused(typed, begins):
    assert any(problem.startswith(begins) for problem in problems("digits", *typed))


def test_a_missing_option_in_a_file_is_told_with_the_line_of_its_section(tmp_path):
    path = tmp_path / "spec.yml"
    path.write_text("_BASE_: digits\ncluster:\n  name: kubernetes\n  options:\n    data_claim: d\n")
    with pytest.raises(SpecError, match=rf"{path}:4 cluster\.options\.image: missing"):
        config.load(path, environ={})
    with pytest.raises(SpecError, match=r"-o cluster\.options\.env\.USER=me: cluster\.options: env: USER is set by"):
        config.load(path, overrides=["cluster.options.image=x:1", "cluster.options.env.USER=me"], environ={})


@pytest.mark.parametrize(("join_s", "expected"), [("4", 4), ("null", 600)])
def test_hosts_are_awaited_for_the_time_to_join_if_one_is_given(join_s, expected):
    words = ["cluster.failure_timeout_s=600", f"cluster.join_timeout_s={join_s}"]
    assert config.load("digits", overrides=words, environ={}).spec.cluster.joining_s == expected
