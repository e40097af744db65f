"""Check the names of runs, which become folders, and the ids of jobs, which become words of a scheduler's commands."""

import re

from mtrain.errors import UsageError
from mtrain.spec.terminal import one_line

LONGEST_NAME = 200
"""Largest length of a run's name in bytes. A file system takes 255, and folders such as NAME-evaluate-2 need the rest."""
_JOB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,252}")
SHOWN = 60


def checked_run_name(name: str) -> str:
    """Return ``name`` if a folder of a run can have it: the name of one folder, without control characters.

    Raises:
        UsageError: it would lead out of the folder of runs, is hidden, or would be read as an option of a command.
    """
    is_one_folder = "/" not in name and not name.startswith((".", "-")) and name.strip() == name != ""
    if is_one_folder and one_line(name) == name and len(name.encode()) <= LONGEST_NAME:
        return name
    raise UsageError(
        f"run name '{one_line(name, limit=SHOWN)}': expected the name of one folder, of at most {LONGEST_NAME} bytes, without "
        "'/' and not beginning with '.' or '-'; give the folder of runs with -o report.dir=FOLDER"
    )


def checked_job_id(number: str) -> str:
    """Return ``number`` if it can be a scheduler's id of a job: letters, digits, ".", "_" and "-", no "-" in front.

    Raises:
        UsageError: it is anything else.
    """
    # ``scancel`` would read "--user=root" as an option.
    if isinstance(number, str) and _JOB_ID.fullmatch(number):
        return number
    shown = one_line(number, limit=SHOWN)
    raise UsageError(
        f"job id '{shown}': expected letters, digits, '.', '_' and '-', beginning with a letter or a digit"
    )
