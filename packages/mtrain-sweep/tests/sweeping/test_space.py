"""Search spaces: what is read, and what is refused before anything starts."""

import math
from pathlib import Path
from typing import Any

import pytest

import mtrain
from mtrain.errors import MtrainError, SpecError, UsageError
from mtrain.spec.yaml_reader import dump, parse
from mtrain_sweep.definition import SweepDefinition, fit_space, parsed_metric
from mtrain_sweep.records import Score, best
from mtrain_sweep.space import distinct, read_over, read_space, shipped_spaces

VIT = "vit_digits"


def written(folder: Path, text: str) -> Path:
    file = folder / "space.yml"
    file.write_text(text)
    return file


def problems(space: Any, spec: str = VIT) -> list[str]:
    with pytest.raises(SpecError) as caught:
        fit_space(read_space(space), mtrain.load_spec(spec))
    return list(caught.value.problems)


def test_nested_and_dotted_keys_mean_the_same(tmp_path: Path) -> None:
    nested = written(tmp_path, "optimizer:\n  learning_rate: {low: 0.1, high: 1.0}\n  rule: {choices: [sgd, adam]}\n")
    dotted = {"optimizer.learning_rate": {"low": 0.1, "high": 1.0}, "optimizer.rule": {"choices": ["sgd", "adam"]}}

    def plain(space: Any) -> list[dict[str, Any]]:
        return [one.model_dump(exclude={"origin"}) for one in read_space(space)]

    assert plain(nested) == plain(dotted)


def test_a_misspelt_key_is_named_with_its_line_and_the_right_one(tmp_path: Path) -> None:
    space = written(tmp_path, "train.batch_size: {choices: [8]}\noptimizer:\n  rte: {low: 0.1, high: 1.0}\n")
    (problem,) = problems(space)
    assert problem.startswith("space.yml:3: optimizer.rte: unknown key")
    assert "did you mean 'learning_rate'?" in problem


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"low": 0.1}, "high: given nothing"),
        ({"low": 1.0, "high": 0.5}, "low must be the smaller one"),
        ({"low": 1.0, "high": 1.0}, "low must be the smaller one"),
        ({"low": 0.0, "high": 1.0, "log": True}, "must be > 0"),
        ({"low": 0.1, "high": 1.0, "lgo": True}, "did you mean 'log'?"),
        ({"low": 0.1, "high": 1.0, "log": True, "step": 0.1}, "goes not with"),
        ({"choices": []}, "expected a list of values"),
        ({"choices": [1, 1]}, "given twice"),
        ({"choices": [float("nan")]}, "expected finite numbers"),
        ({"choices": [1], "low": 0}, "goes with no other key"),
        ([0.1, 1.0], "expected {low: A, high: B}"),
        ({"low": "a", "high": "b"}, "expected a number"),
        ({"low": -1.0, "high": 1.0}, "expected a number > 0"),
        ({"choices": ["fast"]}, "expected a number"),
    ],
)
def test_a_wrong_entry_is_refused_in_one_line(entry: Any, words: str) -> None:
    lines = problems({"optimizer.learning_rate": entry})
    assert len(lines) == 1
    assert "optimizer.learning_rate" in lines[0]
    assert words in lines[0]


def test_a_trials_own_report_is_not_searched() -> None:
    assert "each trial has a report of its own" in problems({"report.name": {"choices": ["a", "b"]}})[0]


def test_options_of_a_plugin_are_checked_too() -> None:
    assert "did you mean 'width'?" in problems({"model.options.witdh": {"choices": [32]}})[0]


def test_a_range_of_whole_numbers_becomes_one_of_numbers_where_the_schema_asks_for_a_number() -> None:
    parameters = fit_space(
        read_space({"optimizer.momentum": {"low": 0, "high": 0.9}, "schedule.final_factor": {"low": 0, "high": 1},
                    "train.batch_size": {"low": 8, "high": 64}}),
        mtrain.load_spec(VIT),
    )  # fmt: skip
    assert [one.kind for one in parameters] == ["float", "float", "int"]


def test_yolov5s_space_fits_its_specs() -> None:
    assert shipped_spaces() == ["yolov5"]
    parameters = fit_space(read_space("yolov5"), mtrain.load_spec("yolov5n"))
    assert len(parameters) == 23


