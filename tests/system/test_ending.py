"""A rank that has done its work ends, whatever threads of native libraries still do."""

import subprocess
import sys
import textwrap

import pytest

pytestmark = [pytest.mark.job, pytest.mark.smoke]


def ended(program: str) -> "subprocess.CompletedProcess[str]":
    """Run a program that has ``end_with`` as a process of its own, with output through a pipe that is not flushed."""
    head = "import atexit, ctypes, logging, sys, threading\nfrom mtrain.system.ending import end_with\n"
    words = [sys.executable, "-c", head + textwrap.dedent(program)]
    return subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)


CRASHES = """
    class Library:
        def __del__(self):
            ctypes.string_at(0)

    library = Library()
"""
"""Something that crashes when Python takes it apart at its end, as a static object of a library in C++ does."""


def test_a_library_that_crashes_when_it_is_taken_apart_costs_nothing_after_the_work():
    assert ended(CRASHES + "    sys.exit(0)").returncode < 0
    result = ended(CRASHES + "    end_with(lambda: 0)")
    assert (result.returncode, result.stderr) == (0, "")


def test_output_threads_and_exit_functions_of_the_program_are_awaited():
    result = ended("""
        import time

        def later():
            time.sleep(0.3)
            print("thread")

        def program():
            atexit.register(print, "registered", end=" ")
            threading.Thread(target=later).start()
            print("python", end=" ")
            ctypes.CDLL(None).printf(b"native ")
            return 0

        end_with(program)
    """)
    assert result.returncode == 0
    assert sorted(result.stdout.split()) == ["native", "python", "registered", "thread"]
    assert result.stdout.index("thread") < result.stdout.index("registered")


@pytest.mark.parametrize(("program", "status"), [("lambda: 3", 3), ("lambda: 1 / 0", 1), ("lambda: sys.exit(5)", 5)])
def test_a_failure_keeps_its_status(program, status):
    assert ended(f"end_with({program})").returncode == status
