"""The word that was meant: similar as a whole, else in a part, else by its initials."""

import pytest

from mtrain.spec.suggest import closest

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
