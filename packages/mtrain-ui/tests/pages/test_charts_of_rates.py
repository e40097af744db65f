"""Learning rates of several groups of parameters can be read in the charts of a run."""

import numpy as np

from mtrain_ui.pages.charts import _merge_equal, _rate_charts

X = np.arange(100.0)


def test_a_group_far_above_the_others_has_a_chart_of_its_own():
    bias = (X, np.linspace(0.1, 0.01, 100))
    usual = (X, np.linspace(0.0, 0.01, 100))
    others, high = _rate_charts({"group 0": bias, "group 1": usual, "group 2": usual})
    assert [label for _, label in others.legend] == ["group 1", "group 2"]
    assert [label for _, label in high.legend] == ["group 0"]
    assert "learning rate of group 0" in high.image
    assert {colour for colour, _ in others.legend}.isdisjoint(colour for colour, _ in high.legend)


def test_groups_of_one_size_share_a_chart_and_a_run_without_updates_has_an_empty_one():
    (chart,) = _rate_charts({"group 0": (X, 0.02 + 0 * X), "group 1": (X, 0.01 + 0 * X)})
    assert len(chart.legend) == 2
    assert len(_rate_charts({"learning_rate": (X[:0], X[:0])})) == 1


def test_groups_with_equal_rates_are_one_curve():
    bias = (X, np.linspace(0.1, 0.01, 100))
    usual = (X, np.linspace(0.0, 0.01, 100))
    rates = {"group 0": usual, "group 1": bias, "group 2": (X.copy(), usual[1].copy())}
    assert list(_merge_equal(rates)) == ["group 1", "groups 0, 2"], "the general one is last"
    assert list(_merge_equal({"group 0": bias, "group 1": usual})) == ["group 0", "group 1"]
    others, high = _rate_charts(_merge_equal(rates))
    assert [label for _, label in others.legend] == ["groups 0, 2"]
    assert "learning rate of group 1" in high.image
    assert _merge_equal({"learning_rate": usual}) == {"learning_rate": usual}
