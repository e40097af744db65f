"""``mtrain doctor``: check this host, the hosts of a job, and every installed backend, before a job is started."""

import json
import sys
from typing import TYPE_CHECKING, Any

import click

from mtrain import __version__
from mtrain.commands.foreign_flags import config_of
from mtrain.commands.options import JobCommand, host_options, load_job, spec_flags
from mtrain.spec import terminal

if TYPE_CHECKING:
    from mtrain.api.checking import Checkup


@click.command("doctor", cls=JobCommand)
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
    from mtrain.api import checking

    if params["frameworks"] is not None and not params["build_horovod"]:
        raise click.UsageError(f"--with {params['frameworks']}: given without --build-horovod, to which it belongs")
    loaded = load_job(params)  # refuses flags that contradict each other
    if params["build_horovod"]:
        context.exit(checking.build_horovod(loaded.spec.backend.python, params["frameworks"]))
    request = checking.DoctorRequest(
        config=config_of(params),
        backend=params["backend"],
        overrides=params["overrides"],
        flags=spec_flags(params),
        quick=params["quick"],
    )
    checkup = checking.check(request, stream=None if params["as_json"] else sys.stdout)
    if not checkup.was_ended:
        _print_end(checkup, as_json=params["as_json"])
    context.exit(checkup.code)


def _print_end(checkup: "Checkup", *, as_json: bool) -> None:
    """Print the state of all findings."""
    if as_json:
        rows = [finding.as_json() for finding in checkup.findings]
        terminal.say(json.dumps({"mtrain": __version__, "state": checkup.state, "findings": rows}, indent=2))
    elif checkup.state == "bad":
        count = sum(finding.state == "bad" for finding in checkup.findings)
        terminal.say(f"{count} finding{'s are' if count > 1 else ' is'} in the way of a job")
