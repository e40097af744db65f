"""The tiny jobs whose results are compared: together they cover every backend, model and option of an update."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SPECS = Path(__file__).parent / "specs"
SCRIPTS: Mapping[str, str] = {"script": "code/train.py"}
"""Name of a spec -> the user's script beside it that ``mtrain run`` starts with it; the others are trained by ``mtrain train``."""
IN_MEMORY = ("vit", "own", "script")
"""Specs whose data are no images in a folder."""
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
    """One run of ``mtrain train``, or of ``mtrain run`` with a script."""

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

    def command(self, folder: Path, *, specs: Path = SPECS, resume: Path | None = None) -> list[str]:
        """Words of the command line after ``mtrain``, for a run folder in ``folder/runs`` and a folder of specs."""
        script = SCRIPTS.get(self.model)
        words = ["train" if script is None else "run", *self._flags(folder, specs)]
        words += [] if resume is None else ["--resume", str(resume)]
        return words if script is None else [*words, str(specs / script)]

    def _flags(self, folder: Path, specs: Path) -> list[str]:
        backend, options = STACKS[self.stack]
        values: dict[str, Any] = {"report.dir": folder / "runs", **self.overrides}
        values |= {f"backend.options.{key}": value for key, value in options.items()}
        if self.model not in IN_MEMORY:
            values["data.root"] = folder / f"data-{self.model}"
        pairs = [word for key, value in values.items() for word in ("-o", f"{key}={value}")]
        head = ["-c", str(specs / f"{self.model}.yml"), "--backend", backend, "--nproc-per-node", str(self.ranks)]
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
    # masks instead of boxes
    Job(model="unet", stack="solo-torch"),
    Job(model="unet", stack="solo-paddle"),
    *two_ranks("unet", "ddp", "deepspeed-1"),
    *two_ranks("unet", "fleet"),
    # a user's module and data
    Job(model="own", stack="solo-torch"),
    *two_ranks("own", "ddp", "horovod", "deepspeed-3"),
    Job(model="own", stack="ddp", ranks=2, same_as="own-ddp-x2", resumes="own-ddp-x2"),
    # a user's script
    Job(model="script", stack="solo-torch"),
    *two_ranks("script", "ddp", "horovod", "deepspeed-3"),
    Job(model="script", stack="ddp", ranks=2, same_as="script-ddp-x2", resumes="script-ddp-x2"),
)


def chosen(words: Sequence[str]) -> Sequence[Job]:
    """The jobs whose name contains one of ``words``, with the jobs that they refer to; all jobs without words."""
    names = {job.name for job in JOBS if not words or any(word in job.name for word in words)}
    names |= {reference for job in JOBS if job.name in names for reference in (job.same_as, job.resumes)}
    return [job for job in JOBS if job.name in names]
