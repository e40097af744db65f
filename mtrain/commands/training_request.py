"""What a training job is asked for, which ``mtrain train``, ``run``, ``plan`` and ``submit`` share."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mtrain.spec.request import NOTHING, SpecRequest

if TYPE_CHECKING:
    from mtrain.spec.config import Loaded, RunValues, Source


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainRequest:
    """A request to train, or to plan or submit a training job."""

    spec: SpecRequest
    """The spec; none named: that of the resumed run, else the default one or, for a script, a plain training loop."""
    resume: str | None = None
    """A checkpoint or a run folder to go on from; ``auto``: the newest run of this name; ``if-any``: the run of this
    name if it has a checkpoint."""
    any_name: bool = False
    """Without a spec, ``auto`` means the run that was started last, whatever its name is."""
    script: Path | None = None
    """The user's script that the ranks run; None: they train the spec."""
    arguments: Sequence[str] = ()
    """Arguments of the script."""
    quiet: bool = False
    """Show no progress."""

    def with_latest_run(self) -> "TrainRequest":
        """Return the same with the folder of the run that was started last, where it is meant."""
        if not self.any_name:
            return self
        from mtrain.jobs.resume import find

        return replace(self, resume=find.latest_run(self.spec.config, self.resume), any_name=False)

    def source(self) -> "Source":
        """Return the spec to read: the one that was named, else that of the run or the plain one of scripts."""
        if self.script is None:
            from mtrain.jobs.resume import load

            return load.find_spec(self.spec.config, self.resume)
        from mtrain.rank.script.settings import PLAIN

        # Not the spec of the resumed run: what the script itself says is in there, too, and it may say something else now.
        return PLAIN if self.spec.config is None else self.spec.config

    def read_spec(self, run: "RunValues | None", needed: Mapping[str, Any] = NOTHING) -> "Loaded":
        """Read the spec, with the given values of the resumed run, as that of the script if there is one."""
        loaded = self.spec.read(self.source(), needed, run)
        if self.script is None:
            return loaded
        from mtrain.jobs.run import script_job  # brings what ranks need with it, which a plan does not

        return script_job.with_script(loaded, self.script, self.arguments)

    def load(self) -> "Loaded":
        """Read the spec, with what was chosen for the run that is resumed."""
        from mtrain.jobs.resume import load

        return load.load_spec(self.read_spec, resume=self.resume, config=self.spec.config)
