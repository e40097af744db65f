"""Late updates under Paddle, where weights and moments of every rule are restored on the device."""

import pytest

from tests.backends.test_late_updates import COMPOSED, ORDER, check_equal
from tests.framework import Framework


@pytest.mark.parametrize("case", COMPOSED)
def test_late_updates_of_composed_rules_have_the_bits_of_prompt_ones(framework: Framework, case: str) -> None:
    check_equal(framework, case, len(ORDER))
