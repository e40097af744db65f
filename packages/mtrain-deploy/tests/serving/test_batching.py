"""Batches and places of the server, without a server: who gets which output, and how many images are in work."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from mtrain_deploy.serving.batching import Batcher, Places
from mtrain_deploy.serving.metrics import Metrics
from mtrain_deploy.serving.refusal import Refusal


def test_as_many_images_are_in_work_as_the_queue_holds_and_no_more() -> None:
    metrics = Metrics()
    places = Places(3, metrics)
    places.take(2, seconds_per_image=0.0)
    places.take(1, seconds_per_image=0.0)
    with pytest.raises(Refusal) as refusal:
        places.take(1, seconds_per_image=1.5)
    assert (refusal.value.status, refusal.value.headers["Retry-After"]) == (503, "5")  # 3 images of 1.5 s, rounded up
    assert (places.taken, b"mtrain_images_in_work 3.0" in metrics.text()) == (3, True)
    places.give_back(2)
    with pytest.raises(Refusal):
        places.take(3, seconds_per_image=0.0)
    places.take(2, seconds_per_image=0.0)
    assert (places.taken, b"mtrain_images_in_work 3.0" in metrics.text()) == (3, True)


async def _served(samples: Sequence[Any], *, max_batch: int, given_up: Sequence[int] = ()) -> tuple[list[Any], ...]:
    """Submit all samples before the first batch; returns outputs and batches."""
    batches: list[list[Any]] = []

    def compute(batch: Sequence[Any]) -> list[Any]:
        batches.append(list(batch))
        return [sample * 10 for sample in batch]

    batcher = Batcher(compute, max_batch=max_batch, max_wait_s=0.0, metrics=Metrics())
    outputs = [batcher.submit(sample) for sample in samples]
    for place in given_up:
        outputs[place].cancel()
    running = asyncio.ensure_future(batcher.run())
    found = await asyncio.gather(*(output for output in outputs if not output.cancelled()))
    running.cancel()
    batcher.close()
    return list(found), batches


def test_each_sample_gets_its_own_output_and_no_batch_is_too_large() -> None:
    found, batches = asyncio.run(_served([1, 2, 3, 4, 5], max_batch=2))
    assert found == [10, 20, 30, 40, 50]
    assert batches == [[1, 2], [3, 4], [5]]


def test_samples_that_nobody_waits_for_are_not_computed() -> None:
    found, batches = asyncio.run(_served([1, 2, 3, 4], max_batch=4, given_up=[1, 2]))
    assert (found, batches) == ([10, 40], [[1, 4]])


def test_every_image_of_a_batch_that_cannot_be_computed_is_refused_and_counted() -> None:
    def compute(batch: Sequence[Any]) -> list[Any]:
        raise RuntimeError("no such kernel")

    async def served(metrics: Metrics) -> list[Any]:
        batcher = Batcher(compute, max_batch=3, max_wait_s=0.0, metrics=metrics)
        outputs = [batcher.submit(sample) for sample in range(3)]
        running = asyncio.ensure_future(batcher.run())
        found = await asyncio.gather(*outputs, return_exceptions=True)
        running.cancel()
        batcher.close()
        return found

    found = asyncio.run(served(metrics := Metrics()))
    assert [(type(refusal), refusal.status) for refusal in found] == [(Refusal, 503)] * 3
    assert b"mtrain_failed_images_total 3.0" in metrics.text()
