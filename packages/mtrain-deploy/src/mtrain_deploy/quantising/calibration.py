"""The images from whose values ranges are measured: samples of the training split, prepared as for evaluation."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from mtrain.core.interfaces import Array, HostBatch
from mtrain.errors import DataError, SpecError
from mtrain.tasks.datasets import open_data
from mtrain_deploy.exported.metadata import Metadata

if TYPE_CHECKING:
    from mtrain.spec.resolved import Resolved


def samples(job: "Resolved", metadata: Metadata, *, count: int, seed: int) -> Iterator[HostBatch]:
    """Yield batches of one sample each, drawn from the training split without augmentation.

    Args:
        job: The spec whose data are used.
        metadata: What the exported model says about itself.
        count: Number of samples; all of a smaller split.
        seed: Seed of the draw.

    Raises:
        SpecError: The data are for another task.
        DataError: They cannot be read, or have other classes than the model.
    """
    spec, opened = job.spec, open_data(job.spec.data, registry=job.registry)
    if opened.kind != metadata.kind:
        raise SpecError(
            f"data.format: {spec.data.format} is a data set for {opened.kind}, but the exported model {metadata.model} is for "
            f"{metadata.kind}; change one of them"
        )
    if tuple(opened.class_names) != metadata.class_names:
        raise DataError(
            f"data: has {len(opened.class_names)} classes, those of the exported model are {len(metadata.class_names)} or have "
            "other names; calibrate on the data that it was trained on"
        )
    opened.val = opened.train  # the evaluation split is the one that is read without augmentation
    data = job.task_named(opened.kind)(spec, opened, training=False)
    source = data.sources()["val"]
    # Files are often sorted by class, so the first ones would show a few of them.
    chosen = np.random.default_rng(seed).permutation(len(source))[:count]
    return ({**source.collate([source.sample(0, int(index))]), "epoch": np.zeros(1, np.int64)} for index in chosen)


def feeds(batches: Iterator[HostBatch], metadata: Metadata) -> Iterator[dict[str, Array]]:
    """Yield the inputs of the graph for each sample, repeated where its batch has a fixed size.

    Raises:
        DataError: A sample does not fit the graph.
    """
    for batch in batches:
        feed = {}
        for given in metadata.inputs:
            array = np.asarray(batch[given.key])
            array = given.as_input(array) if array.ndim == len(given.shape) else array
            size = given.shape[0]
            array = np.repeat(array, size, axis=0) if isinstance(size, int) and size > 1 else array
            sides = zip(array.shape, given.shape, strict=len(array.shape) == len(given.shape))
            if any(isinstance(wanted, int) and wanted != side for side, wanted in sides):
                shape = ", ".join(map(str, given.shape))
                raise DataError(
                    f"data: a sample has the shape {array.shape}, the exported model takes ({shape}); set data.image_size "
                    f"to {metadata.image_size}"
                )
            feed[given.name] = np.ascontiguousarray(array)
        yield feed
