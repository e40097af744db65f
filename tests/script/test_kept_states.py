"""What a script keeps: of which types, equal on all ranks, each rank's own, or rows of samples; the saved state on any number of ranks."""

import json
import random
from collections import OrderedDict
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mtrain.core.collective import OneRank
from mtrain.core.samples.sampler import Shares
from mtrain.errors import CheckpointError, ScriptError
from mtrain.rank.script import kept
from mtrain.rank.script.kept import KeptObjects
from tests.core.test_trainer import Ranks

HIDDEN = np.ones((2, 3), np.float32)
BATCH = 10


def shares_of(rank: int, size: int, *, shards: int | None = None, rounds: int = 1) -> Shares:
    return Shares(rank=rank, size=size, shards=shards or size, rounds=rounds)


def saved_on(
    size: int, states: Any, *, rows: int | None = None, samples: int = BATCH, warnings: list | None = None, **of: Any
) -> list[Any]:
    """Return what each rank saves, as a checkpoint holds it, or its error; ``states`` maps a rank to what it keeps by name."""

    def save(rank: int, collective: Any) -> Any:
        seen: list[str] = []
        objects = KeptObjects(collective, None, np.asarray, warn=lambda message: seen.append(message))
        objects.samples = samples
        for name, state in states(rank).items():
            thing = SimpleNamespace(state_dict=lambda state=state: state, load_state_dict=None)
            objects.keep(name, thing, rows=rows, shares=shares_of(rank, size, **of))
        result = [json.loads(json.dumps(objects.states())) for _ in range(2)][-1]
        if warnings is not None and rank == 0:
            warnings.extend(seen)
        return result

    return Ranks(size).run(save)


def restored_on(size: int, saved: Any, name: str, *, rows: int | None = None, **of: Any) -> list[Any]:
    """Return what each rank gets of a checkpoint, or its error."""

    def restore(rank: int, collective: Any) -> Any:
        got: list[Any] = []
        thing = SimpleNamespace(state_dict=lambda: None, load_state_dict=got.append)
        objects = KeptObjects(collective, saved, np.asarray, warn=print)
        objects.keep(name, thing, rows=rows, shares=shares_of(rank, size, **of))
        return got[0]

    return Ranks(size).run(restore)


# ------------------------------------------------------------------------------------------------------ of each rank
@pytest.mark.parametrize(
    "state",
    [
        lambda rank: {"hidden": HIDDEN + (rank == 2)},
        lambda rank: {"hidden": np.where(np.arange(3) == rank - 1, np.float32(1 + 2**-23), HIDDEN)},
        lambda rank: {"hidden": HIDDEN.astype(np.float64 if rank == 2 else np.float32)},
        lambda rank: [1, (2, {"n": 0.0 if rank < 2 else -0.0})],
        lambda rank: "rank 2" if rank == 2 else "a rank",
        lambda rank: b"rank 2" if rank == 2 else b"a rank",
    ],
)
def test_each_rank_gets_its_own_state_back_on_as_many_ranks_and_is_refused_on_others(state):
    warnings: list[str] = []
    saved = saved_on(3, lambda rank: {"same": {"n": 1}, "carried": state(rank)}, warnings=warnings)[0]
    assert saved["same"] == kept.as_plain({"n": 1}, name="same"), "what is equal is saved once"
    assert [kept.as_plain(own, name="x") for own in restored_on(3, saved, "carried")] == [
        kept.as_plain(state(rank), name="x") for rank in range(3)
    ]
    assert len(warnings) == 1, "said once, and not at each save"
    assert "'carried' differs between ranks" in warnings[0]
    for size in (1, 2, 4):
        for error in restored_on(size, saved, "carried"):
            assert isinstance(error, CheckpointError)
            assert f"each of 3 ranks, which differ, and this job has {size} ranks; resume it with" in str(error)
        assert restored_on(size, saved, "same") == [{"n": 1}] * size


