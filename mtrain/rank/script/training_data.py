"""Open the data set of a training loop, by number or as a stream, and tell how long the loop is."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mtrain.core import cadence, schedule
from mtrain.core.interfaces import Progress
from mtrain.core.sampler import Shares
from mtrain.data.objects import Seed
from mtrain.errors import CheckpointError, ScriptError
from mtrain.rank.script.order import Order
from mtrain.rank.script.samples import Samples
from mtrain.rank.script.stream import Shard, Stream, is_stream


@dataclass(frozen=True, kw_only=True)
class Request:
    """How a script wants its data set to be read; see ``Session.batches``."""

    order: Order | None
    shard: Shard | None
    collate: Callable[[Sequence[Any]], Any] | None
    nondeterministic: str
    workers: int


def opened(dataset: Any, request: Request, spec: Any, shares: Shares, seed_framework: Seed) -> Samples | Stream:
    """Return the samples of a data set as ``request`` asks.

    Raises:
        ScriptError: the data set cannot be used, or cannot be read in this way.
    """
    if request.nondeterministic not in ("refuse", "allow"):
        raise ScriptError(
            f"session.batches: nondeterministic={request.nondeterministic!r} given; expected 'refuse' or 'allow'"
        )
    if not isinstance(request.workers, int) or request.workers < 0:
        raise ScriptError(
            f"session.batches: workers={request.workers!r} given; expected a number of processes, 0 or more"
        )
    if is_stream(dataset, request.shard):
        _check_parts(request, shares)
        return _stream(dataset, request, spec, seed_framework)
    samples = Samples(
        dataset,
        global_batch=spec.train.batch_size,
        seed=spec.train.seed,
        order=request.order,
        collate=request.collate,
        seed_framework=seed_framework,
    )
    if request.nondeterministic != "allow":
        samples.check_repeatable()
    if request.workers:
        samples.use_workers(request.workers)
    return samples


def _check_parts(request: Request, shares: Shares) -> None:
    """Refuse a part of a stream for each rank where a rank computes several shards, or an empty one.

    Raises:
        ScriptError: it is so.
    """
    if request.shard is not None and shares.shards != shares.size:
        raise ScriptError(
            f"session.batches: shard= given, which divides a stream among the {shares.size} ranks of this job, but its updates have "
            f"{shares.shards} shards (cluster.shards); leave shard= out, so that each rank reads the stream and keeps its shards"
        )


def _stream(dataset: Any, request: Request, spec: Any, seed_framework: Seed) -> Stream:
    if request.order is not None:
        raise ScriptError("session.batches: order= given with a stream, which has an order of its own; leave it out")
    if request.workers:
        raise ScriptError(
            f"session.batches: workers={request.workers} given with a stream, which is read in this process; leave workers out"
        )
    stream = Stream(
        dataset,
        global_batch=spec.train.batch_size,
        seed=spec.train.seed,
        shard=request.shard,
        collate=request.collate,
        seed_framework=seed_framework,
    )
    stream.check_schedule(spec)
    return stream


def number_of_updates(spec: Any, samples: Samples | Stream) -> int:
    """Return the length of the loop.

    Raises:
        ScriptError: it is given in epochs, whose length is unknown.
    """
    if spec.train.updates is None and samples.updates_per_epoch is None:
        raise ScriptError(
            "session.batches: epochs= given with a stream that has no length, so that schedules and the end of the job "
            "are unknown; give updates="
        )
    # Where the job's length is given in updates, that of an epoch does not matter.
    return schedule.total_updates(spec, samples.updates_per_epoch or 1)


def check_continues(progress: Progress, samples: Samples | Stream) -> None:
    """Refuse to resume if the order of samples would differ from that of the updates made before.

    Raises:
        CheckpointError: the global batch or the length of the data set has changed.
    """
    if samples.updates_per_epoch is not None:
        cadence.check_continues(
            progress, updates_per_epoch=samples.updates_per_epoch, global_batch=samples.global_batch
        )
    elif progress.samples != progress.update * samples.global_batch:
        raise CheckpointError(
            f"--resume: the checkpoint was written after {progress.update} updates and {progress.samples} samples, which "
            f"does not fit global_batch={samples.global_batch}; go on with the batch of before"
        )
