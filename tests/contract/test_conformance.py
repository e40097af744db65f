"""Every backend that ships keeps every promise: the conformance kit on each, through its own launcher."""

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

from mtrain_kit import kit, wording
from mtrain_kit.catalogue import CHECKS, DIES, ONE, TASK
from mtrain_kit.jobs import PluginTestRequest
from tests.contract import training
from tests.contract.training import Case
from tests.framework import Framework

BACKENDS = {
    "torch": {
        "ddp": ("torch", ()),
        "horovod": ("horovod", ()),
        "deepspeed": ("deepspeed", ("stage=1", "stage=3", "stage=0", "stage=2")),
        "fsdp": ("torch", ("unit=children", "unit=model")),
    },
    "paddle": {"fleet": ("paddle", ())},
}
"""Framework -> backend -> (the module that it needs, options that are tested beside each other)."""
IN_ONE_JOB = tuple(check.id for check in CHECKS if check not in (ONE, DIES, TASK))
Tested = Callable[[str, str, int, tuple[str, ...]], None]
QUICK = {
    ("ddp", "", 3),
    ("horovod", "", 3),
    ("deepspeed", "stage=1", 2),
    ("fsdp", "unit=children", 2),
    ("fleet", "", 3),
}
"""(backend, option, ranks) of the jobs that are not slow."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "option" not in metafunc.fixturenames:
        return
    jobs = [
        (backend, option, size)
        for backend, (_, options) in BACKENDS[metafunc.config.getoption("framework")].items()
        for option in options or ("",)
        for size in (2, 3)
    ]
    marked = [pytest.param(*job, marks=() if job in QUICK else pytest.mark.slow) for job in jobs]
    metafunc.parametrize(("backend", "option", "size"), marked)


@pytest.fixture(scope="session")
def references(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of solo's results; the first test writes them."""
    return tmp_path_factory.mktemp("references")


@pytest.fixture
def tested(framework: Framework, references: Path, tmp_path: Path) -> Tested:
    def run(backend: str, option: str, size: int, only: tuple[str, ...]) -> None:
        if find_spec(BACKENDS[framework.name][backend][0]) is None:
            pytest.skip(f"{backend} is not installed here")
        expected = PluginTestRequest(
            name=backend,
            ranks=size,
            # On the CPU nothing is late unless asked for; only the check step.later does updates that way.
            overrides=["backend.options.late_figures=true", *([f"backend.options.{option}"] if option else [])],
            only=only,
        )
        actual = kit.run(expected, tmp_path, references=references)
        assert actual.has_passed, wording.report(actual)

    return run


@pytest.mark.job
def test_ranks_keep_every_promise(tested: Tested, backend: str, option: str, size: int) -> None:
    tested(backend, option, size, IN_ONE_JOB)


@pytest.mark.slow
@pytest.mark.parametrize("only", [ONE.id, DIES.id, TASK.id])
def test_whole_jobs_keep_every_promise(tested: Tested, framework: Framework, only: str) -> None:
    for backend, (_, options) in BACKENDS[framework.name].items():
        for option in options or ("",):
            tested(backend, option, 2, (only,))


def test_some_updates_of_the_kit_are_clipped_and_others_are_not(framework: Framework) -> None:
    with framework.solo() as session:
        norms = training.train(session, Case())["norms"]
    assert (norms > Case().clip_norm).any()
    assert (norms < Case().clip_norm).any()