def test_what_rank_0_does_not_keep_is_refused():
    errors = saved_on(3, lambda rank: {"own": 1} if rank else {})
    assert {str(error).partition(";")[0] for error in errors} == {
        "session.keep: the state of 'own' on rank 1 is kept, and rank 0 keeps none"
    }


def test_equal_states_are_saved_once_and_so_is_what_rank_0_alone_keeps():
    alike = {"hidden": HIDDEN, "best": float("nan"), "seen": [1, "two"]}
    warnings: list[str] = []
    saved = saved_on(3, lambda rank: {"same": alike} | ({"of rank 0": 1} if rank == 0 else {}), warnings=warnings)
    assert [set(states) for states in saved] == [{"same", "of rank 0"}, {"same"}, {"same"}]
    assert json.dumps(saved[0]["same"]) == json.dumps(kept.as_plain(alike, name="same"))
    assert not warnings


def test_a_state_that_cannot_be_stored_on_one_rank_is_an_error_on_all():
    def save(rank: int, collective: Any) -> Any:
        objects, state = KeptObjects(collective, None, np.asarray, warn=print), {"value": 1}
        objects.keep("own", state)
        state["value"] = object() if rank == 1 else 2
        return objects.states()

    errors = Ranks(3).run(save)
    assert [str(error).partition(":")[0] for error in errors] == ["session.keep('own')"] * 3


# ---------------------------------------------------------------------------------------------------- rows of samples
@pytest.mark.parametrize("rows", [(0, None), (None, 0), (0, 1), (0, "no such name")], ids=str)
def test_rows_that_not_all_ranks_keep_alike_are_one_error_on_all(rows):
    def save(rank: int, collective: Any) -> Any:
        objects = KeptObjects(collective, None, np.asarray, warn=print)
        if rows[rank] != "no such name":
            thing = SimpleNamespace(state_dict=lambda: np.ones((5, 5)), load_state_dict=None)
            objects.keep("hidden", thing, rows=rows[rank], shares=shares_of(rank, 2))
        return objects.states()

    for error in Ranks(2).run(save):
        assert isinstance(error, ScriptError)
        assert f"session.keep('hidden'): rows={rows[0]} on rank 0" in str(error)


WHOLE = np.arange(2 * BATCH * 3, dtype=np.float64).reshape(2, BATCH, 3)
LAYOUTS = (
    {"size": 1}, {"size": 2}, {"size": 3}, {"size": 4}, {"size": 1, "rounds": 2},
    {"size": 2, "rounds": 2}, {"size": 2, "shards": 3}, {"size": 1, "shards": 3}, {"size": 7}, {"size": 12},
)  # fmt: skip


def of_samples(rank: int, size: int, length: int = BATCH, **of: int) -> np.ndarray:
    """Return the rows of a rank, taken as it gets its samples."""
    return np.concatenate([WHOLE[:, part] for part in shares_of(rank, size, **of).spread(np.arange(length))], axis=1)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_rows_of_samples_are_one_array_that_any_number_of_ranks_divides(layout):
    saved = saved_on(
        states=lambda rank: {"rows": {"hidden": (of_samples(rank, **layout), float("nan")), "n": 4}}, rows=1, **layout
    )[0]
    assert saved["rows"]["rows"] == 1
    whole = kept.from_plain(saved["rows"]["whole"], np.asarray)
    assert np.array_equal(whole["hidden"][0], WHOLE), "in the order of the global batch"
    for other in LAYOUTS:
        for rank, own in enumerate(restored_on(saved=saved, name="rows", rows=1, **other)):
            assert np.array_equal(own["hidden"][0], of_samples(rank, **other)), other
            assert own["n"] == 4


def test_a_rank_without_a_sample_of_its_own_adds_no_row():
    saved = saved_on(3, lambda rank: {"x": of_samples(rank, 3, length=2)}, rows=1, samples=2)[0]
    assert np.array_equal(kept.from_plain(saved["x"]["whole"], np.asarray), WHOLE[:, :2])


