"""One piece of work at a time, beside the training loop or in it."""

import threading
import time
from collections.abc import Callable


class Background:
    """Runs work in a thread, one piece after the other; or at once where it is not ``asynchronous``."""

    def __init__(self, *, asynchronous: bool) -> None:
        self.waited_s = 0.0
        """Total time in seconds that callers have waited."""
        self._asynchronous = asynchronous
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def start(self, work: Callable[[], None], *, name: str) -> None:
        """Run ``work`` once the work before it has ended.

        Raises:
            Exception: what the work before it has raised, or this one where it is run at once.
        """
        self.wait()
        if not self._asynchronous:
            self._run(work)
            self.check()
            return
        self._thread = threading.Thread(target=self._run, args=(work,), name=name)
        self._thread.start()

    def wait(self) -> None:
        """Wait until nothing is being done. Raises the error of work that has failed."""
        if self._thread is not None:
            start = time.perf_counter()
            self._thread.join()
            self.waited_s += time.perf_counter() - start
            self._thread = None
        self.check()

    def check(self) -> None:
        """Raise the error of work that has failed in the meantime. It returns immediately and waits for nothing."""
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:
            self._error = error
