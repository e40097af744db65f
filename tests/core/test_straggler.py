"""The ranks that the others wait for: which are found from the waits of all, and when it is said."""

from itertools import pairwise
from threading import Barrier, Thread

import numpy as np
import pytest

from mtrain.core.ranks.agreement import HEAD, NO_REQUESTS, NO_WAITS, Agreement, RankPlace
from mtrain.core.ranks.straggler import MOST_UPDATES, Look, Stragglers, slowest


@pytest.mark.parametrize(
    ("shares", "found"),
    [
        ([0.6, 0.62, 0.01], (2,)),
        ([0.1, 0.12, 0.09], ()),  # even ranks that exchange all the time wait alike
        ([0.5, 0.5, 0.5, 0.5], ()),
        ([0.7, 0.1], (1,)),
        ([0.3, 0.15], ()),
        ([0.5] * 6 + [0.05, 0.1], (6, 7)),  # a slow host
        ([0.6, 0.0, 0.0, 0.0], ()),  # one fast rank is no reason to name all others
        ([0.5, 0.5, 0.3, 0.05], (3,)),
        ([0.0], ()),
    ],
)
def test_the_ranks_below_the_largest_gap_are_found(shares, found):
    assert slowest(shares) == found


class Rank:
    """One of several ranks whose exchanges are played by the test: it waits ``wait_s`` in each update of ``update_s``."""

    def __init__(self, ranks: "Ranks", rank: int) -> None:
        self.rank, self.size = rank, ranks.size
        self._ranks = ranks
        self.lengths = []
        """Of each vector that was exchanged."""
        self.now = self.waited_s = 0.0
        self.sent_bytes = 0
        self.stragglers = Stragglers(rank=rank, size=self.size, clock=lambda: self.now, sent=lambda: self.sent_bytes)
        self.stragglers.hosts = [f"node{number}" for number in range(self.size)]
        self.agreement = Agreement(self, self.stragglers)
        self.unread = None
        """What was sent after an update and is not read yet, with the update's place and record."""

    def all_reduce(self, x, op):
        assert op == "mean"
        self.lengths.append(len(x))
        return np.mean(self._ranks.exchange(self.rank, x), axis=0)

    def all_gather(self, value):
        raise AssertionError("the search exchanges nothing but the vector of each update")

    def take(self, update, *, late):
        """Agree with the others after an update, as the loop does, and record it; a late one after the next was sent."""
        record = {"update": update, "communication_s": self.waited_s}
        if not late:
            self.agreement.agree(NO_REQUESTS, RankPlace(update=update), [])
            return self.stragglers.take(record)
        place = RankPlace(update=update)
        means = self.all_reduce(np.array(self.agreement.head(NO_REQUESTS, place)), "mean")
        before, self.unread = self.unread, (means, place, record)
        if before is None:
            return None
        self.agreement.read_requests(*before[:2])
        return self.stragglers.take(before[2])


