"""Defaults of the members of a task plugin that not every task needs."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from pydantic import BaseModel

from mtrain.core.interfaces import Array, Collective, HostBatch, Variation
from mtrain.core.interfaces.details import Detail
from mtrain.core.interfaces.live import LiveImages
from mtrain.core.interfaces.program import ProgramInput
from mtrain.spec.section import NoOptions as NoOptions
from mtrain.spec.section import Section


class TaskBase:
    """Base class of task plugins: see ``TaskKind`` of ``core.interfaces``, whose optional part it implements."""

    Options: ClassVar[type[BaseModel]] = NoOptions
    sections: ClassVar[Mapping[str, type[Section]]] = {}
    in_ranks: ClassVar[bool] = False

    @classmethod
    def own_code(cls, spec: Any) -> dict[str, str]:
        """See ``TaskKind.own_code``. By default a job runs the code of plugins alone."""
        return {}

    @classmethod
    def refuse(cls, spec: Any, *, framework: str) -> None:
        """See ``TaskKind.refuse``. By default nothing is refused."""
        return

    def entered(self, *, collective: Collective, seed_framework: Callable[[int], None]) -> None:
        """Take what a job's data may need of the running job, on each rank once the model is prepared.

        By default data need nothing of it.

        Args:
            collective: Communication among the ranks.
            seed_framework: Seeds the framework's random generators.
        """
        return

    @classmethod
    def divided(cls, data: Any, read_all: Callable[[], Any]) -> tuple[Any, Any] | None:
        """See ``TaskKind.divided``. By default a data set brings both splits."""
        return None

    @classmethod
    def prepared(cls, data: Any, content: Any) -> Any:
        """See ``TaskKind.prepared``. By default a split is used as it was read."""
        return content

    @classmethod
    def unreadable(cls, spec: Any, files: Sequence[Path]) -> dict[Path, str]:
        """See ``TaskKind.unreadable``. By default ``TaskKind.images`` finds out."""
        return {}

    @classmethod
    def inputs(cls, spec: Any) -> Sequence[ProgramInput]:
        """See ``TaskKind.inputs``. By default models cannot be exported."""
        return ()

    @classmethod
    def preprocessing(cls, spec: Any) -> dict[str, Any]:
        """See ``TaskKind.preprocessing``. By default nothing is said."""
        return {}

    @classmethod
    def live(cls, spec: Any, labels: Mapping[str, Any]) -> LiveImages | None:
        """See ``TaskKind.live``. By default a task predicts on files alone."""
        return None

    @classmethod
    def varied(cls, batch: HostBatch, *, step: int) -> Sequence[tuple[HostBatch, Variation]]:
        """See ``TaskKind.varied``. By default there are no variations."""
        return ()

    @classmethod
    def model_options(cls, spec: Any, defaults: Mapping[str, Any]) -> dict[str, Any]:
        """See ``TaskKind.model_options``. By default there are none."""
        return {}

    def samples_digest(self) -> str:
        """See ``TaskData.samples_digest``. By default samples are told by their number."""
        return ""

    def unit(self) -> tuple[str, int] | None:
        """See ``TaskData.unit``. By default samples are counted."""
        return None

    def sample_weights(self, metrics: Mapping[str, float]) -> Array | None:
        """See ``TaskData.sample_weights``. By default each sample is trained once an epoch."""
        return None

    def details(self, evaluator: Any) -> Sequence[Detail]:
        """See ``TaskData.details``. By default metrics say everything."""
        return ()
