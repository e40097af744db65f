"""The page of errors, whose messages the program has just given."""

import re

import pytest

from mtrain import errors
from scripts.site.errors import COMMANDS, answer, page


def test_every_error_is_on_the_page_with_its_exit_code() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| (\d+) \| \S", page(), re.MULTILINE))
    kinds = [each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, errors.MtrainError)]
    assert rows == {kind.__name__: str(kind.exit_code) for kind in kinds}


def test_every_message_says_what_was_given_and_names_no_folder_of_this_machine() -> None:
    text = page()
    for _, arguments in COMMANDS:
        block = text.split(f"$ mtrain {' '.join(arguments)}\n")[1].split("\n```")[0]
        assert block.startswith("error: ")
        assert arguments[-1].split("=")[-1] in block or "16 does not divide among 3" in block or "data/coco" in block
    assert "/tmp" not in text


def test_a_command_that_is_not_refused_fails_the_page() -> None:
    with pytest.raises(ValueError, match="ended with 0"):
        answer(("config", "list"))
