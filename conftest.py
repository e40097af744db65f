"""`pytest --framework paddle PATHS` runs tests that are written for every framework under Paddle; without it: torch.

Files called test_torch_*.py and test_paddle_*.py belong to one framework and are left out under the other. One process
never holds both: that is checked at the end of every session.
"""

import gc
import logging
import os
import signal
import sys
import tempfile
from collections.abc import Generator, Iterator
from importlib import import_module
from pathlib import Path

import pytest

# Tests, and the ranks that they start, share modules of the folders `tests`: `tests.framework`, `tests.contract`. It is one package, whose
# parts lie here and in each distribution.
ROOT = Path(__file__).parent
SHARED = [str(ROOT), *sorted(str(folder.parent) for folder in ROOT.glob("packages/*/tests"))]
sys.path[:0] = [folder for folder in SHARED if folder not in sys.path]

from tests.framework import FRAMEWORKS, Framework  # noqa: E402

pytest_plugins = ("tests.starts", "tests.costs", "tests.outlining", "tests.skips", "tests.needs_horovod")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--framework", choices=tuple(FRAMEWORKS), default="torch")


def pytest_configure(config: pytest.Config) -> None:
    gc.disable()  # collecting makes hundreds of thousands of objects, and no garbage
    # A shell that runs this in the background has it ignore Ctrl-C, and so would every process that a test starts.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # Who compiles an extension of torch waits without end for a lock that a killed process has left in the user's own folder.
    if "TORCH_EXTENSIONS_DIR" not in os.environ:  # workers have it of the process that started them
        folder = tempfile.TemporaryDirectory(prefix="mtrain-torch-extensions-", ignore_cleanup_errors=True)
        os.environ["TORCH_EXTENSIONS_DIR"] = folder.name
        config.add_cleanup(folder.cleanup)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    # `pytest packages/mtrain-kit` runs the kit's own tests; its checks of a backend are for `pytest --pyargs mtrain_kit --backend NAME`.
    if collection_path.match("packages/*/src") and any(Path(each).is_dir() for each in config.args):
        return True
    others = [name for name in FRAMEWORKS if name != config.getoption("--framework")]
    return True if any(collection_path.name.startswith(f"test_{name}_") for name in others) else None


def _encodable(text: str) -> str:
    """Return ``text`` with every lone surrogate, as names of files have them, written as an escape."""
    return text.encode("utf-8", "backslashreplace").decode()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Keep lone surrogates out of reports: a worker cannot send them, and the whole run would end there."""
    report = yield
    report.sections = [(title, _encodable(text)) for title, text in report.sections]
    told = str(report.longrepr or "")
    if told != _encodable(told):
        report.longrepr = _encodable(told)
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Make tests that are marked `under_torch` slow under every other framework."""
    if config.getoption("--framework") == "torch":
        return
    for item in items:
        if item.get_closest_marker("under_torch"):
            item.add_marker(pytest.mark.slow)


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Leave what collecting has made, tests and imported libraries, out of every garbage collection of a test."""
    import_module("hypothesis")  # imported by a test it would look in vain for who refers to what is frozen
    gc.freeze()
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish() -> None:
    gc.unfreeze()  # hypothesis is imported to sum up, and looks for who refers to an object of a library


@pytest.fixture(scope="session")
def framework(request: pytest.FixtureRequest) -> Framework:
    """The framework of this session, bound to `core.nn` and `core.ops`."""
    from mtrain.core.binding import bind
    from tests.starts import allowed

    with allowed():  # Paddle runs several programs while it is imported
        chosen: Framework = FRAMEWORKS[request.config.getoption("--framework")]()
    bind(chosen.nn, chosen.ops)
    return chosen


@pytest.fixture(scope="session", autouse=True)
def one_framework_per_process() -> Iterator[None]:
    yield
    weights = [name for name in FRAMEWORKS if name in sys.modules]
    assert len(weights) < 2, f"this process imported {' and '.join(weights)}"


@pytest.fixture(scope="session", autouse=True)
def warm_processes_end() -> Iterator[None]:
    yield
    if warm := sys.modules.get("tests.warm"):
        warm.close()


def _changed_loggers() -> dict[str, tuple[int, bool, bool]]:
    """Return level, propagation and silence of mtrain's loggers, and of the root's, that are not as they were made."""
    loggers = [each for each in logging.root.manager.loggerDict.values() if isinstance(each, logging.Logger)]
    ours = [each for each in loggers if each.name.partition(".")[0] in ("mtrain", "mtrain_trace")]
    settings = {each.name: (each.level, each.propagate, each.disabled) for each in ours}
    changed = {name: now for name, now in settings.items() if now != (logging.NOTSET, True, False)}
    if logging.root.level != logging.WARNING:
        changed["root"] = (logging.root.level, logging.root.propagate, logging.root.disabled)
    return changed


@pytest.fixture(autouse=True)
def log_settings_are_put_back() -> Iterator[None]:
    """Fail the test that leaves a logger changed: a later one would miss the warnings that it waits for."""
    yield
    changed = _changed_loggers()
    for name in changed:
        logger = logging.getLogger(None if name == "root" else name)
        logger.setLevel(logging.WARNING if name == "root" else logging.NOTSET)
        logger.propagate, logger.disabled = True, False
    assert not changed, f"this test left loggers changed (level, propagate, disabled): {changed}"
