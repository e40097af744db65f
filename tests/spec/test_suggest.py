"""The word that was meant: similar as a whole, else in a part, else by its initials."""

import inspect

import pytest

import mtrain
from mtrain.rank.script.session import Session
from mtrain.spec.building import Tasks
from mtrain.spec.schema import walk
from mtrain.spec.suggest import OTHER_NAMES, closest

KEYS = ("beta2", "eps", "groups", "learning_rate", "momentum", "weight_decay", "batch_size")


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("momentm", "momentum"),
        ("Learning-Rate", "learning_rate"),
        ("rate", "learning_rate"),
        ("rte", "learning_rate"),
        ("lr", "learning_rate"),
        ("wd", "weight_decay"),
        ("bs", "batch_size"),
        ("warp", None),
        ("x", None),
    ],
)
def test_the_word_that_was_meant(word: str, meant: str | None) -> None:
    assert closest(word, KEYS) == meant


def test_usual_names_of_other_libraries_stand_for_names_that_are_here() -> None:
    keys = {str(path[-1]) for schema in Tasks().schemas.values() for path, _ in walk(schema)}
    functions = [member for _, member in inspect.getmembers(Session, inspect.isfunction)]
    functions += [mtrain.AdamW, mtrain.train, mtrain.export]
    arguments = {name for function in functions for name in inspect.signature(function).parameters}
    unknown = {known for names in OTHER_NAMES.values() for known in names} - keys - arguments
    assert not unknown
    assert closest("max_grad_norm", ["epochs", "clip_norm"]) == "clip_norm"
