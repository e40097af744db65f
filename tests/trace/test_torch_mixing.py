"""Digests prove equal bits over any division of an array; sketches estimate how far two arrays are apart."""

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from mtrain_trace import mixing, torch_arrays, torch_facts, torch_mixing

ARRAYS = [
    np.random.default_rng(0).standard_normal(200_003).astype(np.float32),
    np.random.default_rng(1).standard_normal((7, 11)),
    np.arange(-5, 70_000, dtype=np.int32),
    np.random.default_rng(2).standard_normal(33).astype(np.float16),
    np.zeros(0, np.float32),
]


@pytest.mark.parametrize("array", ARRAYS, ids=lambda array: f"{array.dtype}-{array.size}")
def test_torch_and_numpy_agree(array: np.ndarray) -> None:
    rows = measured([("w", torch.from_numpy(array), 0)])
    digest, square, sketch = rows["w"]
    assert int(digest, 16) == mixing.digest(array, "w")
    assert sketch == pytest.approx(mixing.sketch(array, "w"), rel=1e-8, abs=1e-9)
    assert square == pytest.approx(float((array.astype(np.float64) ** 2).sum()), rel=1e-14)


def measured(pieces: list[tuple[str, torch.Tensor, int]], *, one_by_one: bool = True) -> dict[str, list]:
    return torch_arrays.Meter().measure("weights", pieces, one_by_one=one_by_one).read()


@pytest.mark.parametrize("cuts", [(1,), (65_536,), (65_535, 131_073), (17, 18, 199_999)])
def test_the_digests_and_sketches_of_parts_add_up_to_those_of_the_whole(cuts: tuple[int, ...]) -> None:
    array, bounds = ARRAYS[0], (0, *cuts, ARRAYS[0].size)
    parts = [(array[a:b], a) for a, b in itertools.pairwise(bounds)]
    assert sum(mixing.digest(part, "w", start=start) for part, start in parts) & mixing.MASK == mixing.digest(
        array, "w"
    )
    total = sum(mixing.sketch(part, "w", start=start) for part, start in parts)
    assert total == pytest.approx(mixing.sketch(array, "w"), abs=1e-9)
    (digest, square, sketch) = measured([("w", torch.from_numpy(part), start) for part, start in parts])["w"]
    assert int(digest, 16) == mixing.digest(array, "w")
    assert sketch == pytest.approx(mixing.sketch(array, "w"), rel=1e-8, abs=1e-9)
    assert square == pytest.approx(float((array.astype(np.float64) ** 2).sum()), rel=1e-14)


def test_one_bit_an_exchange_of_two_elements_and_another_name_change_the_digest() -> None:
    array = ARRAYS[0].copy()
    before = mixing.digest(array, "w")
    assert mixing.digest(array, "v") != before
    array[123_456] = np.nextafter(array[123_456], np.float32(9))
    assert mixing.digest(array, "w") != before
    swapped = ARRAYS[0].copy()
    swapped[[5, 70_000]] = swapped[[70_000, 5]]
    assert mixing.digest(swapped, "w") != before
    apart = ARRAYS[0].copy()
    places = [5, 5 + mixing.PERIOD]  # in two periods, whose coefficients are alike up to a factor
    apart[places] = apart[places[::-1]]
    assert mixing.digest(apart, "w") != before
    moved = np.concatenate([ARRAYS[0][mixing.PERIOD :], ARRAYS[0][: mixing.PERIOD]])
    assert mixing.digest(moved, "w") != before


def test_sketches_estimate_distances() -> None:
    generator = np.random.default_rng(3)
    for size in (5_000, 150_000):
        estimates = []
        for turn in range(40):
            a = generator.standard_normal(size)
            b = a + 1e-3 * generator.standard_normal(size)
            true = float(np.linalg.norm(a - b))
            estimates.append(mixing.distance(mixing.sketch(a, f"w{turn}"), mixing.sketch(b, f"w{turn}")) / true)
        assert np.mean(estimates) == pytest.approx(1, abs=0.1)
        assert np.std(estimates) < 0.3


def test_rows_are_digested_one_by_one() -> None:
    images = torch.rand(6, 3, 8, 8)
    digests = torch_mixing.rows(images, 1)
    assert len(set(digests.tolist())) == 6
    order = torch.tensor([3, 1, 5, 0, 2, 4])
    assert torch_mixing.rows(images[order], 1).tolist() == digests[order].tolist()
    turned = images.flip(1)  # the same numbers, other places
    assert not set(torch_mixing.rows(turned, 1).tolist()) & set(digests.tolist())
    nhwc = images.contiguous(memory_format=torch.channels_last)
    assert torch_mixing.rows(nhwc, 1).tolist() == digests.tolist()
    labels = torch.tensor([1, 2, 1])
    assert torch_mixing.rows(labels, 1).tolist()[0] == torch_mixing.rows(labels, 1).tolist()[2]
    assert torch_mixing.rows(labels.to(torch.int32), 1).tolist() == torch_mixing.rows(labels, 1).tolist()


@pytest.mark.parametrize("kind", [np.float32, np.float64, np.float16, np.int64, np.bool_])
def test_the_digest_of_a_sample_does_not_depend_on_where_it_lies_nor_on_the_framework(kind: type) -> None:
    samples = (np.random.default_rng(4).standard_normal((5, 12)) * 9).astype(kind)
    plain = torch.from_numpy(samples)
    wide = torch.from_numpy(np.concatenate([samples, samples], axis=1))[:, :12]
    odd = torch.from_numpy(np.concatenate([np.zeros(1, kind), samples.reshape(-1)]))[1:].view(5, 12)
    turned = torch.from_numpy(np.ascontiguousarray(samples.T)).T
    expected = mixing.rows(samples, 1).tolist()
    for tensor in (plain, wide, odd, turned):
        assert torch_mixing.rows(tensor, 1).tolist() == expected


@pytest.mark.parametrize("kind", [np.float16, np.float32, np.float64])
def test_flipped_signs_do_not_cancel_out(kind: type) -> None:
    array = np.random.default_rng(5).standard_normal(64).astype(kind)
    turned = array.copy()
    turned[[3, 9]] *= -1
    for other in (-array, turned):
        assert mixing.digest(array, "w") != mixing.digest(other, "w")
        assert mixing.rows(array[None], 1) != mixing.rows(other[None], 1)
        assert torch_mixing.rows(torch.from_numpy(other[None]), 1).tolist() == mixing.rows(other[None], 1).tolist()


def test_the_format_that_a_policy_of_fsdp_casts_to_is_known(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        model = torch.nn.Linear(2, 2)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        fully_shard(model, mesh=dist.init_device_mesh("cpu", (1,)), mp_policy=policy)
        facts = torch_facts.facts_of_torch([model])
    finally:
        dist.destroy_process_group()
    assert (facts["model_dtypes"], facts["fsdp_dtypes"]) == (["float32"], ["bfloat16"])
    assert torch_facts.facts_of_torch([torch.nn.Linear(2, 2)])["fsdp_dtypes"] == []
