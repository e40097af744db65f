"""Digests of what tiny jobs learn, to show that a change of the code changes no bit of the results.

``python -m tests.parity.fingerprints`` trains the jobs of ``jobs.py`` with the working tree. ``--base COMMIT`` trains
each of them with that commit as well and prints what differs. Digests differ from one CPU and one library version to
another, so a comparison trains both here. Exit code 1: something differs, a job failed, or two jobs that must agree do
not.
"""

import argparse
import json
import platform
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT)) if str(ROOT) not in sys.path else None

from tests.parity.fingerprints.builds import Build, JobError, build  # noqa: E402
from tests.parity.fingerprints.digests import Fingerprint, differences, fingerprint  # noqa: E402
from tests.parity.fingerprints.jobs import JOBS, Job, chosen  # noqa: E402

FOLDER = ROOT / "build" / "fingerprints"
LIBRARIES = (
    *("torch", "paddlepaddle", "paddlepaddle-gpu", "horovod", "deepspeed"),
    *("numpy", "opencv-python-headless", "pillow", "simplejpeg", "safetensors", "scikit-learn"),
)
"""Distributions whose version can change a bit."""
JOBS_AT_A_TIME = 2
SHOWN_DIGITS = 10
"""Digits of a digest in the table; the file has all 64."""
NAME_WIDTH, DIGEST_WIDTH = 32, 12
"""Columns of the table, in characters."""

Outcome = Fingerprint | JobError


def train_all(jobs: Sequence[Job], builds: Sequence[Build]) -> Iterator[tuple[Job, list[Outcome]]]:
    """Train each job with each build, two at a time; yields a job with its outcomes in the order of ``builds``.

    The builds take turns. Checkpoints are large, so the run folder of a job that no other refers to is removed when the
    next pair is asked for.
    """
    with ThreadPoolExecutor(JOBS_AT_A_TIME) as pool:
        outcomes: dict[tuple[str, str], Future[Outcome]] = {}
        for job in jobs:
            for one in builds:
                outcomes[job.name, one.name] = pool.submit(_train, job, one, outcomes.get((job.resumes, one.name)))
        needed = {name for job in jobs for name in (job.resumes, job.same_as)}
        for job in jobs:
            yield job, [outcomes[job.name, one.name].result() for one in builds]
            if job.name not in needed:
                for one in builds:
                    shutil.rmtree(one.folder / "runs" / job.name, ignore_errors=True)


def _train(job: Job, one: Build, before: Future[Outcome] | None) -> Outcome:
    if before is not None:
        before.result()
    try:
        return fingerprint(one.train(job))
    except JobError as error:
        return error
    except subprocess.TimeoutExpired as error:
        return JobError(f"no end after {error.timeout:.0f} s")


def disagreement(job: Job, outcome: Outcome, reference: Outcome | None) -> list[str]:
    """Return the differences from the job that must give the same bits; nothing if one of the two failed or is
    missing."""
    if not isinstance(outcome, Fingerprint) or not isinstance(reference, Fingerprint):
        return []
    # A resumed job has records of the updates after its checkpoint only.
    lines = differences(_tail(reference, outcome) if job.resumes else reference, outcome)
    return [f"must give the same bits as {job.same_as}:", *(f"  {line}" for line in lines)] if lines else []


def _tail(whole: Fingerprint, part: Fingerprint) -> Fingerprint:
    """``whole`` with the last records only, as many as ``part`` has."""
    length = len(part.series["update"])
    series = {name: values[-length:] for name, values in whole.series.items()}
    return Fingerprint(series=series, arrays=whole.arrays, state=whole.state, run=whole.run)


def environment() -> dict[str, Any]:
    """Libraries and processor, on which the digests depend."""
    versions = {}
    for name in LIBRARIES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {"cpu": _cpu(), "platform": platform.platform(), "python": platform.python_version(), "versions": versions}


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def write(file: Path, one: Build, jobs: Sequence[Job], prints: Mapping[str, Outcome]) -> None:
    """Write all fingerprints of one build as JSON."""
    content = {
        "commit": one.name,
        "environment": environment(),
        "jobs": {
            job.name: outcome.as_json() if isinstance(outcome, Fingerprint) else {"error": str(outcome)}
            for job in jobs
            for outcome in [prints[job.name]]
        },
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(content, indent=1), "utf-8")


def row(job: Job, outcome: Outcome, verdict: str) -> str:
    """One line of the table."""
    if isinstance(outcome, JobError):
        return f"{job.name:<{NAME_WIDTH}}{verdict}"
    digests = "".join(f"{text[:SHOWN_DIGITS]:<{DIGEST_WIDTH}}" for text in outcome.digests().values())
    return f"{job.name:<{NAME_WIDTH}}{digests}{verdict}"


