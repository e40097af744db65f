"""Dropout: which elements it drops, the same on every framework and for every number of ranks, and its gradient."""

import sys
from collections.abc import Iterator

import numpy as np
import pytest

from mtrain.backends._kernels import library
from mtrain.core import nn, ops
from mtrain.core.network import noise
from mtrain.core.samples.sampler import rank_share

KEYS = noise.sample_keys(3, 7, np.arange(6))


@pytest.fixture(autouse=True)
def bound(framework) -> None:
    framework.one_thread()


def word(x):
    """The mixing function on one Python integer."""
    for shift, factor in noise.ROUNDS:
        x = ((x ^ (x >> shift)) * factor) % 2**32
    return x ^ (x >> noise.LAST_SHIFT)


def test_the_mixing_function_is_that_of_python_s_integers_and_repeats_no_word():
    words = [0, 1, 2**31 - 1, 2**31, 2**32 - 1, 123456789]
    assert noise.mix(words).tolist() == [word(x) for x in words]
    assert len(np.unique(noise.mix(np.arange(1 << 18, dtype=np.uint32)))) == 1 << 18


def test_one_element_is_what_the_formula_says():
    job = int(np.random.SeedSequence([3, 7]).generate_state(1, np.uint32)[0])
    key = word(word(5) ^ job)
    bits = word(word(41) ^ word(key ^ noise.layer_code("blocks.0"))) % 2**31
    for p in (0.1, 0.5, 0.9):
        assert noise.kept_elements(KEYS, "blocks.0", 50, p)[5, 41] == (bits >= round(p * 2**31))


@pytest.mark.parametrize("p", [0.1, 0.5, 0.75])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("compiled", [True, False])
def test_the_layer_drops_what_the_reference_drops_bit_for_bit(framework, p, dtype, compiled, monkeypatch):
    if compiled:
        assert library.load_dropout().kernels is not None, library.load_dropout().reason
    else:
        monkeypatch.setattr(library, "load_dropout", lambda: library.Loaded(None))
    x, above = np.random.default_rng(0).normal(size=(2, 6, 4, 5, 3)).astype(dtype)
    layer = nn.Dropout(p, name="head")
    variable = framework.variable(x)
    y = layer(variable, framework.tensor(KEYS))
    scale = np.asarray(noise.kept_elements(KEYS, "head", 60, p).reshape(x.shape)).astype(dtype) * np.asarray(
        1 / (1 - p), dtype
    )
    np.testing.assert_array_equal(ops.to_numpy(y), x * scale)
    loss = ops.sum(y * framework.tensor(above))
    np.testing.assert_array_equal(framework.gradients(loss, [variable])[0], above * scale)
    if hasattr(layer, "kept_by_tensors"):
        np.testing.assert_array_equal(
            ops.to_numpy(layer.kept_by_tensors(framework.tensor(KEYS), 60)), noise.kept_elements(KEYS, "head", 60, p)
        )


def test_a_gradient_of_a_gradient_goes_through_the_layer(framework):
    autograd = sys.modules["torch.autograd" if framework.name == "torch" else "paddle"]
    x, weight = framework.variable(np.full((6, 8), 2, np.float32)), framework.variable(np.ones((6, 8), np.float32))
    y = nn.Dropout(0.5, name="a")(x * weight, framework.tensor(KEYS))
    (gradient,) = autograd.grad(ops.sum(y * y * y), [x], create_graph=True)
    # y is 2 x weight where it is kept, so the gradient is 24 x^2 weight^3, and that of its sum 72 x^2 weight^2.
    kept = np.asarray(noise.kept_elements(KEYS, "a", 8, 0.5))
    np.testing.assert_array_equal(framework.gradients(ops.sum(gradient), [weight])[0], 288 * kept)


def test_evaluation_and_a_probability_of_nothing_return_the_input_itself(framework):
    x = framework.tensor(np.ones((2, 3)))
    layer = nn.Dropout(0.5, name="a")
    layer.eval()
    assert layer(x, None) is x
    assert nn.Dropout(0.0, name="a")(x, None) is x


def test_a_missing_or_wrong_key_is_refused(framework):
    x = framework.tensor(np.ones((2, 3)))
    with pytest.raises(ValueError, match=r'batch\.get\("random_key"\)'):
        nn.Dropout(0.5, name="a")(x, None)
    with pytest.raises(ValueError, match=r"\(6,\) keys for an input of shape \(2, 3\)"):
        nn.Dropout(0.5, name="a")(x, framework.tensor(KEYS))


def test_samples_layers_updates_and_seeds_are_independent_and_have_the_right_share():
    count, p = 4000, 0.3
    base = noise.kept_elements(KEYS, "a", count, p)
    assert base.mean() == pytest.approx(0.7, abs=5 * np.sqrt(0.21 / base.size))
    others = {
        "layer": noise.kept_elements(KEYS, "b", count, p),
        "update": noise.kept_elements(noise.sample_keys(3, 8, np.arange(6)), "a", count, p),
        "seed": noise.kept_elements(noise.sample_keys(4, 7, np.arange(6)), "a", count, p),
        "sample": np.roll(base, 1, axis=0),
        "element": np.roll(base, 1, axis=1),
    }
    for name, other in others.items():
        both = (base & other).mean()
        assert both == pytest.approx(0.49, abs=5 * np.sqrt(0.49 * 0.51 / base.size)), name


class Counted:
    """A loader whose micro batches hold their samples."""

    updates_per_epoch = 3

    def __init__(self, shares):
        self.shares = shares

    def micro_batches(self, epoch, start=0) -> Iterator[dict[str, np.ndarray]]:
        for update in range(start, 3):
            yield from ({"index": share} for share in self.shares(epoch, update))

    def close(self):
        pass


@pytest.mark.parametrize(("size", "accumulate"), [(1, 1), (2, 1), (1, 4), (2, 2), (4, 1)])
def test_a_sample_has_the_same_key_whichever_rank_and_micro_batch_has_it(size, accumulate):
    def keys(size, accumulate, start=0):
        found = {}
        for rank in range(size):

            def shares(epoch, update, rank=rank):
                batch = np.arange(8) + 8 * update
                return rank_share(batch, rank=rank, size=size, accumulate=accumulate)

            places = rank_share(np.arange(8), rank=rank, size=size, accumulate=accumulate)
            for batch in noise.KeyedLoader(Counted(shares), places, seed=5).micro_batches(2, start):
                found.update(zip(batch["index"].tolist(), batch["random_key"].tolist(), strict=True))
        return found

    alone = keys(1, 1)
    assert len(alone) == 24
    assert len(set(alone.values())) == 24
    assert keys(size, accumulate) == alone
    assert keys(size, accumulate, start=2) == {index: alone[index] for index in range(16, 24)}
