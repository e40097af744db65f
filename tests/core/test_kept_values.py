"""What a script keeps comes back from a checkpoint as it was: every number, text and array, of any nesting."""

import json
import math
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from mtrain.core.checkpoint import format, sharing
from mtrain.core.collective import OneRank
from mtrain.core.interfaces import Progress, State
from mtrain.rank.script import kept

NUMBERS = (
    math.inf, -math.inf, math.nan, -0.0, 0.0, 5e-324, 1.7976931348623157e308, 0.1 + 0.2, 2**53 + 1, -(2**63), 2**64, 10**4000,
    True, False,
)  # fmt: skip
TEXTS = ("", "inf", "nan", "__float__", "\0", "Grüße, 世界", "\udce9", "\\ud800", "line\nline")
scalars = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.sampled_from(NUMBERS), st.sampled_from(TEXTS)
)
keys = st.one_of(scalars.filter(lambda value: value == value), st.tuples(st.integers(), st.text()))
arrays = st.sampled_from(
    [
        np.array([math.inf, -math.inf, math.nan, -0.0], np.float32),
        np.array(7, np.int64),
        np.array([[True, False]]),
        np.zeros((0, 3), np.float16),
        np.arange(6, dtype=">f8").reshape(2, 3).T,
        np.float32("inf"),
        np.int64(-(2**63)),
        np.uint64(2**64 - 1),
        np.complex64(1 - 2j),
        np.array(["a", "bc"]),
    ]
)
states = st.recursive(
    st.one_of(scalars, arrays),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.tuples(inner, inner),
        st.dictionaries(keys, inner, max_size=4),
        st.dictionaries(st.sampled_from(["__float__", "__int__", "dict", "array", "list", "tuple"]), inner, max_size=3),
    ),
    max_leaves=12,
)


def same(a: Any, b: Any) -> bool:
    """Return whether two values are of one type and have the same bits, nan included."""
    if type(a) is not type(b):
        return False
    if isinstance(a, np.ndarray | np.generic):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, float):
        return struct.pack("d", a) == struct.pack("d", b) or (math.isnan(a) and math.isnan(b))
    if isinstance(a, dict):
        return len(a) == len(b) and all(same(x, y) and same(a[x], b[y]) for x, y in zip(a, b, strict=True))
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def saved_with(extra: dict[str, Any], spec: dict[str, Any] | None = None) -> format.Saved:
    state = State(weights={"w": np.ones(2, np.float32)}, ema={}, moments={}, counters={"loss_scale": -math.inf})
    return format.Saved(state=state, progress=Progress(update=1), spec=spec or {}, meta={"extra": extra})


def restored(state: Any, folder: Path) -> Any:
    """Return what a checkpoint in ``folder`` returns of a kept state."""
    format.write(folder, saved_with({"kept": {"own": kept.as_plain(state, name="own")}}))
    return kept.from_plain(format.load(folder).meta["extra"]["kept"]["own"], np.asarray)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(state=states)
@example(state=[*NUMBERS, 10**5000, -(10**5000)])
@example(state=dict.fromkeys(NUMBERS[:2], math.nan))
@example(state=list(TEXTS))
@example(state={"__float__": "inf", "x": {"__int__": "0x1"}, "y": [{"__float__": math.inf}]})
@example(state=[np.float32("inf"), np.bool_(True)])
def test_a_kept_state_comes_back_as_it_was(state: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    assert same(restored(state, tmp_path_factory.mktemp("kept") / "step-1"), state)


def test_a_scheduler_that_has_seen_no_loss_is_resumed(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")

    def scheduler() -> Any:
        return torch.optim.lr_scheduler.ReduceLROnPlateau(torch.optim.SGD([torch.zeros(1)], lr=1.0), patience=0)

    first, second = scheduler(), scheduler()
    assert first.state_dict()["best"] == math.inf
    second.load_state_dict(restored(first.state_dict(), tmp_path / "step-1"))
    second.step(3.0)
    assert second.best == 3.0


@pytest.mark.parametrize("value", [math.inf, -math.inf, 10**5000, math.nan], ids=["inf", "-inf", "huge", "nan"])
def test_results_counters_and_specs_hold_every_number(value: Any, tmp_path: Path) -> None:
    """The second place of each: numbers of a script's metrics, options of a model, the counters of a state."""
    whole = saved_with({"results": {"best": {"loss": value, "update": 3}}}, spec={"model": {"options": {"x": [value]}}})
    format.write(tmp_path / "a", whole)
    for read in (format.load(tmp_path / "a"), sharing._send(format.load(tmp_path / "a"), OneRank())):
        assert same(read.meta["extra"], whole.meta["extra"])
        assert same(read.spec, whole.spec)
        assert read.state.counters == {"loss_scale": -math.inf}
    assert same(format.read_description(tmp_path / "a")["extra"], whole.meta["extra"])
    assert format.progress_of(tmp_path / "a") == whole.progress


def test_a_score_without_end_is_read_from_the_manifest(tmp_path: Path) -> None:
    whole = saved_with({})
    whole.meta = {"score": math.inf}
    format.write(tmp_path / "a", whole)
    assert format.score_in(format.manifest_of(tmp_path / "a")) == math.inf


def test_a_checkpoint_whose_infinities_are_text_is_read(tmp_path: Path) -> None:
    """As they were written before: the progress and the counters of such a checkpoint hold texts."""
    format.write(tmp_path / "a", saved_with({}))
    body = json.loads((tmp_path / "a" / "state.json").read_text())
    body["progress"]["best"], body["counters"] = "-inf", {"loss_scale": "inf"}
    (tmp_path / "a" / "state.json").write_text(json.dumps(body))
    assert format.progress_of(tmp_path / "a").best == -math.inf