def test_rows_that_are_not_there_yet_are_kept():
    saved = saved_on(2, lambda rank: {"x": {"hidden": None}}, rows=0)[0]
    assert restored_on(3, saved, "x", rows=0) == [{"hidden": None}] * 3


@pytest.mark.parametrize(
    ("state", "sentence"),
    [
        (lambda rank: np.ones((3 + 2 * rank, 2)), "the ranks have 3, 5 rows; expected as many as each has samples"),
        (lambda rank: {"x": np.ones((5, 2)), "rank": rank}, "differ between ranks in more than their rows"),
        (lambda rank: np.ones((5, 2 + rank)), "differ between ranks in more than their rows"),
        (lambda rank: [None, np.ones((5, 2))][rank], "the ranks have None, 5 rows"),
        (lambda rank: [np.ones((5, 2)), np.ones((4, 2))], r"shapes \(5, 2\), \(4, 2\) given; expected as many rows along axis 0"),
        (lambda rank: [np.ones((5, 2)), np.float32(1)], r"shapes \(5, 2\), \(\) given"),
    ],
)  # fmt: skip
def test_rows_that_are_not_those_of_samples_are_refused_on_every_rank(state, sentence):
    for error in saved_on(2, lambda rank: {"x": state(rank)}, rows=0):
        with pytest.raises(ScriptError, match=sentence):
            raise error


def test_rows_and_a_checkpoint_without_them_are_refused():
    plain = saved_on(2, lambda rank: {"x": {"n": 1}})[0]
    rows = saved_on(2, lambda rank: {"x": np.ones((5, 2))}, rows=0)[0]
    assert "rows=0 given, and the checkpoint was written with rows=None" in str(restored_on(2, plain, "x", rows=0)[0])
    for given in (None, 1):
        assert "was written with rows=0" in str(restored_on(2, rows, "x", rows=given)[0])


@pytest.mark.parametrize("rows", [True, -1, "0", 1.0])
def test_an_axis_that_is_none_is_refused(rows):
    with pytest.raises(ScriptError, match="expected the axis of the samples"):
        KeptObjects(OneRank(), None, np.asarray, warn=print).keep("x", {}, rows=rows)


def test_rows_before_a_model_is_prepared_are_refused():
    with pytest.raises(ScriptError, match=r"call it after session\.prepare"):
        KeptObjects(OneRank(), None, np.asarray, warn=print).keep("x", {}, rows=0)


# --------------------------------------------------------------------------------------------------------------- types
@pytest.mark.parametrize(
    ("value", "kind"),
    [
        ({1}, "set"),
        (1j, "complex"),
        (object(), "object"),
        ([{"a": {2}}], "set"),
        (np.array([(1, 2.0)], "i4,f8"), "ndarray"),
        (random.SystemRandom(), "SystemRandom"),
    ],
)
def test_a_state_of_something_else_is_refused_with_a_list_of_what_is_taken(value, kind):
    objects = KeptObjects(OneRank(), None, np.asarray, warn=print)
    with pytest.raises(
        ScriptError, match=rf"holds a {kind}; expected numbers, text, bytes, None, arrays, tensors, generators"
    ):
        objects.keep("thing", SimpleNamespace(state_dict=lambda: {"x": value}, load_state_dict=None))
    assert not objects.states()


@pytest.mark.parametrize("thing", [3, "text", b"raw", (1, 2), np.float64(1), object(), random])
def test_an_object_that_cannot_be_restored_is_refused_with_a_list_of_what_can(thing):
    with pytest.raises(ScriptError, match=r"given; expected an object with state_dict\(\) .* a dict, a list, an array"):
        KeptObjects(OneRank(), None, np.asarray, warn=print).keep("thing", thing)