def changes(outcomes: Sequence[Outcome]) -> list[str]:
    """Return the differences of one job between the base, if there is one, and the working tree; a failure is a
    difference."""
    names = ("the base", "the working tree")[-len(outcomes) :]
    failures = [
        f"failed with {name}: {outcome}"
        for name, outcome in zip(names, outcomes, strict=True)
        if isinstance(outcome, JobError)
    ]
    prints = [outcome for outcome in outcomes if isinstance(outcome, Fingerprint)]
    return failures or [line for base in prints[:-1] for line in differences(base, prints[-1])]


def report(jobs: Sequence[Job], builds: Sequence[Build], out: Path, *, suffix: str = "") -> int:
    """Train, print the table and everything that differs, write a file per build. Returns the exit code.

    ``suffix`` follows the build's name, so that the file of some jobs does not replace that of all.
    """
    prints: dict[str, dict[str, Outcome]] = {one.name: {} for one in builds}
    code = 0
    heads = ("records", "weights", "average", "moments")
    print(f"{'job':<{NAME_WIDTH}}" + "".join(f"{head:<{DIGEST_WIDTH}}" for head in heads), flush=True)
    for job, outcomes in train_all(jobs, builds):
        for one, outcome in zip(builds, outcomes, strict=True):
            prints[one.name][job.name] = outcome
        reference = prints[builds[-1].name].get(job.same_as)
        changed, parted = changes(outcomes), disagreement(job, outcomes[-1], reference)
        code = 1 if changed or parted else code
        agrees = isinstance(outcomes[-1], Fingerprint) and isinstance(reference, Fingerprint) and not parted
        compared = len(builds) > 1 or changed or parted
        words = [("DIFFERS" if changed or parted else "same") if compared else "", f"= {job.same_as}" if agrees else ""]
        print(row(job, outcomes[-1], "  ".join(filter(None, words))), flush=True)
        print(*_indented([*changed, *parted]), sep="\n", end="\n" if changed or parted else "", flush=True)
    for one in builds:
        file = out / f"{one.name}{suffix}.json"
        write(file, one, jobs, prints[one.name])
        print(f"written: {file}")
    return code


def _indented(lines: Sequence[str]) -> list[str]:
    return [f"    {line}" for text in lines for line in text.splitlines()]


def commit_of(revision: str) -> str | None:
    """The commit that a revision stands for, abbreviated; None where there is none."""
    command = ["git", "rev-parse", "--verify", "--quiet", "--short=12", f"{revision}^{{commit}}"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return ended.stdout.strip() if ended.returncode == 0 else None


def tree_name() -> str:
    """The commit of the working tree, marked where files differ from it."""
    status = subprocess.run(["git", "status", "--porcelain"], cwd=ROOT, capture_output=True, text=True, check=True)
    return f"{commit_of('HEAD')}{'-modified' if status.stdout else ''}"


def main(argv: Sequence[str] | None = None) -> int:
    """Train and compare; see the module's text for the exit code."""
    parser = argparse.ArgumentParser(prog="tests.parity.fingerprints", description=str(__doc__).split("\n")[0])
    parser.add_argument("--base", help="a commit to compare the working tree with")
    parser.add_argument("--only", default="", help="jobs whose name contains one of these words, separated by commas")
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder of the JSON files")
    arguments = parser.parse_args(argv)
    jobs = chosen([word for word in arguments.only.split(",") if word])
    if not jobs:
        parser.error(
            f"--only: no job has {arguments.only} in its name; there are {', '.join(job.name for job in JOBS)}"
        )
    base = arguments.base and commit_of(arguments.base)
    if arguments.base and base is None:
        parser.error(f"--base: git knows no commit {arguments.base}; give a commit, a branch or HEAD~N")
    names = [*([base] if base else []), tree_name()]
    if base == names[-1]:
        parser.error(f"--base: the working tree is commit {base} without a change; give an earlier commit")
    began = time.monotonic()
    arguments.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="work-", dir=arguments.out) as folder:
        try:
            commits = [*([base] if base else []), None]
            builds = [
                build(commit, name=name, folder=Path(folder) / str(place))
                for place, (commit, name) in enumerate(zip(commits, names, strict=True))
            ]
        except JobError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
        code = report(jobs, builds, arguments.out, suffix="-part" if len(jobs) < len(JOBS) else "")
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    minutes = (usage.ru_utime + usage.ru_stime) / 60, (time.monotonic() - began) / 60
    print(f"{len(jobs)} jobs, {minutes[0]:.1f} minutes of processor time in {minutes[1]:.1f} minutes")
    if len(builds) > 1:
        print(f"every bit is the same as in {base}" if code == 0 else "not every bit is the same: see DIFFERS above")
    return code


if __name__ == "__main__":
    sys.exit(main())
