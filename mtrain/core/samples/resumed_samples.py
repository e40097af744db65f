"""Refuse to resume a job whose updates would have other samples than those of the checkpoint's job."""

from collections.abc import Mapping
from typing import Any

from mtrain.core.interfaces import Progress
from mtrain.errors import CheckpointError
from mtrain.spec.model import Spec

KEY = "samples"
"""Key in ``extra`` of a checkpoint: what was trained, see ``facts``."""
LOADING = ("workers", "prefetch", "cache", "cache_dir", "val")
"""Keys of ``data`` that do not change what is trained."""
MOST_NAMED = 5


def facts(*, count: int | None, digest: str = "") -> dict[str, Any]:
    """Return what a checkpoint holds about the training split.

    Args:
        count: Number of its samples; None: nobody knows it.
        digest: A digest of all of them; empty: there is none.
    """
    return {"count": count, "digest": digest}


def check_same(now: Mapping[str, Any], body: Mapping[str, Any], *, spec: Spec, progress: Progress) -> None:
    """Refuse to go on with other samples, even where the lengths of epochs agree or no epoch has ended yet.

    Args:
        now: The facts of the job's training split.
        body: ``spec`` and ``extra`` of the checkpoint.
        spec: Spec of the job.
        progress: That of the checkpoint.

    Raises:
        CheckpointError: The split has another number of samples, or other ones.
    """
    before = (body.get("extra") or {}).get(KEY) or {}
    if not progress.update or not isinstance(before, Mapping):
        return
    counts = [facts.get("count") for facts in (before, now)]
    if None not in counts and counts[0] != counts[1]:
        what = f"the training split has {counts[1]} samples, and had {counts[0]} when the checkpoint was written"
    elif before.get("digest") and now.get("digest") and before["digest"] != now["digest"]:
        what = "the samples of the training split are not those of when the checkpoint was written"
    else:
        return
    changed = changes(body.get("spec") or {}, spec)
    because = f" ({'; '.join(changed[:MOST_NAMED])})" if changed else ""
    raise CheckpointError(
        f"--resume: {what}{because}. Update {progress.update} and those after it would have other samples than without the change: "
        "some would be trained twice in this epoch, and others not at all. Go on with the data and the settings of data it was trained "
        "with, or start a new job from its weights with model.weights: CHECKPOINT"
    )


def changes(saved: Mapping[str, Any], spec: Spec) -> list[str]:
    """Return the settings of data that differ from those in the checkpoint's spec, as far as that holds them."""
    then = saved.get("data") or {}
    now = spec.data.model_dump(mode="json")
    return [
        f"data.{name}: {now[name]} given, {then[name]} before"
        for name in now
        if name in then and name not in LOADING and now[name] != then[name]
    ]


def find_reordered(saved: Mapping[str, Any], spec: Spec, progress: Progress) -> list[str]:
    """Return a sentence on another seed, with which the samples are the same in another order."""
    before = (saved.get("train") or {}).get("seed", spec.train.seed)
    if before == spec.train.seed or not progress.update:
        return []
    within = "; of the epoch that has begun some are trained twice and others not at all" if progress.position else ""
    return [
        f"resumed with a change: train.seed: {spec.train.seed} given, the checkpoint was trained with {before}: from here on the samples "
        f"come in another order{within}"
    ]
