"""The journal of a sweep: its trials in an SQLite file, written by Optuna's storage.

Each change is one transaction: a trial is there with all its values or not at all, and it ends with its state and its value
at once. So the journal is whole after a kill at any moment.
"""

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import optuna
from optuna.exceptions import StorageInternalError
from optuna.storages import RDBStorage
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState
from sqlalchemy.exc import OperationalError

from mtrain.errors import UsageError
from mtrain.spec.files import open_file
from mtrain_sweep.definition import Direction

FILE = "study.db"
STUDY = "mtrain"
MAGIC = b"SQLite format 3\0"
REASON, UPDATE, SECONDS = "reason", "update", "seconds"
"""What the journal notes about a trial that has ended."""
REMEDY = "put a copy of it there, or begin another sweep: each run in trials/ is whole, and goes on by itself"
UNREADABLE = ("database is locked", "unable to open", "readonly database", "disk is full", "disk I/O error")
"""What SQLite says of a file that may be whole."""
SIDECARS = ("", "-journal", "-wal", "-shm")
"""What SQLite adds to the name of a file for those that belong to it."""


FAILURES = (OperationalError, StorageInternalError)
"""What Optuna raises where the file cannot be written to."""


class Journal:
    """The trials of a sweep.

    Raises:
        UsageError: there is none, it is damaged, or it cannot be read now.
    """

    def __init__(self, folder: Path, *, direction: Direction | None = None) -> None:
        """Open the journal in ``folder``; with a direction, make it if there is none."""
        self.file = folder / FILE
        if self.file.is_symlink():  # SQLite would write where it leads
            raise UsageError(f"{self.file}: is a link; put the file there in its place")
        # A new journal would begin with trial 0 again, in the folder that another trial has.
        if direction is not None and not self.file.exists() and not any(folder.glob("specs/*.yml")):
            _make(self.file, direction)
        if not self.file.is_file():
            raise UsageError(f"{folder}: has no {FILE}; the sweep has not begun, or its journal was removed: {REMEDY}")
        if not _looks_like_sqlite(self.file):
            raise UsageError(f"{self.file}: is no SQLite file; the journal of this sweep is damaged: {REMEDY}")
        try:
            self._storage = _storage(self.file)
            _refuse_broken_pages(self._storage)
            self._study = self._storage.get_study_id_from_name(STUDY)
            if any(not _is_sound(place, trial) for place, trial in enumerate(self.trials())):
                raise ValueError("a trial has no number, or a value that is none")
        except Exception as error:  # the libraries below raise errors of many kinds for a damaged file
            reason = (str(error).splitlines() or [""])[0]
            if any(word in reason for word in UNREADABLE):
                raise UsageError(f"{self.file}: cannot be read now ({reason}); try again") from error
            raise UsageError(
                f"{self.file}: cannot be read as a journal ({reason}); it is damaged, or of another program: {REMEDY}"
            ) from error

    def trials(self) -> list[FrozenTrial]:
        """Return all trials, by number."""
        return sorted(self._storage.get_all_trials(self._study), key=lambda trial: trial.number)

    def add(self, trial: FrozenTrial) -> int:
        """Add a trial, and return its number."""
        return self._storage.get_trial(self._storage.create_new_trial(self._study, template_trial=trial)).number

    def report(self, number: int, step: int, value: float, notes: Mapping[str, Any]) -> None:
        """Note the metric after one evaluation of a running trial, and what the pruner says of it."""
        trial = self._id(number)
        for key, note in notes.items():
            self._storage.set_trial_system_attr(trial, key, note)
        self._storage.set_trial_intermediate_value(trial, step, value)

    def end(self, number: int, state: TrialState, *, value: float | None = None, notes: Mapping[str, Any]) -> None:
        """End a trial."""
        trial = self._id(number)
        for key, note in notes.items():
            self._storage.set_trial_user_attr(trial, key, note)
        self._storage.set_trial_state_values(trial, state, None if value is None else [value])

    def close(self) -> None:
        """Close the file."""
        self._storage.remove_session()
        self._storage.engine.dispose()

    def _id(self, number: int) -> int:
        return self._storage.get_trial_id_from_study_id_trial_number(self._study, number)


def _refuse_broken_pages(storage: RDBStorage) -> None:
    """Look at all pages of the file: reading the trials alone may not touch those that are lost.

    Raises:
        ValueError: the file is not whole.
    """
    with storage.engine.connect() as connection:
        kinds = connection.exec_driver_sql("SELECT DISTINCT type FROM sqlite_master").scalars().all()
        # SQLite reads only the pages that a query needs, and would miss a damaged one.
        found = connection.exec_driver_sql("PRAGMA quick_check(1)").scalar()
    if found != "ok" or not {"table", "index"}.issuperset(kinds):  # a view may have rows without end
        raise ValueError(str(found) if found != "ok" else f"it has a {' and a '.join(kinds)}")


def _is_sound(place: int, trial: FrozenTrial) -> bool:
    """Return whether a trial, the one at this place, has the number and the kinds of values that a sweep writes."""
    values = (*(trial.values or ()), *trial.intermediate_values.values())
    return trial.number == place and all(isinstance(value, int | float) for value in values)


def _make(file: Path, direction: Direction) -> None:
    """Make an empty journal. It gets its name when it is complete, so that a kill leaves none or a whole one."""
    temporary = file.with_name(f".{file.name}")
    for ending in SIDECARS:  # of a lost journal: SQLite would roll the new one back by them
        temporary.with_name(temporary.name + ending).unlink(missing_ok=True)
        file.with_name(file.name + ending).unlink(missing_ok=True)
    storage = _storage(temporary)
    wanted = StudyDirection.MINIMIZE if direction == "min" else StudyDirection.MAXIMIZE
    storage.create_new_study([wanted], STUDY)
    storage.remove_session()
    storage.engine.dispose()
    temporary.replace(file)


def _storage(file: Path) -> RDBStorage:
    # Optuna logs each trial to the terminal, where the sweep has lines of its own.
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return RDBStorage(f"sqlite:///{_quote(file)}")


def _looks_like_sqlite(file: Path) -> bool:
    try:
        with open_file(file) as opened:
            return opened.read(len(MAGIC)) == MAGIC
    except OSError as error:
        raise UsageError(f"{file}: cannot be read: {error.strerror}") from error


def _quote(file: Path) -> str:
    """Return a path as SQLAlchemy takes it in a URL, in which `?` begins the options."""
    path = str(file.absolute())
    if "?" in path or "%" in path:
        raise UsageError(f"--out {file.parent}: a folder of a sweep must not have ? or % in its path; give another one")
    return path
