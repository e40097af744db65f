"""Hide the caller's environment from a native starter that exposes its own to others, and give it back to the ranks.

``python -m mtrain.launchers.withheld keep STARTER... python -m mtrain.launchers.withheld restore RANK...``

``keep`` stores the whole environment in memory that belongs to no file system (memfd_create(2)), and then executes the
starter with harmless variables only. The starter starts ``restore`` in place of a rank. ``restore`` reads that memory
through ``/proc``, which only the same account and root can do, adds the variables that the starter has set, and
executes the rank.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from mtrain.system import environment

VARIABLE = "MTRAIN_WITHHELD_ENVIRONMENT"
"""Variable with the path at which ``restore`` finds the stored environment; ranks do not have it."""
CANNOT_EXECUTE = 127
"""Exit status of a shell for a command that does not exist."""


def withholding(verb: str, python: str) -> tuple[str, ...]:
    """Return the beginning of a command that hides the environment from a starter ("keep"), or gives it back ("restore")."""
    return (python, "-m", "mtrain.launchers.withheld", verb)


def main(argv: Sequence[str]) -> int:
    """Run ``keep`` or ``restore``; returns only where the command cannot be executed."""
    verb, *command = argv
    try:
        environ = {"keep": keep, "restore": restore}[verb](os.environ)
        os.execvpe(command[0], command, environ)  # noqa: S606
    except OSError as error:
        print(f"error: {command[0]} cannot be started: {error}", file=sys.stderr, flush=True)
    return CANNOT_EXECUTE


def keep(environ: Mapping[str, str]) -> dict[str, str]:
    """Store ``environ`` in memory for as long as this process lives; return the variables that the starter may see."""
    descriptor = os.memfd_create("environment", 0)  # no close-on-exec: the starter holds it open
    with os.fdopen(os.dup(descriptor), "wb") as file:
        file.write(b"\0".join(os.fsencode(f"{name}={value}") for name, value in environ.items()))
    return environment.harmless(environ) | {VARIABLE: f"/proc/{os.getpid()}/fd/{descriptor}"}


def restore(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment that ``keep`` has stored, overridden by ``environ``, which the starter gave to its rank.

    Raises:
        OSError: the starter has ended, or runs under another account.
    """
    stored = Path(environ[VARIABLE]).read_bytes()
    pairs = (os.fsdecode(entry).partition("=") for entry in stored.split(b"\0") if entry)
    restored = {name: value for name, _, value in pairs} | dict(environ)
    del restored[VARIABLE]
    return restored


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
