"""Locks of builds of torch's extensions, which DeepSpeed and many scripts compile when they first need them.

Whoever builds makes a file ``lock``, keeps it open, and removes it at the end; all others wait until it is gone. If the builder
is killed, the file stays, and everybody waits for ever without a word.
"""

import itertools
import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

MOST_LOCKS = 8
"""Most locks that are looked at."""


def find_locks(environ: Mapping[str, str]) -> list[Path]:
    """Return the locks of builds that exist in the folder for extensions of processes with this environment."""
    own = environ.get("TORCH_EXTENSIONS_DIR")
    try:
        cache = environ.get("XDG_CACHE_HOME") or Path(environ.get("HOME") or Path.home()) / ".cache"
        # Only the default folder has one more for each version of Python and kind of device.
        found = Path(own).glob("*/lock") if own else Path(cache, "torch_extensions").glob("*/*/lock")
        return sorted(itertools.islice(found, MOST_LOCKS))
    except (OSError, RuntimeError):
        return []


def find_stale(environ: Mapping[str, str]) -> list[Path]:
    """Return the locks of builds that no process of this host has open."""
    found = find_locks(environ)
    held = _open_files() if found else set()  # which takes a while on a host with many processes
    return [path for path in found if str(path.resolve()) not in held]


def _open_files() -> set[str]:
    """Return the names of the files that processes have open, as far as this one may see them."""
    names = set()
    for folder in Path("/proc").glob("[0-9]*/fd"):
        try:
            descriptors = os.listdir(folder)
        except OSError:  # it has ended, or belongs to another user
            continue
        for each in descriptors:
            try:
                names.add(os.readlink(folder / each))
            except OSError:
                continue
    return names


def describe(paths: Sequence[Path]) -> str:
    """Say what locks without a holder do."""
    return (
        f"{', '.join(map(str, paths))}: left by a build that was killed, as it seems: no process of this host holds the lock, and a "
        "script that needs this extension waits for ever"
    )


def remedy(paths: Sequence[Path]) -> str:
    """Return what the user can do about locks without a holder."""
    return f"unless another host is building there: rm {shlex.join(map(str, paths))}"
