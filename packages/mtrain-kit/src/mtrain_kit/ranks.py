"""Run one rank of the conformance kit: ``python -m mtrain_kit.ranks --run-dir RUN --part PART ...``.

PART is ``reference`` (one rank of solo writes its results), ``checks`` (several checks in one job), ``one`` (the job of
one rank) or ``death``. The plan of a launcher starts it, like ``mtrain.rank.worker``.
"""

import argparse
import faulthandler
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np

from mtrain.core.binding import bind
from mtrain.core.checkpoint import store as checkpoint
from mtrain.core.completeness import check_session
from mtrain.core.interfaces import Progress, RankSession
from mtrain.rank import process
from mtrain.spec import config
from mtrain.spec.resolved import Resolved
from mtrain.system.runfolder import RunFolder
from mtrain_kit import accuracy, learning, states, teardown, training
from mtrain_kit.catalogue import ENTERS, LEAVES, LIGHT, ON_RANKS, ONE
from mtrain_kit.check_context import (
    CLIPPED,
    FIRST_UPDATE,
    LOGITS,
    Reference,
    Site,
    Surroundings,
    listening_ports,
    processes_of,
)
from mtrain_kit.checks import none_of
from mtrain_kit.rank_records import RankRecord, write_facts
from mtrain_kit.training import BOUNDS

