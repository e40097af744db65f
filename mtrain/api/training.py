"""Training: a spec, or a user's own script, from the beginning or from a checkpoint."""

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mtrain.jobs import resumed_spec, start
from mtrain.jobs.hosts import allocated_hosts
from mtrain.rank.script.settings import PLAIN
from mtrain.records.wording import class_lines as class_lines  # for the command line, which imports no records
from mtrain.records.wording import class_table as class_table
from mtrain.spec import references, terminal
from mtrain.spec.request import NOTHING, SpecRequest

if TYPE_CHECKING:
    from mtrain.jobs.job import Outcome
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

    def settled(self) -> "TrainRequest":
        """Return the same with the folder of the run that was started last, where it is meant."""
        if not self.any_name:
            return self
        return replace(self, resume=start.latest_run(self.spec.config, self.resume), any_name=False)

    def source(self) -> "Source":
        """Return the spec to read: the one that was named, else that of the run or the plain one of scripts."""
        if self.script is None:
            return start.resumed_config(self.spec.config, self.resume)
        return PLAIN if self.spec.config is None else self.spec.config

    def read_spec(self, run: "RunValues | None", needed: Mapping[str, Any] = NOTHING) -> "Loaded":
        """Read the spec, with the given values of the resumed run, as that of the script if there is one."""
        loaded = self.spec.read(self.source(), needed, run)
        if self.script is None:
            return loaded
        from mtrain.jobs import script_job  # brings what ranks need with it, which a plan does not

        return script_job.with_script(loaded, self.script, self.arguments)

    def load(self) -> "Loaded":
        """Read the spec, with what was chosen for the run that is resumed."""
        return resumed_spec.load(self.read_spec, resume=self.resume, config=self.spec.config)


def train(request: TrainRequest, *, tell: Callable[[str], None] = lambda line: None) -> "Outcome":
    """Train and wait for the end; then write the report of the run, if the spec asks for plots.

    Args:
        request: what is trained.
        tell: receives the lines of the result.

    Raises:
        UsageError: the job cannot be started; nothing was changed.
        LaunchError: ranks or hosts did not come up.
    """
    from mtrain.jobs import job  # brings the preflight with it, which a plan does not need

    request = request.settled()
    loaded = allocated_hosts.completed(request.load())
    outcome = job.train(loaded, resume=request.resume, quiet=request.quiet)
    for line in outcome.lines:
        tell(line)
    if loaded.spec.report.plots:
        from mtrain_ui.pages.report import write_after  # the import takes a moment

        report = write_after(outcome.run_dir, code=outcome.code, warn=lambda text: terminal.say(text, err=True))
        if report is not None:
            tell(f"report:      open {report}")
    if outcome.code == 0 and outcome.run_dir is not None and can_predict(loaded, outcome.summary):
        files = "TEXT.txt" if loaded.job.model_class.kind == "language" else "IMAGES..."
        tell(f"next:        mtrain predict {files} --run {shlex.quote(str(outcome.run_dir))}")
    return outcome


def can_predict(loaded: "Loaded", summary: Mapping[str, Any]) -> bool:
    """Return whether ``mtrain predict`` takes a run: it was scored, and its network is that of a model plugin."""
    return loaded.script is None and bool(summary.get("best")) and not references.is_reference(loaded.spec.model.name)