def gone_on(first: Any, second: Any) -> Any:
    """Save ``first``, restore it into ``second``, and return that."""
    one = KeptObjects(OneRank(), None, np.asarray, warn=print)
    one.keep("it", first)
    KeptObjects(OneRank(), json.loads(json.dumps(one.states())), np.asarray, warn=print).keep("it", second)
    return second


def test_plain_containers_and_arrays_are_restored_in_place():
    assert gone_on({"a": [1, (b"\0raw", None)]}, {"b": 3}) == {"a": [1, (b"\0raw", None)]}
    assert gone_on(OrderedDict(a=1), OrderedDict(b=2, c=3)) == OrderedDict(a=1)
    assert gone_on([1, 2], [3]) == [1, 2]
    assert np.array_equal(gone_on(HIDDEN * 3, np.zeros((2, 3), np.float32)), HIDDEN * 3)
    assert gone_on(np.array(7.0), np.array(1.0)) == 7.0
    with pytest.raises(CheckpointError, match=r"a ndarray \(2, 2\) given, and the checkpoint has a ndarray \(2, 3\)"):
        gone_on(HIDDEN, np.zeros((2, 2), np.float32))
    with pytest.raises(CheckpointError, match="a list given, and the checkpoint has a dict"):
        gone_on({}, [])


GENERATORS: dict[str, Any] = {
    "random": (random.Random, lambda g: [g.random(), g.gauss(0, 1)]),
    "numpy": (np.random.default_rng, lambda g: g.normal(size=3).tolist()),
    **{
        kind: (lambda seed, kind=kind: np.random.Generator(getattr(np.random, kind)(seed)), lambda g: g.integers(9, size=5).tolist())
        for kind in sorted(kept.BIT_GENERATORS)
    },
    "RandomState": (np.random.RandomState, lambda g: g.normal(size=3).tolist()),
}  # fmt: skip


@pytest.mark.parametrize("kind", GENERATORS)
def test_generators_go_on_in_place_alone_or_inside_of_a_state(kind):
    make, draw = GENERATORS[kind]
    one, other = make(1), make(2)
    draw(one)
    gone_on(one, other)
    later = make(3)
    gone_on({"of": [one]}, {"of": [later]})
    # An object that holds it elsewhere, such as a data set, has the same generator.
    owner = SimpleNamespace(generator=make(4))
    owner.state_dict, owner.load_state_dict = lambda: {"g": owner.generator}, lambda state: None
    gone_on(SimpleNamespace(state_dict=lambda: {"g": one}, load_state_dict=None), owner)
    fresh: dict[str, Any] = gone_on({"g": one}, {})
    expected = draw(one)
    assert draw(other) == expected
    assert draw(later) == expected
    assert draw(owner.generator) == expected
    assert draw(fresh["g"]) == expected


def test_a_generator_of_another_kind_is_refused():
    with pytest.raises(CheckpointError, match="a generator of another kind"):
        gone_on(np.random.default_rng(1), np.random.Generator(np.random.MT19937(1)))


def test_tensors_and_generators_of_torch_come_back_as_they_were():
    torch = pytest.importorskip("torch")
    one, other = torch.Generator().manual_seed(1), torch.Generator().manual_seed(2)
    torch.rand(3, generator=one)
    gone_on(one, other)
    assert torch.equal(torch.rand(3, generator=one), torch.rand(3, generator=other))
    objects = KeptObjects(OneRank(), None, torch.from_numpy, warn=print)
    leaf = torch.full((2, 3), 0.5, requires_grad=True)
    half = torch.tensor([1.5, -2.0], dtype=torch.bfloat16)
    objects.keep("leaf", leaf)
    objects.keep("half", {"x": half})
    again = KeptObjects(OneRank(), objects.states(), torch.from_numpy, warn=print)
    back, dictionary = torch.zeros(2, 3, requires_grad=True), {}
    again.keep("leaf", back)
    again.keep("half", dictionary)
    assert torch.equal(back, leaf)
    assert dictionary["x"].dtype == torch.bfloat16
    assert torch.equal(dictionary["x"], half)
