"""Sweeps from Python: what ``mtrain sweep`` does."""

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mtrain.commands import functions as api
from mtrain.commands import python_calls
from mtrain.errors import UsageError
from mtrain.spec.calls import explained
from mtrain_sweep.definition import PRUNERS, SAMPLERS, Pruner, Sampler
from mtrain_sweep.results import Reason, SweepResult, SweepTrial

__all__ = ["SweepResult", "SweepTrial", "open_sweep", "sweep"]


@explained
def sweep(  # noqa: PLR0913 - what the command takes
    spec: python_calls.SpecSource = None,
    *,
    space: python_calls.File | Mapping[str, Any] = None,
    over: Mapping[str, Sequence[Any]] | None = None,
    trials: int | None = None,
    jobs: int = 1,
    sampler: Sampler | None = None,
    pruner: Pruner | None = None,
    metric: str | None = None,
    out: python_calls.File = None,
    resume: bool = False,
    max_failures: int = 3,
    backend: str | None = None,
    ranks: int | None = None,
    overrides: Mapping[str, Any] | None = None,
    quiet: bool = False,
) -> SweepResult:
    """Search for good values of a spec, by trials that are jobs of their own, and wait for the end.

    Call it from the main thread: Ctrl-C asks the trials to save and to end, and ``resume`` goes on.

    Args:
        spec: see ``mtrain.commands.functions``; as ``backend``, ``ranks`` and ``overrides``.
        space: the search space: a YAML file, the name of a shipped one, or a dict of its content.
        over: values that are combined with all others, such as ``{"backend": ["ddp", "horovod"], "ranks": [1, 2]}``.
        trials: number of trials in all; None: 20, or the whole grid.
        jobs: number of trials at the same time.
        sampler: ``grid``, ``random``, ``tpe``, ``cmaes`` or ``evolve``; None: ``tpe``, or ``grid`` where only ``over`` is given.
        pruner: ``median`` or ``halving`` end bad trials early; None: no trial is ended.
        metric: a metric of the evaluations; higher is better, ``NAME:min``: lower is; None: ``score``.
        out: folder of the sweep; None: ``runs/NAME-sweep``.
        resume: go on with the sweep in ``out``, by default the newest one.
        max_failures: so many failed trials in a row end the sweep.
        quiet: print nothing of what is going on.

    Raises:
        UsageError: the spec, the space or an option is wrong; nothing was started.
    """
    from mtrain_sweep import running as sweeping

    if threading.current_thread() is not threading.main_thread():
        raise UsageError("mtrain.sweep was called from another thread; call it from the main thread")
    for name, value, known in (("sampler", sampler, SAMPLERS), ("pruner", pruner, PRUNERS)):
        if value is not None and value not in known:
            raise UsageError(f"{name}={value!r}: expected one of {', '.join(known)}")
    request = python_calls.request_of(
        sweeping.SweepRequest,
        locals(),
        load=lambda: api.load_spec(spec, backend=backend, ranks=ranks, overrides=overrides),
        named=spec is not None or bool(overrides) or backend is not None or ranks is not None,
        space=space if isinstance(space, Mapping) or space is None else Path(space),
        over=[f"{name}={','.join(map(str, values))}" for name, values in (over or {}).items()],
        tell=python_calls.teller(quiet=quiet),
    )
    folder, verdict = sweeping.sweep(request)
    if verdict.text:
        request.tell(verdict.text)
    return _opened(folder, verdict.reason)


@explained
def open_sweep(folder: python_calls.File) -> SweepResult:
    """Open the folder of a sweep, also while it runs.

    Raises:
        UsageError: it is not the folder of a sweep, or its files are damaged.
    """
    return _opened(None if folder is None else Path(folder).absolute(), "unknown")


def _opened(folder: Path | None, reason: Reason) -> SweepResult:
    from mtrain_sweep import results, starting

    opened = starting.opened(folder)
    return results.result_of(opened.folder, opened.definition, opened.trials, reason)
