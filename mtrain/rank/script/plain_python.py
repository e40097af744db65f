"""A script's job when plain Python runs the script: one rank, in a run folder of its own."""

import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

from mtrain.errors import Interrupted, ScriptError
from mtrain.rank.process import StopRequest
from mtrain.rank.script.job import RankJob
from mtrain.rank.script.settings import PLAIN, change_values
from mtrain.records.console import make_display
from mtrain.spec import config, terminal
from mtrain.system import runfolder
from mtrain.system.runfolder import RunFolder


@contextlib.contextmanager
def solo_job(framework: str | None, *, resumed_on: str = "solo") -> Iterator[RankJob]:
    """Make the job of one rank that ``mtrain.session`` uses without ``mtrain run``.

    ``resumed_on``: the backend that the advice names after the job was asked to end.

    Raises:
        ScriptError: ``framework`` is not a framework.
    """
    # A process never has two frameworks, so the one that the script has imported already is the one that it trains with.
    if framework is None:
        framework = "paddle" if "paddle" in sys.modules and "torch" not in sys.modules else "torch"
    if framework not in ("torch", "paddle"):
        raise ScriptError(f"mtrain.session: framework={framework!r} given; expected 'torch' or 'paddle'")
    loaded = config.load(PLAIN, environ={})
    spec = change_values(loaded.spec, {"backend.name": "solo", "backend.options": {"framework": framework}})
    name = Path(sys.argv[0]).stem or "script"
    folder = RunFolder(runfolder.create(Path(spec.report.dir), name))
    folder.make()
    stop = StopRequest()
    # Python sets signal handlers in its main thread only.
    in_main_thread = threading.current_thread() is threading.main_thread()
    display = make_display(spec.report.display, title=f"{folder.path.name}: {name} on solo")
    job = RankJob(
        resolved=loaded.job.with_spec(spec),
        run_folder=folder,
        resume=None,
        outside_paths=frozenset(),
        stop=stop,
        save_requested=stop.save,
        leave=_nothing,
        display=display,
    )
    try:
        with contextlib.closing(display), stop.listening() if in_main_thread else contextlib.nullcontext():
            yield job
    except Interrupted as error:
        left_out = ", ".join((runfolder.read_summary(folder.path) or {}).get("left_out") or ())
        way_on = f"mtrain run --backend {resumed_on} --nproc-per-node 1 --resume {folder.path} {sys.argv[0]}"
        terminal.say(f"{error}: {way_on}" + (f"; left out: {left_out}" if left_out else ""), err=True)
        raise SystemExit(128 + (stop.signal or signal.SIGINT)) from None


def exit_watched() -> Callable[[], bool]:
    """Watch from now on how the script ends; return a function that says, when Python ends, whether it has failed.

    Python keeps an exception that nobody has caught, but tells nobody which code a script has given to ``sys.exit``.
    """
    former, codes = sys.exit, []

    def exit_and_note(status: "sys._ExitCode | None" = None, /) -> NoReturn:
        codes.append(status)
        former(status)

    sys.exit = exit_and_note
    return lambda: getattr(sys, "last_value", None) is not None or bool(codes and codes[-1] not in (None, 0))


def _nothing(error: BaseException) -> None:
    """Do nothing: plain Python prints the traceback itself, and there is no starter that would read a record."""
