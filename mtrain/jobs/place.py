"""Where a job runs: the name of its run, its folder, and the checkpoint from which it starts."""

import dataclasses
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from mtrain.jobs.brief import Brief
from mtrain.jobs.plan.host_ranks import TYPED
from mtrain.jobs.resume import find
from mtrain.jobs.resume.find import IF_ANY, Where
from mtrain.spec.identifiers import checked_run_name
from mtrain.system import environment, runfolder
from mtrain.system.runfolder import RunFolder

if TYPE_CHECKING:
    from mtrain.spec.config import Loaded


def run_name(loaded: "Loaded") -> str:
    """Return the name of a new run: ``report.name``, else the name of the spec's file.

    Raises:
        UsageError: no folder can have the file's name.
    """
    return checked_run_name(loaded.spec.report.name or loaded.name)


def evaluation_name(loaded: "Loaded", name: str) -> str:
    """Return the name of an evaluation's folder: the one that was typed, else one made of the name of the run."""
    if loaded.spec.report.name and loaded.origin("report.name").kind in TYPED:
        return loaded.spec.report.name
    return f"{name}-evaluate"


def run_name_for(loaded: "Loaded", *, resume: str | None) -> str:
    """Return the name of the run that a job starts or, with ``--resume if-any``, continues."""
    from mtrain.jobs.hosts import allocation

    name, job = run_name(loaded), None
    # Two jobs of one spec, or of one array, in a scheduler's queue must not continue each other's run. A name that the
    # user gives says which run is meant.
    if resume == IF_ANY and not loaded.spec.report.name:
        job = allocation.job_id(environment.caller(), registry=loaded.registry)
    return name if job is None else f"{name}-{job}"


def locate(loaded: "Loaded", *, resume: str | None) -> Where:
    """Return where a job would run: the folder of the resumed run, else the next free name.

    It creates nothing, unless ``resume`` leads to copies at an address: these are fetched into the run folder.

    Raises:
        CheckpointError: there is nothing intact to resume from.
    """
    if resume is None:
        return Where(runfolder.next_name(Path(loaded.spec.report.dir), run_name(loaded)), None)
    return resolve_resume(loaded, resume=resume)


@contextmanager
def hold_place(brief: Brief) -> Iterator[Where]:
    """Return where a job on this host will run; the folder of a resumed run is locked before its checkpoint is chosen.

    Raises:
        UsageError: another job runs in the folder.
        CheckpointError: there is nothing intact to resume from.
    """
    loaded, resume = brief.loaded, brief.resume
    if resume is None:
        yield Where(runfolder.next_name(Path(brief.spec.report.dir), brief.name), brief.start_from)
        return
    locks: list[Path] = []
    with ExitStack() as stack:

        def hold(run: Path) -> None:
            stack.enter_context(runfolder.take_folder(RunFolder(run)))
            locks.append(run)

        found = find.choose_under_lock(lambda: resolve_resume(loaded, resume=resume), hold)
        yield dataclasses.replace(found, is_held=found.run in locks)


def resolve_resume(loaded: "Loaded", *, resume: str) -> Where:
    """Return the run and checkpoint that ``--resume`` names, see ``fetch.fetch_resume``; what only a copy has is fetched.

    ``auto``: the newest run of this name. ``if-any``: the run of exactly this name, which need not exist.
    """
    from mtrain.jobs.resume import fetch

    base, name = Path(loaded.spec.report.dir), run_name_for(loaded, resume=resume)
    given, copy_to = None if resume == find.AUTO else resume, loaded.spec.checkpoint.copy_to
    return fetch.fetch_resume(given, base=base, name=name, copy_to=copy_to)


def create_place(brief: Brief, where: Where) -> Where:
    """Return ``where`` with an existing run folder: the resumed one, or a new one with the next free name."""
    if brief.resume == IF_ANY:
        runfolder.make(where.run)
    elif brief.resume is not None:
        runfolder.point_latest(where.run)
    else:
        # Between the plan and here, another job may have taken the name that was free then.
        run = runfolder.create(Path(brief.spec.report.dir), brief.name, latest=brief.latest)
        return dataclasses.replace(where, run=run)
    return where
