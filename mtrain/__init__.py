"""One YAML spec, any training backend.

``mtrain.train("my.yml", backend="ddp")`` does what ``mtrain train -c my.yml --backend ddp`` does; see ``mtrain.api``.

Importing ``mtrain`` imports no framework, and nothing else that takes time: the functions are loaded when they are first used.
torch and paddle are imported by ranks, one framework per process, once the backend is known.
"""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from mtrain.api import (
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
    from mtrain.derived import export, prune, quantise
    from mtrain.results import EvaluateResult, Evaluation, Metrics, PredictResult, TrainResult
    from mtrain.script.rules import (
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
    from mtrain.script.session import Session, session
    from mtrain.serving import serve
    from mtrain.submitted import SubmittedJob, open_job, submit
    from mtrain.swept import SweepResult, SweepTrial, open_sweep, sweep
    from mtrain.typed import Spec
    from mtrain.watching import serve_runs, write_report

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
    "Metrics",
    "OneCycle",
    "Polynomial",
    "PredictResult",
    "RMSprop",
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
_IN_SCRIPTS = {"session": "session", "Session": "session"} | dict.fromkeys(
    (
        "SGD",
        "Adam",
        "AdamW",
        "Lion",
        "RMSprop",
        "Adadelta",
        "LAMB",
        "Group",
        "Constant",
        "Cosine",
        "Exponential",
        "Linear",
        "OneCycle",
        "Polynomial",
        "Step",
    ),
    "rules",
)
"""Names for users' own training scripts, with the module of ``mtrain.script`` that defines each."""

_RESULTS = ("EvaluateResult", "Evaluation", "Metrics", "PredictResult", "TrainResult")
"""Names that ``mtrain.results`` defines."""
_SUBMITTED = ("SubmittedJob", "open_job", "submit")
"""Names that ``mtrain.submitted`` defines."""
_WATCHING = ("serve_runs", "write_report")
"""Names that ``mtrain.watching`` defines."""
_DERIVED = ("export", "prune", "quantise")
"""Names that ``mtrain.derived`` defines."""
_SWEPT = ("SweepResult", "SweepTrial", "open_sweep", "sweep")
"""Names that ``mtrain.swept`` defines."""


def __getattr__(name: str) -> Any:
    """Load the public functions and results at their first use."""
    if name in __all__:
        from importlib import import_module

        modules = dict.fromkeys(_RESULTS, "results") | dict.fromkeys(_SUBMITTED, "submitted")
        modules |= dict.fromkeys(_WATCHING, "watching") | {"serve": "serving"}
        modules |= dict.fromkeys(_SWEPT, "swept") | dict.fromkeys(_DERIVED, "derived")
        module = f"script.{_IN_SCRIPTS[name]}" if name in _IN_SCRIPTS else modules.get(name, "api")
        return getattr(import_module(f"mtrain.{module}"), name)
    raise AttributeError(f"module 'mtrain' has no attribute {name!r}")


def __dir__() -> list[str]:
    """Names for completion in an interactive session."""
    return sorted({*globals(), *__all__})