# The ranks check what a plugin imports, so nothing may be imported before.
OWN_PROCESSES = True
"""Ranks are no copies of a process that has imported torch."""
FRAMEWORKS = ("torch", "paddle", "tensorflow", "jax", "horovod", "deepspeed")
THREADS_FILE = "threads.json"


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the arguments that a plan wrote, run the part, and return the exit code."""
    parser = argparse.ArgumentParser(prog="mtrain_kit.ranks", description="one rank of the conformance kit")
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--part", choices=("reference", "checks", "one", "death"), required=True)
    parser.add_argument("--checks", default="", help="ids, with commas between")
    parser.add_argument("--references", type=Path, required=True)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--job", required=True, help="the mark of the job's processes")
    parser.add_argument("--limit", type=float, required=True, help="seconds for one check")
    arguments = parser.parse_args(argv)
    number = process.number(os.environ)

    def work(stop: process.StopRequest, leave: process.Leaving) -> None:
        if arguments.part != "death":  # only that part handles requests to end as a job does; the others save nothing
            for name in (signal.SIGTERM, signal.SIGINT):
                signal.signal(name, signal.SIG_DFL)
        parts: dict[str, Callable[[], None]] = {
            "reference": lambda: write_reference(arguments, leave),
            "checks": lambda: run_checks(arguments, number, leave),
            "one": lambda: run_one(arguments, number, leave),
            "death": lambda: run_death(arguments, leave),
        }
        parts[arguments.part]()

    return process.run(work, run_folder=RunFolder(arguments.run_dir), environ=os.environ)


def _job(arguments: argparse.Namespace) -> Resolved:
    """Return the job that this rank is started for."""
    return Resolved.of(config.read(arguments.run_dir / "spec.json"))


@contextmanager
def _inside(job: Resolved, leave: process.Leaving) -> Iterator[RankSession]:
    """Enter the backend of ``job`` and bind its framework.

    Raises:
        PluginError: The session of the backend lacks members.
    """
    backend = job.backend
    with backend as session:
        try:
            check_session(session, backend=backend, name=job.spec.backend.name)
            bind(backend.nn, backend.ops)
            yield session
        except BaseException as error:
            # An error is reported with ``leave`` before the other ranks can notice it, because theirs follow from it.
            leave(error)
            raise


def run_checks(arguments: argparse.Namespace, number: int, leave: process.Leaving) -> None:
    """Run the chosen checks of the catalogue, one after the other, in one job."""
    check_ids = arguments.checks.split(",")
    record = RankRecord(arguments.run_dir, number, limit_s=arguments.limit)
    job = _job(arguments)
    with record.of(LIGHT) as measures:
        backend = job.backend
        frameworks = [name for name in FRAMEWORKS if name in sys.modules]
        measures.append(none_of("frameworks in this process", frameworks))
    before = Surroundings.now(arguments.job)
    with ExitStack() as inside:
        with record.of(ENTERS) as measures:
            session = inside.enter_context(_inside(job, leave))
            problems = (
                [] if backend.framework in sys.modules else [f"{backend.framework} is not what nn and ops brought"]
            )
            measures.append(none_of("frameworks that are missing", problems))
            site = Site(session=session, ranks=arguments.ranks, references=arguments.references)
            ids = session.collective.all_gather(os.getpid())
            precision = site.precision
            if number == 0:
                write_facts(arguments.run_dir, precision=precision, ports=listening_ports(processes_of(arguments.job)))
        for check, run in ON_RANKS.items():
            if check.id in check_ids:
                with record.of(check) as measures:
                    measures += run(site)
        with record.of(LEAVES) as measures:
            inside.close()
            if LEAVES.id in check_ids:
                usual_threads = json.loads((arguments.references / THREADS_FILE).read_text())
                measures += teardown.measure_left(arguments.job, before, ranks=ids, usual_threads=usual_threads)


def run_one(arguments: argparse.Namespace, number: int, leave: process.Leaving) -> None:
    """Check what one rank learns, with accumulation alone and with synchronised BatchNorm as well."""
    record = RankRecord(arguments.run_dir, number, limit_s=arguments.limit)
    with record.of(ONE) as measures, _inside(_job(arguments), leave) as session:
        site = Site(session=session, ranks=1, references=arguments.references)
        problems = [] if (session.collective.rank, session.collective.size) == (0, 1) else ["this is not rank 0 of 1"]
        measures.append(none_of("wrong places", problems))
        for name in ("accumulation", "sync_batchnorm_accumulation"):
            measures += [replace(m, what=f"{name}: {m.what}") for m in learning.learns(name)(site)]
        measures += states.continues_solo(site)


def run_death(arguments: argparse.Namespace, leave: process.Leaving) -> None:
    """Train until the last rank is killed. Rank 0 writes down the ports on which the job listens."""
    faulthandler.dump_traceback_later(arguments.limit, exit=True)
    with _inside(_job(arguments), leave) as session:
        if session.collective.rank == 0:
            write_facts(arguments.run_dir, ports=listening_ports(processes_of(arguments.job)))
        teardown.die(session, arguments.run_dir)


def write_reference(arguments: argparse.Namespace, leave: process.Leaving) -> None:
    """Write the results of one rank of solo, as ``check_context.Reference`` reads them."""
    with _inside(_job(arguments), leave) as session:
        for precision in BOUNDS:
            reference = Reference(folder=arguments.references, precision=precision)
            for case in dict.fromkeys(replace(case, precision=precision).reference for case in learning.CASES.values()):
                np.savez(reference.file(case.key), **training.train(session, case))  # type: ignore[arg-type]
            np.savez(reference.file(CLIPPED), **learning.clipped_updates(session, precision))  # type: ignore[arg-type]
            _save_half_way(session, reference)
            collected, _, _ = states.evaluate_half_way(session, precision, reference.checkpoints())
            logits = np.array([collected.predictions[i][0] for i in range(states.IMAGES)])
            np.savez(reference.file(LOGITS), logits=logits)
        exact = Reference(folder=arguments.references, precision="fp64")
        np.savez(exact.file(FIRST_UPDATE), **accuracy.first_update(session, "fp64"))  # type: ignore[arg-type]
    threads = dict(Surroundings.now(arguments.job).threads)
    (arguments.references / THREADS_FILE).write_text(json.dumps(threads))


def _save_half_way(session: RankSession, reference: Reference) -> None:
    case = replace(states.CONTINUED, precision=reference.precision)
    model, optimizer = training.start_training(session, case.recipe(1))
    batches = training.batches_of(session, case)
    for update in range(states.HALF_WAY):
        training.update_once(session, model, optimizer, batches, case, update)
    store = checkpoint.Checkpoints(reference.checkpoints(), keep_last=1, keep_best=0, asynchronous=False)
    progress = Progress(update=states.HALF_WAY)
    store.save(session.state(model, optimizer), progress, score=None, spec={}, extra={})


if __name__ == "__main__":
    sys.exit(main())
