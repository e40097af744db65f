"""Journals of tests are opened hundreds of times, each of which would import all of Optuna's migrations anew."""

from collections.abc import Iterator
from typing import Any

import pytest
from alembic.script import ScriptDirectory


@pytest.fixture(autouse=True, scope="session")
def migrations_are_read_once() -> Iterator[None]:
    read, known = ScriptDirectory.from_config, {}

    def remembered(config: Any) -> ScriptDirectory:
        place = config.get_main_option("script_location")
        return known.get(place) or known.setdefault(place, read(config))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ScriptDirectory, "from_config", remembered)
        yield
