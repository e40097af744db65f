"""The reporter for a user's own class or function, which a spec names by a reference."""

from typing import Any, ClassVar

from pydantic import BaseModel

from mtrain.core.interfaces.reporter import ReportedRun
from mtrain.errors import PluginError
from mtrain.records.adapted import Adapted, FunctionReporter, refusal
from mtrain.spec import references
from mtrain.spec.references import Reference
from mtrain.tasks.own import calls
from mtrain.tasks.own.dataset import AnyOptions, Referring

OFFERED = frozenset({"run"})
"""Parameter that mtrain gives to a class that takes it: a ``ReportedRun``."""


class OwnReporter(Referring, Adapted):
    """Stands for a user's own reporter."""

    section = "report.reporters"

    Options: ClassVar[type[BaseModel]] = AnyOptions  # type: ignore[assignment]

    def __init__(self, options: AnyOptions, run: ReportedRun) -> None:
        reference, values = self._reference_of(), dict(options.model_extra or {})
        target = references.import_object(reference)
        path = f"report.reporters.{reference.text}"
        if isinstance(target, type):
            made = calls.make(reference, values, {"run": run}, path=path, seed=None)
            if problem := refusal(made):
                raise PluginError(f"{path}: {problem}")
        else:
            made = FunctionReporter(target, values)
        super().__init__(made, run)

    @classmethod
    def is_on(cls, rank: int) -> bool:
        """See ``Reporter.is_on``. This imports the user's code."""
        return rank == 0 or bool(getattr(references.import_object(cls._reference_of()), "every_rank", False))


def refuse_unknown(reference: Reference, options: Any, *, path: str) -> None:
    """Refuse a reference that does not exist, and options that it does not take, by its text alone.

    Raises:
        PluginError: the file or the name does not exist.
        SpecError: an option is unknown.
    """
    parameters = references.look(reference)
    if parameters is not None:
        # A function receives the record in a parameter of any name, so none is required here.
        calls.refuse_unknown(reference, options, OFFERED | frozenset(parameters.required), path=path)
