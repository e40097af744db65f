"""One YAML spec, any training backend.

``mtrain.train("my.yml", backend="ddp")`` does what ``mtrain train -c my.yml --backend ddp`` does; see ``mtrain.api.functions``.

Importing ``mtrain`` imports no framework, and nothing else that takes time: the functions are loaded when they are first used.
torch and paddle are imported by ranks, one framework per process, once the backend is known.
"""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from mtrain.api.derived import export, prune, quantise
    from mtrain.api.functions import (
        JobFailed,
        compare_backends,
        doctor,
        evaluate,
        load_spec,
        open_run,
        plan,
        predict,
        run,
        train,
    )
    from mtrain.api.queue import SubmittedJob
    from mtrain.api.results import EvaluateResult, Evaluation, PredictResult, Records, TrainResult
    from mtrain.api.submitted import open_job, submit
    from mtrain.api.swept import SweepResult, SweepTrial, open_sweep, sweep
    from mtrain.api.typed import Spec
    from mtrain.api.watching import serve_runs, write_report
    from mtrain.deploy.serve import serve
    from mtrain.rank.script.rules import (
        LAMB,
        SGD,
        Adadelta,
        Adam,
        AdamW,
        Constant,
        Cosine,
        Exponential,
        Group,
        Linear,
        Lion,
        OneCycle,
        Polynomial,
        RMSprop,
        Step,
    )
    from mtrain.rank.script.session import Session, session

__all__ = [
    "LAMB",
    "SGD",
    "Adadelta",
    "Adam",
    "AdamW",
    "Constant",
    "Cosine",
    "EvaluateResult",
    "Evaluation",
    "Exponential",
    "Group",
    "JobFailed",
    "Linear",
    "Lion",
    "OneCycle",
    "Polynomial",
    "PredictResult",
    "RMSprop",
    "Records",
    "Session",
    "Spec",
    "Step",
    "SubmittedJob",
    "SweepResult",
    "SweepTrial",
    "TrainResult",
    "__version__",
    "compare_backends",
    "doctor",
    "evaluate",
    "export",
    "load_spec",
    "open_job",
    "open_run",
    "open_sweep",
    "plan",
    "predict",
    "prune",
    "quantise",
    "run",
    "serve",
    "serve_runs",
    "session",
    "submit",
    "sweep",
    "train",
    "write_report",
]
_HOMES = {
    "api.derived": ("export", "prune", "quantise"),
    "api.results": ("EvaluateResult", "Evaluation", "Records", "PredictResult", "TrainResult"),
    "api.queue": ("SubmittedJob",),
    "api.submitted": ("open_job", "submit"),
    "api.swept": ("SweepResult", "SweepTrial", "open_sweep", "sweep"),
    "api.typed": ("Spec",),
    "api.watching": ("serve_runs", "write_report"),
    "deploy.serve": ("serve",),
    "rank.script.rules": (
        *("SGD", "Adam", "AdamW", "Lion", "RMSprop", "Adadelta", "LAMB", "Group"),
        *("Constant", "Cosine", "Exponential", "Linear", "OneCycle", "Polynomial", "Step"),
    ),
    "rank.script.session": ("session", "Session"),
}
"""Module below ``mtrain`` -> the public names that it defines; all others are in ``api.functions``."""


def __getattr__(name: str) -> Any:
    """Load the public functions and results at their first use."""
    if name in __all__:
        from importlib import import_module

        from mtrain.spec import collector

        home = next((module for module, names in _HOMES.items() if name in names), "api.functions")
        with collector.paused():
            return getattr(import_module(f"mtrain.{home}"), name)
    raise AttributeError(f"module 'mtrain' has no attribute {name!r}")


def __dir__() -> list[str]:
    """Names for completion in an interactive session."""
    return sorted({*globals(), *__all__})
