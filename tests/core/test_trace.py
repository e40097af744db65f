"""Digests, sketches and traffic of a rank."""

import hashlib
import socket

import numpy as np

from mtrain.core.collective import OneRank
from mtrain.core.interfaces import State
from mtrain.core.overriding import override
from mtrain.core.ranks.traffic import sent_bytes
from mtrain.core.state.trace import SIZE, Tracer, digest_of, parts, sketch_of
from mtrain_trace import mixing


def arrays(seed: int, scale: float = 1.0) -> dict:
    generator = np.random.default_rng(seed)
    return {
        name: (scale * generator.standard_normal(shape)).astype("f4") for name, shape in (("a", (100, 33)), ("b", (7,)))
    }


def test_the_sketch_of_a_sum_is_the_sum_of_the_sketches():
    one, other = arrays(1), arrays(2)
    both = {name: one[name].astype("f8") + 3 * other[name].astype("f8") for name in one}
    assert np.allclose(sketch_of(both), sketch_of(one) + 3 * sketch_of(other), rtol=1e-12, atol=1e-12)


def test_the_length_of_a_sketch_is_about_that_of_the_arrays():
    ratios = []
    for seed in range(20):
        actual = arrays(seed)
        length = np.sqrt(sum(float((x.astype("f8") ** 2).sum()) for x in actual.values()))
        ratios.append(np.linalg.norm(sketch_of(actual)) / length)
    assert abs(np.mean(ratios) - 1) < 0.15
    assert np.std(ratios) < 2 / np.sqrt(2 * SIZE)


def test_a_single_changed_element_is_seen():
    before, behind = arrays(0), arrays(0)
    behind["a"][50, 20] += 1e-3
    change = sketch_of(behind) - sketch_of(before)
    assert np.isclose(np.abs(change).sum(), 1e-3, rtol=1e-2)
    assert (np.abs(change) > 1e-6).sum() == 1


def test_whole_numbers_are_in_no_sketch_but_in_the_digest():
    states = [State(weights={"count": np.array(n)}) for n in (1, 2)]
    looks = [Tracer(OneRank(), [], lambda state=state: state, accumulate=1).look() for state in states]
    assert looks[0]["sketches"] == looks[1]["sketches"] == {"buffers": [0.0] * SIZE}
    assert looks[0]["digests"] != looks[1]["digests"]


def test_parts_follow_the_groups_of_the_recipe():
    state = State(
        weights={"w": np.ones(2), "b": np.ones(1), "mean": np.zeros(1), "frozen": np.ones(3)},
        ema={"w": np.ones(2)},
        moments={"momentum/w": np.ones(2), "momentum/b": np.ones(1)},
    )
    actual = parts(state, [["b"], ["w"], []])
    assert {name: sorted(held) for name, held in actual.items()} == {
        "weights/0": ["b"], "weights/1": ["w"], "momentum/0": ["b"], "momentum/1": ["w"], "buffers": ["frozen", "mean"], "ema": ["w"],
    }  # fmt: skip


class Batches:
    """A loader of three updates of two micro batches."""

    updates_per_epoch = 3

    def __init__(self, offset: int = 0) -> None:
        self.offset = offset
        self.closed = False

    def micro_batches(self, epoch: int, start: int = 0):
        for i in range(2 * start, 6):
            yield {"x": np.array([epoch, i + self.offset])}

    def close(self) -> None:
        self.closed = True


def given(loader: Batches, *, ahead: int) -> list[str]:
    """Digests of the samples of three updates, where micro batches are taken ``ahead`` of use; a second pass is cut short."""
    tracer = Tracer(OneRank(), [], State, accumulate=2)
    watched = tracer.watch(loader)
    results = []
    for epoch, updates in ((0, 3), (1, 1)):
        batches, taken = watched.micro_batches(epoch), 0
        for update in range(updates):
            while taken < min(2 * (update + 1) + ahead, 6):
                next(batches)
                taken += 1
            results.append(tracer.after_update()["samples"])
    watched.close()
    assert loader.closed
    return results


def test_samples_are_those_of_the_update_however_far_ahead_they_are_taken():
    assert given(Batches(), ahead=0) == given(Batches(), ahead=1) == given(Batches(), ahead=4)
    assert len(set(given(Batches(), ahead=0))) == 4
    assert given(Batches(), ahead=0) != given(Batches(offset=1), ahead=0)


def test_what_this_process_sends_is_counted():
    with socket.socket() as door:
        door.bind(("127.0.0.1", 0))
        door.listen()
        with socket.create_connection(door.getsockname()) as here, door.accept()[0] as there:
            before = sent_bytes()
            here.sendall(b"x" * 50_000)
            left = 50_000
            while left:
                left -= len(there.recv(left))
            there.sendall(b"y" * 1_000)
            left = 1_000
            while left:
                left -= len(here.recv(left))
            sent = sent_bytes()
    assert sent - before == 51_000


def test_moments_of_one_weight_may_have_different_sizes():
    """As those of an optimizer of torch: `step` is a single number."""
    assert sketch_of({"weight": np.ones((4, 40), "f4")}).shape == sketch_of({"weight": np.ones((), "f4")}).shape


def test_the_digest_of_a_job_is_that_which_the_recorder_of_foreign_scripts_makes():
    held = arrays(3)
    assert digest_of(held) == f"{sum(mixing.digest(array, name) for name, array in held.items()) % 2**64:016x}"
    changed = {**held, "b": np.nextafter(held["b"], np.float32(9))}
    assert digest_of(changed) != digest_of(held) == digest_of(dict(reversed(held.items())))


class Four(OneRank):
    """Four ranks, of which two in a row have the same samples."""

    @override
    def all_gather(self, value):
        return [value, value, [f"{digest}-other" for digest in value], [f"{digest}-other" for digest in value]]


class Two(OneRank):
    @override
    def all_gather(self, value):
        return [value, [f"{digest}-other" for digest in value]]


def test_ranks_with_the_same_samples_count_once():
    found = []
    for collective, readers in ((Two(), None), (Four(), (0, 2)), (Four(), None)):
        tracer = Tracer(collective, [], State, accumulate=1, readers=readers)
        tracer.saw({"x": np.array([1])})
        found.append(tracer.after_update()["samples"])
    assert found[0] == found[1] != found[2]


def test_what_predictions_decide_is_recorded_for_each_sample_in_the_order_of_the_update():
    from mtrain.backends._torch import nn, ops
    from mtrain.core.binding import bind
    from tests.core.test_trainer import Ranks

    bind(nn, ops)

    def traced(rank, collective):
        decided = []
        tracer = Tracer(collective, [], State, accumulate=2)
        tracer.watch(Batches(), decided=decided)
        for turn in range(2):
            tracer.saw({"x": np.ones(1)})
            decided.append(ops.asarray(np.array([[rank, turn, row] for row in range(2)], np.float32), like=ops_like))
        found = tracer.after_update()["decided"]
        assert not decided, "the next update begins anew"
        tracer.saw({"x": np.ones(1)})
        tracer.saw({"x": np.ones(1)})
        assert "decided" not in tracer.after_update()
        return found

    import torch

    ops_like = torch.zeros(1)
    one, other = Ranks(2).run(traced)
    assert one == other
    samples = [np.array([rank, turn, row], np.float32) for turn in range(2) for rank in range(2) for row in range(2)]
    assert one == [hashlib.sha256(sample.tobytes()).hexdigest()[:8] for sample in samples]
