"""Describe the environment of a job, for its run folder: versions of packages, and facts about the machine."""

import os
import platform
import re
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import Any


def _packages() -> list[str]:
    """Return the names of this distribution and of its requirements, those of extras included."""
    try:
        requirements = metadata.requires("mtrain") or []
    except metadata.PackageNotFoundError:  # mtrain runs from a clone that is not installed.
        requirements = []
    matches = (re.match(r"[\w.-]+", line) for line in ["mtrain", *requirements])
    return sorted({match.group() for match in matches if match})


def describe_environment(environ: Mapping[str, str], *, argv: Sequence[str] = ()) -> dict[str, Any]:
    """Return the versions of packages, facts about the machine, and ``environ`` and ``argv``.

    The caller must have removed secrets from ``environ`` and from the command ``argv``.
    """
    versions = {}
    for name in _packages():
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "host": socket.gethostname(),
        "platform": platform.platform(),
        "python": sys.version,
        "cores": os.cpu_count(),
        "argv": list(argv),
        "versions": versions,
        "environment": dict(environ),
    }
