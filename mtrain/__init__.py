"""One YAML spec, any training backend.

``mtrain.train("my.yml", backend="ddp")`` does what ``mtrain train -c my.yml --backend ddp`` does; see ``mtrain.commands.functions``.

Importing ``mtrain`` imports no framework, and nothing else that takes time: the functions are loaded when they are first used.
torch and paddle are imported by ranks, one framework per process, once the backend is known.
"""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from mtrain.commands.functions import (
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
    from mtrain.commands.results import EvaluateResult, Evaluation, PredictResult, Records, TrainResult
    from mtrain.rank.script.rules import (
        LAMB,
        SGD,
        Adam,
        AdamW,
        Constant,
        Cosine,
        Exponential,
        Group,
        Linear,
        Lion,
        Muon,
        OneCycle,
        Polynomial,
        RMSprop,
        Step,
    )
    from mtrain.rank.script.session import Session, session
    from mtrain.spec.typed import Spec

__all__ = [
    "LAMB",
    "SGD",
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
    "Muon",
    "OneCycle",
    "Polynomial",
    "PredictResult",
    "RMSprop",
    "Records",
    "Session",
    "Spec",
    "Step",
    "TrainResult",
    "__version__",
    "compare_backends",
    "doctor",
    "evaluate",
    "load_spec",
    "open_run",
    "plan",
    "predict",
    "run",
    "session",
    "train",
]
_HOMES = {
    "commands.results": ("EvaluateResult", "Evaluation", "Records", "PredictResult", "TrainResult"),
    "spec.typed": ("Spec",),
    "rank.script.rules": (
        *("SGD", "Adam", "AdamW", "Lion", "RMSprop", "LAMB", "Muon", "Group"),
        *("Constant", "Cosine", "Exponential", "Linear", "OneCycle", "Polynomial", "Step"),
    ),
    "rank.script.session": ("session", "Session"),
}
"""Module -> the public names that it defines; all others are in ``commands.functions``."""
_OF_PACKAGES = {
    "mtrain_clusters": ("SubmittedJob", "open_job", "submit"),
    "mtrain_deploy": ("export", "prune", "quantise", "serve"),
    "mtrain_sweep": ("SweepResult", "SweepTrial", "open_sweep", "sweep"),
    "mtrain_tensorflow": ("keras",),
    "mtrain_ui": ("serve_runs", "write_report"),
}
"""Package -> its names that are here too while it is installed. Type checkers follow them in the package alone."""


def __getattr__(name: str) -> Any:
    """Load the public functions and results at their first use."""
    from importlib import import_module

    from mtrain.spec import faces

    package = next((package for package, names in _OF_PACKAGES.items() if name in names), None)
    if package is None:
        try:
            return faces.attributes("mtrain", {**_HOMES, "commands.functions": __all__})(name)
        except ModuleNotFoundError as error:
            if error.name != "mtrain.spec.typed":
                raise
            return dict  # Installing mtrain writes that module; in a clone alone, a spec is any dict.
    from mtrain.spec import packages

    packages.check_version(package)
    try:
        return getattr(import_module(package), name)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        raise AttributeError(packages.absent(package.replace("_", "-"), f"mtrain.{name} is")) from None


def __dir__() -> list[str]:
    """Names for completion in an interactive session."""
    return sorted({*globals(), *__all__})
