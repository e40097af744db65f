"""The farewell of a leader reaches the process on another host with its code, text and reason."""

import signal

import pytest

from mtrain.jobs.hosts.messages import Farewell
from mtrain.system.diagnosis import Evidence, Log, Verdict, conclude


@pytest.mark.parametrize(
    "farewell",
    [
        Farewell(code=0, discard=True),
        Farewell(code=1, text="a log\nerror: rank 0 failed", reason="rank 0 failed"),
        Farewell.for_refusal("error: is a word of this reason"),
        Farewell.for_error("lost", code=1),
    ],
)
def test_a_farewell_is_read_as_it_was_sent(farewell):
    assert Farewell.of(farewell.message()) == farewell


def test_the_reason_of_a_failed_job_is_known_without_reading_its_text():
    assert (
        Verdict(code=1, headline="rank 0 failed: CUDA error: gone", text="").reason == "rank 0 failed: CUDA error: gone"
    )
    failure = {"rank": 0, "expected": True, "exit_code": 2, "error": "SpecError", "message": "a: error: b\nc: d"}
    nothing = Log(place="log", text="")
    evidence = Evidence(failures=[failure], deaths=[], status=2, log=lambda rank: nothing, starter=nothing)
    assert conclude(evidence).reason == "a: error: b"


def test_of_ranks_that_ended_together_the_one_that_nobody_ended_is_named():
    nothing = Log(place="log", text="")
    deaths = [(0, -signal.SIGTERM), (1, -signal.SIGABRT)]
    evidence = Evidence(failures=[], deaths=deaths, status=1, log=lambda rank: nothing, starter=nothing)
    assert conclude(evidence).headline == "rank 1 was ended by signal 6 (SIGABRT)"
