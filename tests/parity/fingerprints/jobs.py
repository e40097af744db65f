"""The tiny jobs whose results are compared: together they cover every backend, model and option of an update."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SPECS = Path(__file__).parent / "specs"
STACKS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "solo-torch": ("solo", {"framework": "torch"}),
    "solo-paddle": ("solo", {"framework": "paddle"}),
    "ddp": ("ddp", {}),
    "horovod": ("horovod", {}),
    "deepspeed-1": ("deepspeed", {"stage": 1}),
    # Without the threshold, weights as small as these would stay whole on every rank.
    "deepspeed-3": ("deepspeed", {"stage": 3, "config.zero_optimization.stage3_param_persistence_threshold": 0}),
    "fsdp": ("fsdp", {}),
    "fleet": ("fleet", {}),
}
"""Name in the table -> backend and its options."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """One run of ``mtrain train``."""

    model: str
    """Also the name of its spec in ``specs``, which says which options the job uses."""
    stack: str
    ranks: int = 1
    same_as: str = ""
    """Name of another job that must give the same bits; empty: there is none."""
    overrides: Mapping[str, Any] = field(default_factory=dict)
    """Keys of the spec that differ from the file."""
    resumes: str = ""
    """Name of the job from whose first checkpoint this one goes on; empty: it starts at the beginning."""

    @property
    def name(self) -> str:
        """Name in the table and of its run folder."""
        return f"{self.model}-{self.stack}-x{self.ranks}{'-resumed' if self.resumes else ''}"

    def arguments(self, folder: Path) -> list[str]:
        """Arguments of ``mtrain train`` for a run folder in ``folder/runs``."""
        backend, options = STACKS[self.stack]
        values: dict[str, Any] = {"report.dir": folder / "runs", **self.overrides}
        values |= {f"backend.options.{key}": value for key, value in options.items()}
        if self.model != "vit":  # the pictures of 8 x 8 come with scikit-learn and have no folder
            values["data.root"] = folder / f"data-{self.model}"
        pairs = [word for key, value in values.items() for word in ("-o", f"{key}={value}")]
        head = ["-c", str(SPECS / f"{self.model}.yml"), "--backend", backend, "--nproc-per-node", str(self.ranks)]
        return [*head, "--name", self.name, *pairs]


def two_ranks(model: str, first: str, *others: str) -> Sequence[Job]:
    """A job on two ranks of ``first``, and one on each of ``others`` that must give the same bits."""
    reference = Job(model=model, stack=first, ranks=2)
    return (reference, *(Job(model=model, stack=stack, ranks=2, same_as=reference.name) for stack in others))


JOBS: Sequence[Job] = (
    # clipping, accumulation, YOLOv5's average
    Job(model="yolov5n", stack="solo-torch"),
    Job(model="yolov5n", stack="solo-paddle"),
    Job(model="yolov5n", stack="ddp", same_as="yolov5n-solo-torch-x1"),
    *two_ranks("yolov5n", "fleet"),
    *two_ranks("yolov5n", "ddp", "horovod", "deepspeed-1", "deepspeed-3", "fsdp"),
    # after the others, so that the job they go on from has ended by then
    Job(model="yolov5n", stack="ddp", ranks=2, same_as="yolov5n-ddp-x2", resumes="yolov5n-ddp-x2"),
    Job(model="yolov5n", stack="fleet", ranks=2, same_as="yolov5n-fleet-x2", resumes="yolov5n-fleet-x2"),
    # synchronised BatchNorm, PaddleDetection's average, sides drawn for each update
    Job(model="ppyoloe_s", stack="solo-torch"),
    Job(model="ppyoloe_s", stack="solo-paddle"),
    *two_ranks("ppyoloe_s", "ddp", "horovod"),
    *two_ranks("ppyoloe_s", "fleet"),
    # AdamW, clipping
    Job(model="vit", stack="solo-torch"),
    Job(model="vit", stack="solo-paddle"),
    Job(model="vit", stack="horovod", same_as="vit-solo-torch-x1"),
    Job(model="vit", stack="fleet", same_as="vit-solo-paddle-x1"),
    *two_ranks("vit", "ddp", "deepspeed-1", "deepspeed-3", "fsdp"),
    *two_ranks("vit", "fleet"),
)


def chosen(words: Sequence[str]) -> Sequence[Job]:
    """The jobs whose name contains one of ``words``, with the jobs that they refer to; all jobs without words."""
    names = {job.name for job in JOBS if not words or any(word in job.name for word in words)}
    names |= {reference for job in JOBS if job.name in names for reference in (job.same_as, job.resumes)}
    return [job for job in JOBS if job.name in names]
