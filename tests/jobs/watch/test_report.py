"""What is said of a hang: the rank that does not come is named, with its place; where it cannot be known, that is said."""

import pytest

from mtrain.jobs.watch.looks import STARTER, RankLook
from mtrain.jobs.watch.places import Place
from mtrain.jobs.watch.report import Seen, describe
from mtrain.jobs.watch.rules import Finding

WAITS = Place(kind="waits", what="all_reduce", where="train.py:41")
BARRIER = Place(kind="waits", what="barrier", where="train.py:37")


def seen(rank: int, place: Place | None = WAITS, *, state="S", idle=True, stopped=0, host="", at="", **more) -> Seen:
    look = RankLook(rank=rank, pid=100 + rank, state=state, idle=idle, stopped=stopped, **more)
    return Seen(look=look, host=host, stopped_at=at, place=place)


def report(kind, *ranks: Seen, since=0.0, found=(), usual_s=0.0):
    finding = Finding(kind=kind, since=since, ranks=found, usual_s=usual_s, where="/x/lock")
    return describe(
        finding, {each.look.rank: each for each in ranks}, at=lambda moment: f"12:00:{moment:02.0f}", now=75.0
    )


def test_a_stopped_rank_is_named_with_its_host_and_what_lets_it_go_on():
    stopped = seen(1, None, state="T", stopped=101, host="b", at="12:03:10")
    said = report("stopped", seen(0, host="a"), stopped, seen(2, host="c"), seen(3, host="c"), found=(1,))
    assert said.text == (
        "rank 1 (host b) has been stopped by a signal since 12:03:10; ranks 0, 2 and 3 wait for it in all_reduce at train.py:41; "
        "let go on what is stopped with: kill -CONT 101"
    ).replace("0, 2 and 3", "0, 2 and 3")
    assert (said.suspects, said.may_end) == ((1,), True)


def test_a_stopped_child_is_told_from_its_rank():
    said = report("stopped", seen(0, stopped=170, name="pt_data_worker", at="12:03:10"), seen(1), found=(0,))
    assert said.text.startswith(
        "rank 0 has a child, process 170 (pt_data_worker), that has been stopped by a signal since 12:03:10; rank 1 waits for it"
    )


def test_a_stopped_starter_is_named():
    starter = Seen(look=RankLook(rank=STARTER, pid=7, state="T", stopped=7), stopped_at="12:03:10")
    said = report("stopped", starter, seen(0), found=(STARTER,))
    assert said.text.startswith("the starter of the ranks has been stopped by a signal since 12:03:10")


def test_the_rank_that_does_not_wait_is_the_one_that_is_waited_for():
    said = report("still", seen(0), seen(1, Place(kind="runs", where="train.py:12")), seen(2), since=8.0)
    assert said.text == (
        "nothing moves since 12:00:08: rank 1 does nothing at train.py:12; ranks 0 and 2 wait for it in all_reduce at train.py:41"
    )
    assert (said.suspects, said.may_end) == ((1,), True)


def test_a_rank_that_was_asked_in_its_backward_pass_waits_there_once_it_is_idle():
    backward = Place(kind="backward", what="the exchange of the gradients", where="train.py:41")
    stuck = Place(kind="runs", where="train.py:12")
    said = report("still", seen(0, backward), seen(1, stuck), seen(2, backward), since=8.0)
    assert said.suspects == (1,)
    assert "ranks 0 and 2 wait for it in the exchange of the gradients at train.py:41" in said.text
    said = report("slow", seen(0, backward, idle=False), seen(1), since=8.0)
    assert said.suspects == (0,)
    assert "rank 0 computes at train.py:41" in said.text


def test_a_mismatch_shows_both_calls_and_blames_nobody():
    said = report("still", seen(0, BARRIER), seen(1), seen(2), since=8.0)
    assert said.text == (
        "nothing moves since 12:00:08: rank 0 waits in barrier at train.py:37; ranks 1 and 2 wait in all_reduce at train.py:41: they "
        "wait in different calls, or lines, for each other"
    )
    assert said.suspects == ()


def test_where_all_wait_in_the_same_line_the_report_says_that_it_does_not_know():
    said = report("still", *(seen(rank) for rank in range(64)))
    assert (
        "ranks 0 to 63 wait in all_reduce at train.py:41; which of them is the cause cannot be seen from outside"
        in said.text
    )


def test_what_a_rank_waits_for_itself_is_not_laid_to_the_others():
    loads = Place(kind="children", what="select", where="selectors.py:415", children=((170, "workers.py:246"),))
    said = report("stopped", seen(0, loads), seen(1, None, state="T", stopped=101), found=(1,))
    assert "rank 0 waits in select at selectors.py:415 for its children (process 170 is at workers.py:246)" in said.text


@pytest.mark.parametrize(
    ("culprit", "words", "ends"),
    [
        (seen(1, None, state=""), "rank 1 has ended; rank 0 waits for it", True),
        (
            seen(1, state="D"),
            "rank 1 waits in the kernel for a disk or a device at train.py:41; rank 0 waits for it",
            False,
        ),
        (seen(1, None, traced=True), "rank 1 is held by a debugger; rank 0 waits for it", False),
        (
            seen(1, Place(kind="person", what="input", where="train.py:9")),
            "rank 1 seems to be in input at train.py:9, for which a person must answer; rank 0 waits for it",
            False,
        ),
        (
            seen(1, Place(kind="children", what="select", where="train.py:9", children=((170, "data.py:16"),))),
            "rank 1 waits in select at train.py:9 for its children (process 170 is at data.py:16); rank 0 waits for it",
            True,
        ),
    ],
)
def test_what_a_rank_does_instead(culprit, words, ends):
    said = report("still", seen(0), culprit)
    assert words in said.text
    assert (said.suspects, said.may_end) == ((1,), ends)


def test_a_rank_that_has_not_begun_is_named():
    late = Seen(look=RankLook(rank=1, pid=0, idle=True), place=None)
    assert "rank 1 has not begun" in report("still", seen(0), late).text


def test_a_rank_of_which_nothing_is_known_is_no_suspect():
    said = report("still", seen(0), seen(1, Place(kind="unknown", why="mtrain did not take part in its start")))
    assert "rank 1 cannot be asked where it is (mtrain did not take part in its start)" in said.text
    assert said.suspects == ()


def test_a_slow_job_gets_a_remark_that_ends_nothing():
    said = report("slow", seen(0), seen(1, Place(kind="runs", where="train.py:12"), idle=False), usual_s=4.0)
    assert said.text == (
        "no progress for 75 s, and 4 s at most before: rank 1 computes at train.py:12; rank 0 waits for it in all_reduce at "
        "train.py:41"
    )
    assert not said.may_end


def test_a_lock_is_named_with_its_path_and_ends_nothing():
    said = report("lock", seen(0), seen(1))
    assert "/x/lock" in said.text
    assert "delete it" in said.text
    assert not said.may_end


def test_many_different_places_are_not_all_told():
    ranks = [seen(rank, Place(kind="runs", where=f"train.py:{rank}"), idle=False) for rank in range(40)]
    assert "32 more groups of ranks are elsewhere" in report("slow", *ranks).text
