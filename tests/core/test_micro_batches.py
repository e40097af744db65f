"""The largest micro batch that fits, chosen from measurements: which trials are run, and what follows from them."""

from collections.abc import Callable

import pytest

from mtrain.jobs.plan.micro_batch import Choice, fitting, grown


def line(tried: list[int], *, fails: tuple[int, ...] = ()) -> Callable[[int], int | None]:
    """A rank that needs 100 bytes and 10 for each sample."""

    def measure(micro: int) -> int | None:
        tried.append(micro)
        return None if micro in fails else 100 + 10 * micro

    return measure


@pytest.mark.parametrize(
    ("share", "budget", "micro", "trials"),
    [
        (16, 1000, 16, [1, 2, 4, 8, 16]),  # all of it fits
        (16, 260, 16, [1, 2, 4, 8, 16]),  # just so
        (16, 259, 8, [1, 2, 4, 8]),  # 16 is not even tried
        (96, 400, 24, [1, 2, 4, 8, 16]),  # 32 is expected to need 420; 24 lies between and is not measured
        (7, 500, 7, [1, 7]),
        (7, 165, 1, [1, 7]),  # one measurement is no line
        (4, 109, 0, [1]),  # nothing fits
        (1, 110, 1, [1]),
    ],
)
def test_the_largest_divisor_within_the_budget_is_chosen(
    share: int, budget: int, micro: int, trials: list[int]
) -> None:
    tried: list[int] = []
    choice = grown(share, line(tried), budget=lambda: budget)
    assert (choice.micro_batch, tried) == (micro, trials)


def test_a_trial_that_ends_without_a_result_ends_the_search() -> None:
    tried: list[int] = []
    choice = grown(16, line(tried, fails=(8,)), budget=lambda: 1e9)
    assert (choice.micro_batch, choice.too_large, tried) == (4, 8, [1, 2, 4, 8])


def test_statistics_that_a_single_sample_does_not_have_are_passed_over() -> None:
    tried: list[int] = []
    assert grown(8, line(tried, fails=(1,)), budget=lambda: 1e9).micro_batch == 8
    assert grown(8, line(tried, fails=(1, 2)), budget=lambda: 1e9).micro_batch == 0


def test_a_host_with_less_memory_gets_what_fits_there_without_further_trials() -> None:
    found = grown(96, line([]), budget=lambda: 1e9)
    assert found.micro_batch == 96
    assert [fitting(96, found, budget_bytes=limit).micro_batch for limit in (1060, 700, 260, 120, 105)] == [
        96,
        48,
        16,
        2,
        0,
    ]


def test_between_two_measurements_the_line_through_the_largest_two_decides() -> None:
    found = Choice(micro_batch=96, measured={1: 110, 2: 120, 48: 580, 96: 1060})
    assert [fitting(96, found, budget_bytes=limit).micro_batch for limit in (500, 419, 125)] == [32, 24, 2]
