"""The steps of a job on this host alone, which are those of a leader of several hosts."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import IO

from mtrain.jobs import place
from mtrain.jobs.brief import CHECKED, Brief
from mtrain.jobs.hosts.this_host import run_plan
from mtrain.jobs.plan import micro_batch
from mtrain.jobs.plan.means import own_node
from mtrain.jobs.plan.plan import Plan, make_plan
from mtrain.jobs.preflight import job_checks
from mtrain.jobs.resume.find import Where
from mtrain.jobs.run.supervisor import Result
from mtrain.spec.config import Loaded


@dataclass(kw_only=True)
class OnlyHost:
    """The steps of a job on this host alone, see ``jobs.job.carry_out``."""

    brief: Brief
    stream: IO[str] | None = None
    """Receives all messages; None: the terminal."""
    _locks: ExitStack = field(default_factory=ExitStack)
    """Hold the run folder until the job has ended."""

    def lead(self, steps: "Callable[[OnlyHost], Result]") -> Result:
        """Take the steps to the end of the job."""
        # Requests to end are counted once ranks run. Before, Ctrl-C ends this process, which has started nothing.
        with self._locks:
            return steps(self)

    def gather(self) -> Where:
        """Return where the job runs; a folder that it goes on in is locked from here on."""
        where = self._locks.enter_context(place.hold_place(self.brief))
        if self.brief.mode in ("train", "script"):
            own_node(self.brief.loaded)
        return where

    def plan(self, where: Where) -> Plan:
        """Return the plan of the job."""
        return make_plan(self.brief.loaded, run_dir=where.run, resume=where.checkpoint, mode=self.brief.mode)

    def check(self, plan: Plan) -> None:
        """Refuse a job that cannot succeed; what the user should know becomes notes, since there is no display yet."""
        brief, notes = self.brief, []
        if brief.loaded.script is not None:
            notes = job_checks.check_script(brief.job, resumed=plan.resume)
        elif brief.mode in CHECKED:
            training = brief.mode == "train"
            notes = job_checks.check(brief.job, size=plan.size, training=training, resumed=plan.resume)
        self.brief = replace(brief, notes=[*brief.notes, *notes])

    def settle(self, plan: Plan, note: Callable[[str], None]) -> Loaded:
        """Return the spec with the micro batch that fits on this host, see ``micro_batch.settle``."""
        return micro_batch.settle(self.brief.loaded, plan, note=note)

    def create(self, where: Where) -> Where:
        """Return ``where`` with a run folder that exists."""
        return place.create_place(self.brief, where)

    def run(self, plan: Plan, where: Where) -> Result:
        """Run the plan to its end."""
        notes = [*self.brief.notes, f"run folder: {where.run}"]
        if self.brief.resume is not None and where.checkpoint is not None:
            notes.append(f"goes on from {where.checkpoint}")
        return run_plan(replace(self.brief, notes=notes), plan, stream=self.stream, holds_folder=where.is_held)
