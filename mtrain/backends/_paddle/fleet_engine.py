"""The Paddle engine over Fleet, whose hooks exchange gradients while they are computed."""

from paddle.nn import Layer

from mtrain.backends._paddle.engine import PaddleEngine
from mtrain.backends._paddle.job import FleetJob
from mtrain.backends.base import Check
from mtrain.core.interfaces import Recipe
from mtrain.core.overriding import override
from mtrain.core.update.order import Exchange


class FleetEngine(PaddleEngine):
    """One rank of a job of at least two on Fleet. ``prepare`` returns the model inside Paddle's ``DataParallel``."""

    def __init__(self, job: FleetJob, target: str, *, check: Check) -> None:
        super().__init__(job.collective, target, check=check)
        self._job = job

    @override
    def wrap(self, model: Layer, recipe: Recipe) -> tuple[Layer, Exchange]:
        return self._job.wrap(model, waits=self.waits)
