"""mtrain can be installed beside what people have: their versions are within its ranges, so pip changes none of them.

`scripts/versions` installs it beside each of its rows with pip, and compares the lists of versions.
"""

import tomllib
from collections.abc import Iterator, Mapping

import pytest
from packaging.requirements import Requirement

from tests.distribution.base_environment import normal
from tests.distribution.building import NAMES, project
from tests.sources import ROOT

ENVIRONMENTS: Mapping[str, Mapping[str, str]] = {
    "oldest torch": {
        "torch": "2.6.0",
        "deepspeed": "0.16.9",
        "numpy": "1.26.4",
        "pydantic": "2.10.6",
        "rich": "13.9.4",
    },
    "2025-08": {
        "torch": "2.8.0",
        "deepspeed": "0.17.6",
        "transformers": "4.55.4",
        "numpy": "1.26.4",
        "pydantic": "2.11.7",
    },
    "newest torch": {
        "torch": "2.14.1",
        "deepspeed": "0.19.8",
        "numpy": "2.4.6",
        "pydantic": "2.14.3",
        "transformers": "5.0.0",
    },
    "older Paddle": {"paddlepaddle": "2.6.2", "numpy": "1.26.4"},
    "Paddle": {"paddlepaddle": "3.2.2", "numpy": "2.2.6"},
}
"""What somebody has before mtrain comes."""
EXTRAS = ("ddp", "horovod", "deepspeed", "fleet-cpu", "vision", "report", "tensorboard")
"""The extras that name what is there already, or must leave it."""


def requirements() -> Iterator[tuple[str, Requirement]]:
    """Yield what mtrain and its packages require, with where it is said."""
    for name in NAMES:
        settings = tomllib.loads((project(ROOT, name) / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        extras = settings.get("optional-dependencies", {}) if name == "mtrain" else {}
        for line in settings.get("dependencies", []):
            yield name, Requirement(line)
        for extra in EXTRAS:
            for line in extras.get(extra, []):
                yield f"{name}[{extra}]", Requirement(line)


@pytest.mark.parametrize("there", ENVIRONMENTS)
def test_no_requirement_changes_the_version_of_a_library_that_is_there(there: str) -> None:
    versions = ENVIRONMENTS[there]
    required = [(where, need) for where, need in requirements() if normal(need.name) in versions]
    assert {normal(need.name) for _, need in required} == set(versions), (
        "a library that nothing requires proves nothing"
    )
    refused = [f"{where} wants {need}, not {versions[normal(need.name)]}" for where, need in required
               if not need.specifier.contains(versions[normal(need.name)])]  # fmt: skip
    assert refused == []
