"""Decide ``train.precision: auto`` once all ranks and their devices are known."""

from collections.abc import Mapping
from typing import Any

from mtrain.core.interfaces import Precision, RankSession

AUTO = "auto"
KEY = "train.precision"


def choose(session: RankSession) -> tuple[Precision, str]:
    """Return the precision that is fast on the devices of all ranks, and the reason; every rank must call."""
    # One answer for all ranks: which of them computes a sample must not change how it is rounded.
    devices = session.collective.all_gather((session.capabilities.fast_bf16, session.device))
    for rank, (fast, device) in enumerate(devices):
        if not fast:
            where = "the CPU" if device == "cpu" else device
            return "fp32", f"rank {rank} computes on {where}, which is no faster with bf16"
    return "bf16", "the devices of all ranks are faster with it"


def settle(spec: Any, session: RankSession) -> tuple[Any, list[tuple[str, str]]]:
    """Return ``spec`` with a precision in the place of ``auto``, and messages about the choice; every rank must call.

    Returns:
        The spec that the job trains by, which its checkpoints show; and (kind, sentence) for the report.
    """
    if spec.train.precision != AUTO:
        return spec, []
    precision, reason = choose(session)
    train = spec.train.model_copy(update={"precision": precision})
    return spec.model_copy(update={"train": train}), [("note", f"{KEY}: auto is {precision}: {reason}")]


def changed_since(saved: Mapping[str, Any] | None, spec: Any) -> str:
    """Return a warning if a job goes on in another precision than the checkpoint ``saved`` has; else an empty text.

    ``saved`` is the spec of the checkpoint as JSON; None: the job starts anew.
    """
    before = None if saved is None else saved.get("train", {}).get("precision")
    if before in (None, AUTO, spec.train.precision):
        return ""
    return f"{KEY}: the checkpoint was trained in {before}; the job goes on in {spec.train.precision}"
