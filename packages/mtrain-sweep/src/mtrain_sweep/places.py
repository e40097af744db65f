"""Where the files of a sweep and of its trials are."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class TrialFiles:
    """The files of one trial."""

    sweep: Path
    """The folder of the sweep, absolute."""
    number: int

    @property
    def name(self) -> str:
        """Return the name of the trial's run."""
        return f"{self.number:04d}"

    @property
    def runs(self) -> Path:
        """Return the folder of all runs."""
        return self.sweep / "trials"

    @property
    def run_dir(self) -> Path:
        """Return the run folder of the trial."""
        return self.runs / self.name

    @property
    def spec(self) -> Path:
        """Return the file of the trial's spec."""
        return self.sweep / "specs" / f"{self.name}.yml"

    @property
    def log(self) -> Path:
        """Return the file with what the trial's command has printed."""
        return self.sweep / "logs" / f"{self.name}.log"
