"""Which submodules ``train.recompute`` chooses, and what it refuses."""

import pytest
from pydantic import ValidationError

from mtrain.core.interfaces import Recipe
from mtrain.core.network.recomputing import choose_blocks, patterns
from mtrain.errors import SpecError
from mtrain.spec import plugins
from mtrain.spec.training import TrainSpec

NAMES = ["", "stem", "stages", "stages.0", "stages.0.conv", "stages.1", "stages.1.conv", "head"]


def recipe(*found: str) -> Recipe:
    return Recipe(rule="sgd", groups=(("", {}),), micro_batch=1, recompute=found)


def test_the_outermost_submodules_that_a_pattern_finds_are_chosen() -> None:
    assert choose_blocks(NAMES, recipe("^stem$", "conv")) == ["stem", "stages.0.conv", "stages.1.conv"]
    assert choose_blocks(NAMES, recipe("conv", r"^stages\.1$")) == ["stages.0.conv", "stages.1"]
    assert choose_blocks(NAMES, recipe("")) == ["stem", "stages", "head"]


def test_a_pattern_that_finds_nothing_is_refused_with_names_that_there_are() -> None:
    with pytest.raises(SpecError, match="'neck' is found in no submodule's name; they are like stem, stages, "):
        choose_blocks(NAMES, recipe("stem", "neck"))


def test_true_takes_the_blocks_that_a_model_names_and_is_refused_where_it_names_none() -> None:
    assert patterns(TrainSpec(recompute=True), ("^a$",), model="net") == ("^a$",)
    assert patterns(TrainSpec(recompute=["b"]), ("^a$",), model="net") == ("b",)
    assert patterns(TrainSpec(), ("^a$",), model="net") == ()
    with pytest.raises(SpecError, match=r"true given, but the model \./nets.py:Net names no blocks; give regexes"):
        patterns(TrainSpec(recompute=True), (), model="./nets.py:Net")


def test_a_compiled_model_is_not_recomputed() -> None:
    with pytest.raises(ValidationError, match="compile and recompute are both given"):
        TrainSpec(compile=True, recompute=True)


@pytest.mark.parametrize("name", ["yolov5n", "ppyoloe_s", "vit", "resnet50", "unet", "liteseg"])
def test_every_shipped_model_names_blocks_that_a_spec_could_name_too(name: str) -> None:
    found = plugins.load("models", name).recomputable
    assert found
    assert TrainSpec(recompute=list(found)).recompute == list(found)
