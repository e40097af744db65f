"""Open the data set of a training loop, by number or as a stream, and tell how long the loop is."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np

from mtrain.core.interfaces import Progress
from mtrain.core.samples.sampler import Shares
from mtrain.core.update import cadence, schedule
from mtrain.data.objects import Seed
from mtrain.errors import CheckpointError, ScriptError
from mtrain.rank.script.reading.epochs import Cutting
from mtrain.rank.script.reading.loaders import read_loader
from mtrain.rank.script.reading.made import MadeBatches
from mtrain.rank.script.reading.samples import Samples
from mtrain.rank.script.reading.stream import Shard, Stream, is_stream
from mtrain.rank.script.reading.together import Several, Together, batches_of


@dataclass(frozen=True, kw_only=True)
class Request:
    """How a script wants its data set to be read; see ``Session.batches``."""

    cutting: Cutting
    shard: Shard | None
    collate: Callable[[Sequence[Any]], Any] | None
    nondeterministic: str
    workers: int | None
    """None: as the DataLoader of each of several data sets says."""


Source: TypeAlias = Samples | Together | Stream | MadeBatches
"""Where the micro batches of a script come from."""


def open_source(dataset: Any, request: Request, spec: Any, shares: Shares, seed_framework: Seed) -> Source:
    """Return the samples of a data set as ``request`` asks.

    Raises:
        ScriptError: the data set cannot be used, or cannot be read in this way.
    """
    _check_request(request)
    if is_stream(dataset, request.shard):
        _check_parts(request, shares)
        return _stream(dataset, request, spec, seed_framework)
    samples = _samples(dataset, request, spec.train.seed, seed_framework)
    if samples.updates_per_epoch is None:
        check_schedule(spec, "epochs differ in their number of updates")
    return samples


def _samples(dataset: Any, request: Request, seed: int, seed_framework: Seed) -> Samples:
    """Return the samples of a data set that is read by number."""
    samples = Samples(dataset, request.cutting, seed=seed, collate=request.collate, seed_framework=seed_framework)
    if request.nondeterministic != "allow":
        samples.check_repeatable()
    if request.workers:
        samples.use_workers(request.workers)
    return samples


def _check_request(request: Request) -> None:
    if request.nondeterministic not in ("refuse", "allow"):
        raise ScriptError(
            f"session.batches: nondeterministic={request.nondeterministic!r} given; expected 'refuse' or 'allow'"
        )
    if request.workers is not None and (not isinstance(request.workers, int) or request.workers < 0):
        raise ScriptError(
            f"session.batches: workers={request.workers!r} given; expected a number of processes, 0 or more"
        )


def opened_together(
    given: Several, batches: Any, request: Request, spec: Any, shares: Shares, seed_framework: Seed
) -> Together:
    """Return the samples of several data sets, an update of which takes a batch of each.

    Args:
        given: The data sets, or their DataLoaders, by name or place.
        batches: ``global_batch`` as the script gives it: for each of them, or None where DataLoaders say it.
        request: How they are read. Its order and shard are None: each data set has one of its own.
        spec: Of the job.
        shares: What this rank computes of an update.
        seed_framework: Seeds the framework's generators.

    Raises:
        ScriptError: a data set cannot be used, or not beside others.
    """
    _check_request(request)
    names: list[Any] = list(given) if isinstance(given, Mapping) else list(range(len(given)))
    datasets = list(given.values()) if isinstance(given, Mapping) else list(given)
    parts = []
    for place, (name, dataset, batch) in enumerate(zip(names, datasets, batches_of(batches, names), strict=True)):
        read = read_loader(dataset, call="session.batches")
        batch = read.batch_size if batch is None else batch
        divided = shares.shards * shares.rounds
        if read.batches is not None or is_stream(read.dataset, None):
            what = "makes batches of its own" if read.batches is not None else "is a stream"
            raise ScriptError(
                f"session.batches: data set {name!r} of several {what}; read beside others it needs samples by number and one batch size"
            )
        if isinstance(batch, bool) or not isinstance(batch, int) or batch < 1 or batch % divided:
            raise ScriptError(
                f"session.batches: global_batch={batch!r} for data set {name!r} does not divide among {shares.shards} ranks or shards x "
                f"{shares.rounds} micro batches; use a multiple of {divided}"
            )
        # Data sets of one length would else be read in one order.
        seed = (
            spec.train.seed
            if place == 0
            else int(np.random.SeedSequence([spec.train.seed, place]).generate_state(1)[0])
        )
        one = replace(
            request,
            cutting=Cutting(batch=batch, order=read.order, drops_last=True),
            collate=read.collate,
            workers=read.workers if request.workers is None else request.workers,
        )
        parts.append(_samples(read.dataset, one, seed, seed_framework))
    if isinstance(given, Mapping):
        return Together(parts, lambda micros: dict(zip(names, micros, strict=True)))
    return Together(parts, tuple)


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
    if request.cutting.order is not None:
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
    if stream.length is None:
        check_schedule(spec, "the stream has no length")
    return stream


def number_of_updates(spec: Any, samples: Source) -> int:
    """Return the length of the loop.

    Raises:
        ScriptError: it is given in epochs, whose length is unknown.
    """
    if spec.train.updates is None and not isinstance(samples, Stream) and spec.train.epochs is not None:
        return samples.updates_of(spec.train.epochs)
    if spec.train.updates is None and samples.updates_per_epoch is None:
        raise ScriptError(
            "session.batches: epochs= given with a stream that has no length, so that schedules and the end of the job "
            "are unknown; give updates="
        )
    # Where the job's length is given in updates, that of an epoch does not matter.
    return schedule.total_updates(spec, samples.updates_per_epoch or 1)


def check_continues(progress: Progress, samples: Source) -> None:
    """Refuse to resume if the order of samples would differ from that of the updates made before.

    Raises:
        CheckpointError: the global batch or the length of the data set has changed.
    """
    if not isinstance(samples, Stream):
        _check_place(progress, samples)
    elif samples.updates_per_epoch is not None:
        cadence.check_continues(
            progress, updates_per_epoch=samples.updates_per_epoch, global_batch=samples.global_batch
        )
    elif progress.samples != progress.update * samples.global_batch:
        raise CheckpointError(
            f"--resume: the checkpoint was written after {progress.update} updates and {progress.samples} samples, which "
            f"does not fit global_batch={samples.global_batch}; go on with the batch of before"
        )


def _check_place(progress: Progress, samples: Samples | Together | MadeBatches) -> None:
    epoch, position = samples.place(progress.update)
    each = samples.updates_per_epoch
    if each is not None:
        whole = sum(samples.size(0, number) for number in range(each))
        seen = epoch * whole + sum(samples.size(0, number) for number in range(position))
    else:
        seen = progress.samples  # they are those of epochs that would all have to be asked for again
    if (progress.epoch, progress.position, progress.samples) != (epoch, position, seen):
        raise CheckpointError(
            f"--resume: the checkpoint after update {progress.update} is at epoch {progress.epoch}, position {progress.position}, "
            f"{progress.samples} samples; with the data and batches of now it would be at epoch {epoch}, position {position}, {seen} "
            "samples. Use the batches and data it was trained with, or start a new job"
        )


def check_schedule(spec: Any, reason: str) -> None:
    """Refuse a schedule that counts epochs where their length is not known before.

    Raises:
        ScriptError: the schedule counts epochs; the message names ``reason``.
    """
    schedule = spec.schedule
    if schedule.name == "step" or schedule.per == "epoch" or getattr(schedule.warmup, "epochs", None):
        raise ScriptError(
            f"session.batches: the schedule {schedule.name!r} counts epochs, but {reason}; use one per update, such as mtrain.Cosine(), or "
            "a function from the update to the learning rate"
        )