class Ranks:
    """All ranks, whose threads meet in every exchange."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._values = [None] * size
        self._barrier = Barrier(size, timeout=20)
        self.all = [Rank(self, rank) for rank in range(size)]

    def exchange(self, rank, value):
        self._values[rank] = value
        self._barrier.wait()
        values = list(self._values)
        self._barrier.wait()
        return values

    def run(self, waits, *, updates, first=0, update_s=0.25, excluded=(), late=False):
        """Make updates in which each rank waits as ``waits`` says; return the looks of each."""
        looks = [[] for _ in self.all]

        def one(rank):
            for update in range(first, first + updates):
                if update in excluded:  # an evaluation of 100 s, in which this rank alone does not wait
                    rank.now += 100
                    rank.waited_s += 100 if rank.rank else 0
                    rank.stragglers.exclude()
                rank.now += update_s
                rank.waited_s += waits[rank.rank] * update_s
                rank.sent_bytes += 1000 * (rank.rank + 1)
                look = rank.take(update, late=late)
                looks[rank.rank] += [] if look is None else [(update, look)]

        threads = [Thread(target=one, args=(rank,)) for rank in self.all]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return looks


def said(looks: "list[tuple[int, Look]]") -> "list[tuple[int, str]]":
    return [(update, look.sentence) for update, look in looks if look.sentence]


def test_a_slow_rank_is_named_once_on_every_rank_after_two_looks_and_again_when_it_is_over():
    ranks = Ranks(3)
    slow = ranks.run([0.6, 0.5, 0.0], updates=200)
    assert len({tuple(said(each)) for each in slow}) == 1, "all ranks say the same"
    ((update, sentence),) = said(slow[0])
    assert update == 22, "ten updates are 2.5 s, ten more confirm it, and the second one after these tells all ranks"
    assert "wait for rank 2 (node2)" in sentence
    assert "wait 55 % of the time, it 0 %" in sentence
    assert [look.slow for _, look in slow[1]] == [(), *[(2,)] * (len(slow[1]) - 1)]
    even = ranks.run([0.2, 0.2, 0.2], first=200, updates=200)
    assert [sentence for _, sentence in said(even[0])] == ["the ranks no longer wait for rank 2"]
    assert ranks.all[0].stragglers.slow == ()


def test_of_updates_that_are_read_late_the_slow_rank_is_named_too():
    looks = Ranks(3).run([0.6, 0.5, 0.0], updates=60, late=True)
    assert {tuple(said(each)) for each in looks} == {tuple(said(looks[0]))}
    ((update, _),) = said(looks[0])
    assert update == 23, "one update later than where each is read at once"
    assert looks[0][-1][1].slow == (2,)


def test_even_ranks_exchange_the_vector_of_each_update_and_nothing_else_and_none_is_named():
    ranks = Ranks(4)
    looks = ranks.run([0.4, 0.45, 0.35, 0.5], updates=1000)
    assert said(looks[0]) == []
    assert [rank.lengths for rank in ranks.all] == [[HEAD] * 1000] * 4
    assert 20 <= len(looks[0]) <= 26, "250 s of updates, a look every 10"


def test_the_vector_is_as_long_for_many_ranks_whose_shares_take_turns():
    ranks = Ranks(13)
    looks = ranks.run([0.5] * 10 + [0.05, 0.0, 0.5], updates=30)
    assert {length for rank in ranks.all for length in rank.lengths} == {HEAD}
    ((update, sentence),) = said(looks[12])
    assert update == 24, "five ranks an update"
    assert "wait for ranks 10, 11 (node10, node11)" in sentence
    assert looks[3][0][1].shares == pytest.approx([0.5] * 10 + [0.05, 0.0, 0.5], abs=0.5 / 1023)


def test_shares_of_thousands_of_ranks_are_whole_in_the_mean():
    size = 8003
    shares = [rank % 1024 / 1023 for rank in range(size)]
    last = Stragglers(rank=size - 1, size=size, clock=lambda: 0.0, sent=lambda: None)
    for update in range(11):
        last.take({"update": update, "communication_s": 0.0})
    for update in range(12, 12 + size // 5):
        assert last.own_numbers(update) == NO_WAITS
        steps = [round(1023 * share) for share in shares[5 * (update - 12) :][:5]]
        last.take_means(update, (20.0, sum(step << 10 * place for place, step in enumerate(steps)) / size))
    last.take_means(12 + size // 5, (20.0, 0.0))
    assert last.take({"update": 12 + size // 5, "communication_s": 0.0}).shares == [*shares[:-3], 0.0, 0.0, 0.0]


def test_fast_updates_are_looked_at_seldom_and_not_judged_after_milliseconds():
    ranks = Ranks(2)
    looks = ranks.run([0.9, 0.0], updates=10 + 3 * MOST_UPDATES, update_s=0.002)
    updates = [update for update, _ in looks[0]]
    assert updates[0] == 12
    assert looks[0][0][1].slow == ()
    assert all(later - earlier <= MOST_UPDATES for earlier, later in pairwise(updates))
    assert looks[0][-1][1].slow == (1,)


def test_one_bad_look_names_nobody():
    ranks = Ranks(2)
    looks = [
        *ranks.run([0.3, 0.3], updates=11)[0],
        *ranks.run([0.9, 0.0], first=11, updates=40)[0],
        *ranks.run([0.3, 0.3], first=51, updates=100)[0],
    ]
    assert max(look.shares[0] - look.shares[1] for _, look in looks) > 0.2
    assert said(looks) == []


def test_waits_of_an_evaluation_are_those_of_no_update():
    ranks = Ranks(2)
    assert said(ranks.run([0.3, 0.3], updates=100, excluded=range(5, 100, 5))[0]) == []


def test_bytes_are_counted_per_update_of_this_rank():
    looks = Ranks(2).run([0.3, 0.3], updates=60)
    assert {look.sent_bytes for _, look in looks[0]} == {1000.0}
    assert {look.sent_bytes for _, look in looks[1]} == {2000.0}


def test_ranks_that_measure_no_waits_exchange_nothing():
    ranks = Ranks(2)
    for update in range(20):
        assert ranks.all[0].stragglers.take({"update": update}) is None
        assert ranks.all[0].stragglers.own_numbers(update + 1) == NO_WAITS
