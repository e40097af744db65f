"""The limit of open files of this process, which a job on many hosts reaches."""

import resource

from mtrain.errors import UsageError

SPARE = 256
"""Files that a process has open besides those that are counted."""


def allow(count: int, *, what: str) -> None:
    """Raise this process's own limit, if need be, so that it can have ``count`` files open for ``what``.

    Raises:
        UsageError: the system allows less.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = count + SPARE
    if soft == resource.RLIM_INFINITY or needed <= soft:
        return
    if hard != resource.RLIM_INFINITY and needed > hard:
        raise UsageError(
            f"{what}: {needed} files must be open at once, and this machine allows a process {hard}; raise the limit "
            "(LimitNOFILE of systemd, or /etc/security/limits.conf), see `ulimit -Hn`"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