YOLOV5 = {
    "lr0": ("optimizer.learning_rate", 1e-5, 0.1),
    "lrf": ("schedule.final_factor", 0.01, 1.0),
    "momentum": ("optimizer.momentum", 0.6, 0.98),
    "weight_decay": ("optimizer.weight_decay", 0.0, 0.001),
    "warmup_epochs": ("schedule.warmup.epochs", 0.0, 5.0),
    "warmup_momentum": ("schedule.warmup.momentum_from", 0.0, 0.95),
    "warmup_bias_lr": ("optimizer.groups.0.warmup_from", 0.0, 0.2),
    "box": ("model.options.box", 0.02, 0.2),
    "cls": ("model.options.cls", 0.2, 4.0),
    "cls_pw": ("model.options.cls_pw", 0.5, 2.0),
    "obj": ("model.options.obj", 0.2, 4.0),
    "obj_pw": ("model.options.obj_pw", 0.5, 2.0),
    "anchor_t": ("model.options.anchor_threshold", 2.0, 8.0),
    "hsv_h": ("data.augment.hsv_h", 0.0, 0.1),
    "hsv_s": ("data.augment.hsv_s", 0.0, 0.9),
    "hsv_v": ("data.augment.hsv_v", 0.0, 0.9),
    "degrees": ("data.augment.degrees", 0.0, 45.0),
    "translate": ("data.augment.translate", 0.0, 0.9),
    "scale": ("data.augment.scale", 0.0, 0.9),
    "shear": ("data.augment.shear", 0.0, 10.0),
    "flipud": ("data.augment.flip_ud", 0.0, 1.0),
    "mosaic": ("data.augment.mosaic", 0.0, 1.0),
    "mixup": ("data.augment.mixup", 0.0, 1.0),
}
"""The ranges that YOLOv5's `train.py --evolve` (v6, v7) has under its own names; those with a gain of 0 are left out."""


def test_yolov5s_space_has_the_published_ranges() -> None:
    shipped = {(one.name, one.low, one.high) for one in read_space("yolov5")}
    assert shipped == set(YOLOV5.values())


@pytest.mark.parametrize("source", ["yolo5", "/dev/zero", "."])
def test_what_is_no_file_is_refused(source: str) -> None:
    with pytest.raises(SpecError, match="--space"):
        read_space(source)


def test_over_takes_backends_with_options_and_short_names() -> None:
    backends, ranks, rule = read_over(["backend=ddp,deepspeed:stage=3", "ranks=1,2", "optimizer.rule=sgd,adam"])
    assert backends.choices == ("ddp", "deepspeed:stage=3")
    assert backends.assignments("deepspeed:stage=3") == {"backend.name": "deepspeed", "backend.options.stage": 3}
    assert (ranks.name, ranks.choices, rule.name) == ("cluster.nproc_per_node", (1, 2), "optimizer.rule")


@pytest.mark.parametrize("text", ["backend", "backend=", "=1", "ranks=1,1", "backend=deepspeed:stage"])
def test_a_malformed_over_is_refused(text: str) -> None:
    with pytest.raises(MtrainError):
        read_over([text])


def test_one_value_is_searched_once() -> None:
    with pytest.raises(UsageError, match="is searched already"):
        distinct([*read_space({"backend.name": {"choices": ["ddp"]}}), *read_over(["backend=ddp,solo"])])
    with pytest.raises(UsageError, match="nothing is searched"):
        distinct([])


def test_text_that_looks_like_a_number_is_read_as_text_again() -> None:
    values = {
        "report": {"name": "0008"},
        "texts": ["1e3", "0o7", "null", "true", "plain", "1:30", "", "a: b"],
        "number": 8,
    }
    assert parse(dump(values), name="spec").values == values


def test_a_metric_has_a_direction() -> None:
    assert parsed_metric("AP50") == ("AP50", "max")
    assert parsed_metric("loss:min") == ("loss", "min")
    with pytest.raises(UsageError, match="expected NAME"):
        parsed_metric("loss:least")


@pytest.mark.parametrize(
    ("low", "high", "step", "expected"),
    [
        (0.1, 0.3, 0.1, [0.1, 0.2, 0.3]),
        (0.0, 0.7, 0.1, [0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7]),
        (0.0, 1.0, 0.3, [0.0, 0.3, 0.6, 0.9]),
        (2, 8, 3, [2, 5, 8]),
        (1, 4, None, [1, 2, 3, 4]),
    ],
)
def test_a_grid_has_every_value_to_its_end_without_rounding(
    low: Any, high: Any, step: Any, expected: list[Any]
) -> None:
    entry = {"low": low, "high": high} | ({} if step is None else {"step": step})
    (parameter,) = read_space({"optimizer": {"learning_rate": entry}})
    assert parameter.grid() == expected


@pytest.mark.parametrize(("direction", "update"), [("max", 3), ("min", 2)])
def test_the_best_score_is_the_first_finite_one(direction: Any, update: int) -> None:
    values = [math.nan, 0.25, 0.5, math.inf, -math.inf, 0.5, 0.25]
    scores = [Score(number, value) for number, value in enumerate(values, start=1)]
    definition = SweepDefinition.model_construct(direction=direction)
    assert best(scores, definition) == scores[update - 1]
    assert best(scores[:1], definition) is None
