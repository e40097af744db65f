"""A test that starts a process and is no `job` fails, whatever it makes of the refusal; what runs cost is added up."""

import json
from pathlib import Path

import pytest

from tests import costs

pytest_plugins = ("pytester",)
pytestmark = [pytest.mark.job, pytest.mark.smoke]

TESTS = """
import multiprocessing, os, subprocess, threading
import pytest
from tests.starts import allowed, starts_processes

def fork():
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)

def spawn():
    os.waitpid(os.posix_spawn("/bin/true", ["true"], {}), 0)

def other():
    for method in ("fork", "spawn"):
        process = multiprocessing.get_context(method).Process(target=int)
        process.start()
        process.join()

WAYS = {"run": lambda: subprocess.run(["true"]), "shell": lambda: os.system("true"), "fork": fork, "spawn": spawn, "other": other}

@pytest.mark.parametrize("way", WAYS)
def test_not_said(way):
    WAYS[way]()

@pytest.mark.job
@pytest.mark.parametrize("way", WAYS)
def test_said(way):
    WAYS[way]()

def test_swallowed():
    try:
        subprocess.run(["true"])
    except BaseException:
        pass

def test_skipped():
    try:
        subprocess.run(["true"])
    except BaseException:
        pytest.skip("no program here")

def test_by_a_thread():
    thread = threading.Thread(target=lambda: pytest.raises(BaseException, subprocess.run, ["true"]))
    thread.start()
    thread.join()

@pytest.mark.slow
def test_slow():
    subprocess.run(["true"])

def test_nothing(): pass

@pytest.fixture(scope="module")
@starts_processes
def said():
    subprocess.run(["true"])

@pytest.fixture(scope="module")
def not_said():
    subprocess.run(["true"])

@pytest.fixture
def above(said): pass

def test_fixture_said(said): pass
def test_fixture_above(above): pass
def test_fixture_not_said(not_said): pass
def test_fixture_not_said_again(not_said): pass
def test_served():
    with allowed():
        subprocess.run(["true"])
"""
ALONE = ("-p", "tests.starts", "-p", "no:cacheprovider", "-p", "no:xdist")
REFUSED = {
    *(f"test_not_said[{way}]" for way in ("run", "shell", "fork", "spawn", "other")),
    *("test_swallowed", "test_skipped", "test_by_a_thread", "test_fixture_not_said", "test_fixture_not_said_again"),
}


@pytest.fixture
def folder(pytester: pytest.Pytester) -> pytest.Pytester:
    pytester.makepyfile(test_some=TESTS)
    pytester.makeini("[pytest]\nmarkers =\n  job: x\n  slow: x\n")
    return pytester


def test_starts_that_are_not_said_fail_their_tests_and_no_others(folder: pytest.Pytester) -> None:
    result = folder.runpytest_inprocess(*ALONE, "-rA")
    failed = {line.split("::")[1].split(" - ")[0] for line in result.outlines if line.startswith(("FAILED", "ERROR "))}
    assert failed == REFUSED
    result.assert_outcomes(passed=10, failed=len(REFUSED) - 2, errors=2)
    result.stdout.fnmatch_lines(["*this test starts a process and is no `job`: true*", "*@starts_processes*"])


def test_only_the_others_run_where_no_job_is_wanted(folder: pytest.Pytester) -> None:
    words = ("-m", "not job", "-k", "nothing or fixture")
    folder.runpytest_inprocess(*ALONE, *words).assert_outcomes(passed=1, errors=2, deselected=17)


def test_what_runs_cost_is_added_up(folder: pytest.Pytester, capsys: pytest.CaptureFixture[str]) -> None:
    file = Path(folder.path / "costs.jsonl")
    words = (*ALONE, "-p", "tests.costs", "--costs", str(file))
    for number in (1, 2):
        result = folder.runpytest_inprocess(*words, "-k", "test_said")
        result.stdout.fnmatch_lines(["CPU seconds: *; starts of processes: 6"])
        assert len(file.read_text().splitlines()) == number
    run = json.loads(file.read_text().splitlines()[0])
    assert run["sum"]["starts"] == 6
    assert [starts for _, _, starts in run["tests"].values()] == [1, 1, 1, 1, 2]
    capsys.readouterr()
    assert costs.main([str(file)]) == 0
    printed = capsys.readouterr().out
    assert "10 tests in 2 runs" in printed
    assert "starts of processes: 12" in printed
    assert costs.main([str(file) + ".none"]) == 2


def test_the_sum_is_that_of_its_parts() -> None:
    runs = [{"tests": 1.0, "processes": 20.0, "collection": 300.0, "starts": 2}, {"tests": 4000.0}]
    words = "CPU seconds: 4321 (tests 4001, their processes 20, collection 300); starts of processes: 2"
    assert costs.sum_of(runs) == words
    tests = {"cheap": (1.0, 0.5, 0), "dear": (0.5, 9.0, 3)}
    assert [line.split()[-1] for line in costs.most_of(tests)] == ["dear", "cheap"]
