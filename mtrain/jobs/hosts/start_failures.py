"""Explain why no agent came up on a host, from the exit status and output of the process that should start it."""

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

import mtrain
from mtrain.jobs.preflight.findings import Finding

NO_SUCH_COMMAND = (126, 127)
"""Exit statuses of a shell that cannot run a command."""
SSH_CAUSES: Sequence[tuple[str, str]] = (
    (
        "REMOTE HOST IDENTIFICATION HAS CHANGED",
        "its key is not the one that is known here: find out why; if it was set up anew, ssh-keygen -R {host}, then "
        "log in once",
    ),
    (
        "Host key verification failed|No .* host key is known",
        "its key is not known here: log in once with ssh {host}, and compare it",
    ),
    (
        "Could not resolve hostname|Name or service not known|Temporary failure in name resolution",
        "its name is not known here: correct --ips, or give addresses",
    ),
    (
        "PRIVATE KEY FILE|bad permissions|Identity file .* not accessible|authentication failures|Permission denied",
        "it takes no key of yours: ssh-copy-id {host}, or give one with --ssh-identity-file that you alone may read",
    ),
    ("Connection refused", "nothing listens there: start its ssh server, or give --ssh-port"),
    (
        "No route to host|unreachable|Host is down|timed out|not responding",
        "it does not answer: is it up and on this network, and do firewalls let ssh pass?",
    ),
)
"""(regular expression for the output of ssh, remedy); the first match counts, so specific causes stand before general
ones."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Means:
    """The program that reaches a host, as messages about a host that it did not reach need it."""

    name: str
    """Its name: ``ssh``."""
    failed: int | None = None
    """Exit status of an error of the program itself; every other status is that of the agent. None: unknown."""
    causes: Sequence[tuple[str, str]] = ()
    """(regular expression for its output, remedy with ``{host}``) of errors of the program itself."""
    trial: str = ""
    """The remedy where no cause is known; ``{host}`` stands for the host."""
    python: str = "its command"
    """The interpreter that it runs on the host."""
    python_key: str = ""
    """Key of the spec that names the interpreter on the hosts; empty: there is none."""


SSH = Means(
    name="ssh",
    failed=255,
    causes=SSH_CAUSES,
    trial="try by hand: ssh -v {host} true",
    python_key="cluster.options.python",
)


def explain(
    host: str, *, status: int | None, printed: Sequence[str], python: str, local: bool, means: Means = SSH
) -> Finding:
    """Return the finding for a host whose agent ended before it sent its hello.

    Args:
        host: the host's address, as the spec has it.
        status: exit status of ssh, or of the agent where it is a child of this process.
        printed: lines of output of that process, or of the login shell on the host.
        python: the interpreter that should have run the agent.
        local: whether the agent should have run on this machine, without ssh.
        means: the program that should have reached the host.
    """
    lines = [line.strip() for line in printed if line.strip()]
    text = "\n".join(lines)
    last = lines[-1].removeprefix(f"{means.name}: ") if lines else f"exit code {status}"
    other_python = f", or name the interpreter that has {{}}: -o {means.python_key}=PATH" if means.python_key else ""
    # ssh itself ends with 255, and so does a command that does; the first is far more likely, and its output says which.
    if status is not None and status == means.failed and not local:
        remedy = next((remedy for pattern, remedy in means.causes if re.search(pattern, text, re.IGNORECASE)), "")
        remedy = (remedy or means.trial).format(host=shlex.quote(host))
        return _finding(means, host, f"cannot be reached by {means.name}: {last}", remedy)
    # ``processes.start_piped`` runs commands through setpriv, whose own error would hide the name of the program.
    if broken := next((line for line in lines if line.startswith("setpriv: ")), ""):
        remedy = f"try here: {means.name} -V"
        return _finding(means, host, f"{means.name} cannot be executed on this machine: {broken}", remedy)
    if status in NO_SUCH_COMMAND:
        remedy = f"install Python and mtrain there at the same path{other_python.format('them')}"
        return _finding(means, host, f"cannot run {python}: {last}", remedy)
    if "No module named" in text:
        remedy = f"install mtrain {mtrain.__version__} there{other_python.format('it')}"
        return _finding(
            means,
            host,
            f"{python} has no {'mtrain-trace' if 'mtrain_trace' in last else 'mtrain'} there: {last}",
            remedy,
        )
    remedy = f"try there: {shlex.quote(python)} -m mtrain --version"
    return _finding(means, host, f"its agent did not start: {last}", remedy)


def _finding(means: Means, host: str, text: str, remedy: str) -> Finding:
    return Finding(check=means.name, state="bad", hosts=(host,), text=text, remedy=remedy)
