"""How the shards of a job come to the hosts that are there."""

import random

import pytest

from mtrain.core.interfaces import Host, Recipe
from mtrain.errors import SpecError
from mtrain.jobs.plan import elastic


def hosts(*slots: int) -> list[Host]:
    return [Host(address=f"10.0.0.{number + 1}", slots=count) for number, count in enumerate(slots)]


@pytest.mark.parametrize(
    ("slots", "present", "shards", "expected"),
    [
        ((1, 1, 1), (0, 1, 2), 3, [1, 1, 1]),
        ((1, 1, 1), (0, 1), 3, [2, 1]),
        ((1, 1, 1), (2, 0), 3, [2, 1]),
        ((1, 1, 1), (1,), 3, [3]),
        ((1, 1, 1), (0, 1, 2), 6, [2, 2, 2]),
        ((4, 2), (0, 1), 6, [4, 2]),
        ((4, 2, 2), (0, 2), 8, [6, 2]),
        ((4, 4), (0, 1), 2, [1, 1]),
        ((2, 2), (0, 1), 1, [1]),
    ],
)
def test_each_host_keeps_its_ranks_and_the_least_crowded_takes_the_rest(slots, present, shards, expected):
    spread = elastic.spread(hosts(*slots), present, shards=shards)
    assert [host.slots for host in spread] == expected
    assert sum(host.slots for host in spread) == shards


def test_a_launcher_that_cannot_start_the_job_on_fewer_hosts_is_told_at_once():
    def plan(each):
        if len({host.slots for host in each}) > 1:
            raise SpecError("as many ranks on every host")

    with pytest.raises(SpecError, match=r"with 2 of 3 hosts .*as many ranks on every host; or give cluster.shards=6$"):
        elastic.check_every_number(hosts(1, 1, 1), fewest=1, shards=3, plan=plan)
    elastic.check_every_number(hosts(1, 1, 1), fewest=1, shards=6, plan=plan)


def test_ranks_are_given_as_if_one_by_one():
    draw = random.Random(0)
    for _ in range(300):
        own = [draw.choice((1, 2, 3, 7, 8, 16)) for _ in range(draw.randint(1, 9))]
        shards = draw.randint(1, 90)
        counts = list(own) if sum(own) <= shards else [0] * len(own)
        while sum(counts) < shards:
            counts[min(range(len(own)), key=lambda place: ((counts[place] + 1) / own[place], place))] += 1
        actual = elastic.spread(hosts(*own), range(len(own)), shards=shards)
        expected = [(f"10.0.0.{place + 1}", count) for place, count in enumerate(counts) if count]
        assert [(host.address, host.slots) for host in actual] == expected, (own, shards)


def test_equal_hosts_are_asked_about_as_any_others():
    for own in (1, 3, 8):
        for count in range(1, 40):
            for shards in range(1, 90):
                ranks = [host.slots for host in elastic.spread(hosts(*[own] * count), range(count), shards=shards)]
                ranks += [0] * (count - len(ranks))
                assert elastic._of_equal_hosts(count, shards) == elastic._of_each_number(ranks), (own, count, shards)


def test_numbers_of_equal_hosts_are_not_counted_host_by_host(monkeypatch):
    """For each number of hosts that would be the square of them."""
    monkeypatch.setattr(elastic, "_ranks", lambda *arguments, **named: pytest.fail("counted"))
    elastic.check_every_number(hosts(*[8] * 100), fewest=1, shards=800, plan=lambda each: None)


def test_every_number_of_a_thousand_hosts_is_checked_with_few_commands():
    asked = []
    elastic.check_every_number(hosts(*[8] * 1000), fewest=1, shards=8000, plan=asked.append)
    assert sum(map(len, asked)) <= 1000
    for count in (1, 2, 3, 7, 999, 1000):
        ranks = {host.slots for host in elastic.spread(hosts(*[8] * 1000), range(count), shards=8000)}
        assert any({host.slots for host in each} == ranks for each in asked), count
    assert {len(each) > 1 for each in asked} == {True, False}


@pytest.mark.parametrize(
    ("recipe", "spans", "message"),
    [
        ({"sync_batchnorm": True}, False, "train.sync_batchnorm: it normalises over all shards"),
        ({}, True, "the loss of ppyoloe_s is divided by a sum over all shards"),
    ],
)
def test_what_needs_all_shards_at_once_is_refused_where_a_rank_computes_several(recipe, spans, message):
    made = Recipe(rule="sgd", groups=(), micro_batch=2, shards=3, **recipe)
    with pytest.raises(SpecError, match=f"{message}.* 2 ranks would compute 3 shards one after the other"):
        elastic.check_passes(made, size=2, model="ppyoloe_s", spans_ranks=spans)
    elastic.check_passes(made, size=3, model="ppyoloe_s", spans_ranks=spans)
