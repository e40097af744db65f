"""States that a script keeps: what they may hold, and that those of all ranks are those of rank 0."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mtrain.core.interfaces import Progress
from mtrain.errors import ScriptError
from mtrain.rank.script import records as kept
from mtrain.rank.script.records import ScriptRecords
from mtrain.rank.script.settings import PLAIN
from mtrain.spec import config
from tests.core.test_trainer import Ranks


def saved_on(ranks: int, states: Any) -> list[Any]:
    """Return what each rank has saved after the first update, or its error; ``states`` maps a rank to what it keeps by name."""
    spec = config.load(PLAIN, environ={}).spec

    def save(rank: int, collective: Any) -> Any:
        written: list[Any] = []
        training = SimpleNamespace(save=lambda state, progress, *, content, **rest: written.append(content))
        objects = {name: SimpleNamespace(state_dict=lambda state=state: state) for name, state in states(rank).items()}
        records: Any = SimpleNamespace(
            _kept=objects, _rank=SimpleNamespace(collective=collective), training=training,
            _samples=None, shards=1, _best={}, _last={}, further={}, _names=[],
        )  # fmt: skip
        ScriptRecords.save(records, None, Progress(update=1), score=None, why="due", spec=spec, stream=None)
        return written[0]["extra"]["kept"]

    return Ranks(ranks).run(save)


HIDDEN = np.ones((2, 3), np.float32)


@pytest.mark.parametrize(
    "state",
    [
        lambda rank: {"hidden": HIDDEN + (rank == 2)},
        lambda rank: {"hidden": np.where(np.arange(3) == rank - 1, np.float32(1 + 2**-23), HIDDEN)},
        lambda rank: {"hidden": HIDDEN.astype(np.float64 if rank == 2 else np.float32)},
        lambda rank: [1, (2, {"n": 0.0 if rank < 2 else -0.0})],
        lambda rank: "rank 2" if rank == 2 else "a rank",
    ],
)
def test_a_state_that_differs_between_ranks_is_refused_on_all_of_them_before_anything_is_written(state):
    errors = saved_on(3, lambda rank: {"same": {"n": 1}, "carried": state(rank)})
    assert len({str(error) for error in errors}) == 1
    assert all(isinstance(error, ScriptError) for error in errors)
    assert "state of 'carried' on rank " in str(errors[0])
    assert str(errors[0]).count(". ") == 0, "one sentence"


def test_what_rank_0_does_not_keep_is_refused():
    errors = saved_on(3, lambda rank: {"own": 1} if rank else {})
    assert {str(error).partition(", but")[0] for error in errors} == {
        "session.keep: the state of 'own' on rank 1 is kept, and rank 0 keeps none"
    }


def test_equal_states_are_saved_and_so_is_what_rank_0_alone_keeps():
    alike = {"hidden": HIDDEN, "best": float("nan"), "seen": [1, "two"]}
    saved = saved_on(3, lambda rank: {"same": alike} | ({"of rank 0": 1} if rank == 0 else {}))
    assert [set(states) for states in saved] == [{"same", "of rank 0"}, {"same"}, {"same"}]
    assert saved[0]["same"] == kept.as_plain(alike, name="same")


@pytest.mark.parametrize(
    ("value", "kind"), [({1}, "set"), (b"raw", "bytes"), (1j, "complex"), (object(), "object"), ([{"a": {2}}], "set")]
)
def test_a_state_of_something_else_is_refused_with_a_list_of_what_is_taken(value, kind):
    records: Any = SimpleNamespace(_kept={}, _saved=None)
    thing = SimpleNamespace(state_dict=lambda: {"x": value}, load_state_dict=None)
    with pytest.raises(
        ScriptError,
        match=rf"holds a {kind}; expected numbers, text, None, arrays, tensors, and lists, tuples and dicts",
    ):
        ScriptRecords.keep(records, "thing", thing)
    assert not records._kept
