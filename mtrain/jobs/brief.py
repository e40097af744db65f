"""The request for a job: the same value for a job on this host alone, for the leader of several and for those it leads."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mtrain.jobs.plan import means
from mtrain.spec.config import Loaded
from mtrain.spec.model import Spec
from mtrain.spec.resolved import Resolved

if TYPE_CHECKING:
    from mtrain.records.console import Mode

PREFLIGHT_ONLY = "look"
"""Mode of a job that ends after its preflight."""
TRIAL = "allreduce"
"""Mode of a job whose run folder is deleted once the job has succeeded."""
CHECKED = ("train", "evaluate")
"""Modes in which ranks read data and build a model."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Brief:
    """One job that was asked for. What a leader decides for the whole job makes another brief."""

    loaded: Loaded
    mode: str
    """What the ranks do: "train", "script", "evaluate", "predict" or ``TRIAL``; or the module of a package that is their program.

    With ``PREFLIGHT_ONLY``, no rank is started.
    """
    name: str
    """Name of a new run folder."""
    resume: str | None = None
    """The value of ``--resume``: a path, "auto" or "if-any", which the first host resolves; None: a new run."""
    start_from: Path | None = None
    """A checkpoint from which a new run starts."""
    latest: bool = True
    """Whether ``runs/latest`` will point to the run folder."""
    quiet: bool = False
    """Whether no progress is shown, whatever the spec asks for."""
    notes: Sequence[str] = ()
    """Sentences to show first, after those of the spec."""

    @property
    def spec(self) -> Spec:
        """Return the spec of the job."""
        return self.loaded.spec

    @property
    def job(self) -> Resolved:
        """Return the spec of the job with its plugins."""
        return self.loaded.job

    @property
    def hosts(self) -> Sequence[str]:
        """Return the addresses of the hosts, rank 0's first, or the names of those whose address is known once they connect."""
        return means.host_names(self.job)

    @property
    def base(self) -> Path:
        """Return the folder that contains run folders, the same on every host."""
        return Path(self.spec.report.dir).absolute()

    @property
    def cwd(self) -> Path | None:
        """Return the working directory of every host; None: hosts started by hand keep their own."""
        return None if means.is_by_hand(self.spec) else Path.cwd()

    @property
    def display(self) -> "Mode":
        """Return the kind of display that shows the progress."""
        if self.quiet or self.spec.report.display == "quiet":
            return "quiet"
        script = self.loaded.script
        return self.spec.report.display if script is None or script.knows_mtrain else "output"
