"""Work beside the training loop, or beside other work."""

import threading
import time
from collections.abc import Callable
from queue import Queue
from typing import Any


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


class Beside:
    """A thread that does what it is given, in that order, while it is entered.

    It works until its end also when Python ends meanwhile, which the pools of Python's library refuse.
    """

    def __init__(self) -> None:
        self._todo: Queue[Callable[[], Any] | None] = Queue()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="beside")

    def __enter__(self) -> "Beside":
        self._thread.start()
        return self

    def __exit__(self, *error: Any) -> None:
        self._todo.put(None)
        self._thread.join()

    def do(self, work: Callable[[], Any]) -> None:
        """Add a piece of work."""
        self._todo.put(work)

    def wait(self) -> None:
        """Wait until all of it is done. Raises the first error."""
        self._todo.join()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        while (work := self._todo.get()) is not None:
            try:
                work()  # also after an error: it may close what was opened for it
            except BaseException as error:
                self._error = self._error or error
            finally:
                del work  # what it works on can be dropped
                self._todo.task_done()
