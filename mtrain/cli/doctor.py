"""``mtrain doctor``: check this host, the hosts of a job, and every installed backend, before a job is started."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mtrain.cli.foreign_flags import config_of
from mtrain.cli.options import JobCommand, host_options, load_job, spec_flags

if TYPE_CHECKING:
    from mtrain.cluster.doctor import Checkup
    from mtrain.cluster.preflight.findings import Finding


@click.command("doctor", cls=JobCommand)
@host_options
@click.option("--quick", is_flag=True, help="Leave out the all-reduce of each backend.")
@click.option("--json", "as_json", is_flag=True, help="For programs.")
@click.option(
    "--build-horovod", is_flag=True, help="Build Horovod for this interpreter's torch and install it; checks nothing."
)
@click.pass_context
def doctor(context: click.Context, /, **params: Any) -> None:
    """Check this host and the hosts of --ips, and let each installed backend (or that of -b) add up numbers over its ranks.

    Without --cluster ssh the same command is started on each of several hosts. Exit code: 0, nothing is in the way of
    a job; 1, something is; 2, wrong use.
    """
    if params["build_horovod"]:
        context.exit(build_horovod())
    from mtrain.cluster.doctor import Request, examine
    from mtrain.cluster.preflight.findings import show

    load_job(params)  # refuses flags that contradict each other
    request = Request(
        config=config_of(params),
        backend=params["backend"],
        overrides=params["overrides"],
        flags=spec_flags(params),
        quick=params["quick"],
    )
    stream = sys.stdout

    def report(findings: Sequence["Finding"], hosts: str) -> None:
        if not params["as_json"]:
            show(findings, every=hosts, stream=stream)

    checkup = examine(request, report=report)
    _print_end(checkup, as_json=params["as_json"])
    context.exit(checkup.code)


def _print_end(checkup: "Checkup", *, as_json: bool) -> None:
    """Print the state of all findings, unless a signal has ended the checks."""
    from mtrain import __version__
    from mtrain.cluster.doctor import INTERRUPTED
    from mtrain.cluster.preflight.findings import bad

    if checkup.code > INTERRUPTED:
        return
    if as_json:
        rows = [finding.as_json() for finding in checkup.findings]
        click.echo(json.dumps({"mtrain": __version__, "state": checkup.state, "findings": rows}, indent=2))
    elif checkup.state == "bad":
        count = len(bad(checkup.findings))
        click.echo(f"{count} finding{'s are' if count > 1 else ' is'} in the way of a job")


def build_horovod() -> int:
    """Run the build script of mtrain for the interpreter that runs mtrain; return the script's exit code."""
    import subprocess

    import mtrain

    script = Path(mtrain.__file__).parent / "backends" / "_horovod" / "build.sh"
    return subprocess.run(["bash", str(script), sys.executable], check=False).returncode  # noqa: S603, S607 - ours
