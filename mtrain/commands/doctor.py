"""``mtrain doctor``: check this host, the hosts of a job, and every installed backend, before a job is started."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import click

import mtrain
from mtrain.commands.foreign_flags import config_of
from mtrain.commands.options import JobCommand, host_options, load_job, spec_flags
from mtrain.spec import terminal

if TYPE_CHECKING:
    from mtrain.jobs.preflight.doctor import Checkup, DoctorRequest
    from mtrain.jobs.preflight.findings import Finding


@click.command(
    "doctor", cls=JobCommand, examples=(("mtrain doctor --quick", "this host, without the all-reduce of each backend"),)
)
@host_options
@click.option("--quick", is_flag=True, help="Leave out the all-reduce of each backend.")
@click.option("--json", "as_json", is_flag=True, help="For programs.")
@click.option(
    "--build-horovod", is_flag=True,
    help="Build Horovod for the torch or TensorFlow of the ranks' interpreter (backend.python) and install it; checks nothing.",
)  # fmt: skip
@click.option(
    "--with", "frameworks", metavar="FRAMEWORKS",
    help="With --build-horovod: torch, tensorflow, or torch,tensorflow; else torch where it is installed, else TensorFlow.",
)  # fmt: skip
@click.pass_context
def doctor(context: click.Context, /, **params: Any) -> None:
    """Check this host and the hosts of --ips, and let each installed backend (or that of -b) add up numbers over its ranks.

    Without --cluster ssh the same command is started on each of several hosts. Exit code: 0, nothing is in the way of
    a job; 1, something is; 2, wrong use.
    """
    from mtrain.jobs.preflight.doctor import DoctorRequest

    if params["frameworks"] is not None and not params["build_horovod"]:
        raise click.UsageError(f"--with {params['frameworks']}: given without --build-horovod, to which it belongs")
    loaded = load_job(params)  # refuses flags that contradict each other
    if params["build_horovod"]:
        context.exit(build_horovod(loaded.spec.backend.python, params["frameworks"]))
    request = DoctorRequest(
        config=config_of(params),
        backend=params["backend"],
        overrides=params["overrides"],
        flags=spec_flags(params),
        quick=params["quick"],
    )
    checkup = check_hosts(request, stream=None if params["as_json"] else sys.stdout)
    if not checkup.was_ended:
        _print_end(checkup, as_json=params["as_json"])
    context.exit(checkup.code)


def _print_end(checkup: "Checkup", *, as_json: bool) -> None:
    """Print the state of all findings."""
    if as_json:
        rows = [finding.as_json() for finding in checkup.findings]
        terminal.say(json.dumps({"mtrain": mtrain.__version__, "state": checkup.state, "findings": rows}, indent=2))
    elif checkup.state == "bad":
        count = sum(finding.state == "bad" for finding in checkup.findings)
        terminal.say(f"{count} finding{'s are' if count > 1 else ' is'} in the way of a job")


def check_hosts(request: "DoctorRequest", *, stream: IO[str] | None = None) -> "Checkup":
    """Run all checks; ``stream`` receives the findings in words as soon as they are known, None: nothing is shown.

    Raises:
        UsageError: the spec is wrong, or the hosts cannot be reached at all.
    """

    from mtrain.jobs.preflight.doctor import examine
    from mtrain.jobs.preflight.findings import show

    def report(findings: Sequence["Finding"], hosts: str) -> None:
        if stream is not None:
            show(findings, every=hosts, stream=stream)

    return examine(request, report=report)


def build_horovod(python: str | None = None, frameworks: str | None = None) -> int:
    """Run the build script of mtrain; return the script's exit code.

    Args:
        python: the interpreter for which Horovod is built; None: the one that runs mtrain.
        frameworks: ``torch``, ``tensorflow``, or both with a comma; None: the script chooses.
    """
    # A script, because it can be read and run where Python builds nothing: in images of containers, for example.
    script = Path(mtrain.__file__).parent / "backends" / "_horovod" / "build.sh"
    words = [python or sys.executable, *([] if frameworks is None else [frameworks])]
    return subprocess.run(["bash", str(script), *words], check=False).returncode  # noqa: S603, S607 - ours
