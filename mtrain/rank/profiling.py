"""Profiles of some updates of a job, see ``report.profile``."""

from collections.abc import Sequence
from contextlib import ExitStack

from mtrain.core.interfaces import Progress, RankSession
from mtrain.errors import SpecError
from mtrain.spec import outputs
from mtrain.system.runfolder import RunFolder


class Profile:
    """Records the updates that a spec names, and writes them into the run folder when the last one has ended.

    It is called as ``Hooks.inspect`` and ``Hooks.close``. A job that ends before writes what it has recorded.

    Args:
        session: The backend's, of this rank.
        updates: The first and the last update, counted from 1 as in records; None: nothing is recorded.
        run_folder: Where the file of this rank is written.

    Raises:
        SpecError: The backend records no profile.
    """

    def __init__(self, session: RankSession, updates: Sequence[int] | None, run_folder: RunFolder) -> None:
        self._record = session.capabilities.profile
        if updates is not None and self._record is None:
            raise SpecError("report.profile: this backend records no profile; leave the key out")
        self._updates = updates
        self._folder = run_folder.profiles
        self._file = self._folder / f"rank-{session.collective.rank}.json"
        # A stack, since the recording begins in one call, ends in another, and may never begin.
        self._recording = ExitStack()
        self._is_recording = False

    def __call__(self, progress: Progress) -> None:
        """Begin before the first update, or end after the last one."""
        if self._updates is None or self._record is None:
            return
        first, last = self._updates
        if progress.update == last:
            self.close()
        elif first - 1 <= progress.update < last and not self._is_recording:  # a resumed job may begin between them
            self._is_recording = True
            outputs.make_folder(self._folder)
            self._recording.enter_context(self._record(self._file))

    def close(self) -> None:
        """End the recording, if there is one, and write it."""
        self._recording.close()
