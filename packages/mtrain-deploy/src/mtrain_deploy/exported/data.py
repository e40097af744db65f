"""The data of evaluations and predictions with an exported model."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mtrain.core.interfaces import HostBatch, ImageData, JobData, TaskData
from mtrain.errors import DataError, SpecError
from mtrain.rank.spec.assembly import open_task
from mtrain_deploy.exported.metadata import Metadata

if TYPE_CHECKING:
    from mtrain.data.loader.ahead import Prefetch
    from mtrain.data.loader.pool import WorkerPool
    from mtrain.spec.model import Spec
    from mtrain.spec.resolved import Resolved


def evaluation_data(job: "Resolved", metadata: Metadata) -> TaskData:
    """Open the evaluation split of a spec for an exported model.

    Raises:
        SpecError: The data are for another task, or are prepared for another size.
        DataError: They cannot be read, or have other classes than the model.
    """
    spec = job.spec
    kind = job.registry.task_of("datasets", spec.data.format)
    if kind != metadata.kind:
        raise SpecError(
            f"data.format: {spec.data.format} is a data set for {kind}, but the exported model {metadata.model} is for "
            f"{metadata.kind}; change one of them"
        )
    _check_size(spec, metadata)
    data = open_task(job, training=False, for_model=False)
    names = tuple(data.task().class_names)
    if names != metadata.class_names:
        raise DataError(
            f"data: its classes are {_short(names)}, but those of the exported model are {_short(metadata.class_names)}; "
            "evaluate on data with the same classes in the same order"
        )
    return data


def image_data(job: "Resolved", metadata: Metadata, files: Sequence[Path]) -> ImageData:
    """Return images to predict on as the data of an exported model.

    Raises:
        DataError: Some images cannot be read; all of them are named.
    """
    _check_size(job.spec, metadata)
    return job.task_named(metadata.kind).images(job.spec, list(files), metadata.labels())


def micro_batches(data: JobData, *, size: int) -> Iterator[HostBatch]:
    """Yield the samples of split ``val`` in batches of ``size``, prepared in this process; the last may be smaller."""
    source = data.sources()["val"]
    for start in range(0, len(source), size):
        samples = [source.sample(0, index) for index in range(start, min(start + size, len(source)))]
        yield {**source.collate(samples), "epoch": np.zeros(1, np.int64)}


def pooled_batches(pool: "WorkerPool", *, count: int, size: int, prefetch: "Prefetch") -> Iterator[HostBatch]:
    """Yield the batches of ``micro_batches`` of ``count`` samples, prepared by worker processes."""
    shares = [np.arange(start, min(start + size, count)) for start in range(0, count, size)]
    indices: Callable[[int, int], Sequence[Any]] = lambda epoch, update: [shares[update]]  # noqa: E731
    loader = pool.loader(
        "val", indices, micro_batch=size, accumulate=1, updates_per_epoch=len(shares), prefetch=prefetch
    )
    with closing(loader):
        yield from loader.micro_batches(0)


def threads_of(spec: "Spec") -> int | None:
    """Return the number of threads that the spec gives to a computation; None: one for each usable core."""
    return None if spec.cluster.threads == "auto" else spec.cluster.threads


def _check_size(spec: "Spec", metadata: Metadata) -> None:
    if spec.evaluate.augment:
        raise SpecError("evaluate.augment: true, which exported models cannot follow; -o evaluate.augment=false")
    side = spec.data.input_side
    if metadata.image_size and "size" not in metadata.dynamic and side != metadata.image_size:
        raise SpecError(
            f"data.image_size: {side}, but the exported model takes images of {metadata.image_size} px; set that, or "
            "export it with --dynamic-size"
        )


def _short(names: Sequence[str]) -> str:
    shown = ", ".join(names[:8])
    return shown + (f", ... ({len(names)})" if len(names) > 8 else "")
