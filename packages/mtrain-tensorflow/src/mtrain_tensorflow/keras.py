"""Records, checkpoints and exact stops for scripts that train with TensorFlow and Keras themselves, alone or with Horovod.

``mtrain_tensorflow.keras.Callback()`` is for ``model.fit``::

    model.fit(data, epochs=10, steps_per_epoch=100 // hvd.size(), callbacks=[*others, mtrain_tensorflow.keras.Callback()])

``mtrain_tensorflow.keras.attach(model, optimizer)`` is for loops of one's own with ``tf.GradientTape``::

    training = mtrain_tensorflow.keras.attach(model, optimizer, updates=1000)
    for images, labels in training.batches(data):
        loss = train_step(images, labels)
        training.step(loss=loss)

The script is started by ``mtrain run --backend horovod SCRIPT``, or by plain Python as a job of one rank. Needs TensorFlow 2.15
with its own Keras.
"""

import sys
from collections.abc import Iterable, Iterator
from importlib import import_module
from typing import Any

from mtrain.errors import ScriptError
from mtrain_tensorflow.job import KerasJob, rest

__all__ = ["Attached", "Callback", "attach"]


def Callback() -> Any:
    """Return a callback of Keras for ``model.fit``; every rank must give one, behind those that average metrics.

    It writes the running means that Keras shows to ``metrics.jsonl`` and all reporters, saves as the section ``checkpoint`` of
    the spec says, saves and ends the job at SIGTERM after the update that is under way, and lets ``fit`` go on in
    the middle of an epoch when the job is resumed.

    Raises:
        ScriptError: the ranks were not started by mtrain.
    """
    return _part("fitting").FitCallback(_join_job())


def attach(
    model: Any, optimizer: Any, *, updates: int | None = None, updates_per_epoch: int | None = None
) -> "Attached":
    """Join a loop with ``tf.GradientTape`` to the job; every rank must call, once, before the first update.

    Args:
        model: A model of Keras that has its variables, or a list of variables.
        optimizer: The optimizer that changes them; one that Horovod has wrapped will do.
        updates: Updates in all, for the progress that is shown.
        updates_per_epoch: Updates of an epoch; without them there is one epoch.

    Raises:
        ScriptError: the ranks were not started by mtrain, or the model has no variables yet.
        CheckpointError: the checkpoint that is resumed is of another model.
    """
    is_model = hasattr(model, "variables")
    weights = list(model.variables if is_model else model)
    if not weights:
        raise ScriptError(
            "mtrain_tensorflow.keras.attach: the model has no variables before its first batch; begin it with "
            "tf.keras.layers.Input(shape=...), or call model.build(...)"
        )
    job = _join_job()
    variables = _part("variables").Variables(model if is_model else None, weights, optimizer)
    job.begin(variables, total=updates, updates_per_epoch=updates_per_epoch)
    return Attached(job, updates=updates, updates_per_epoch=updates_per_epoch)


class Attached:
    """A loop of one's own that is joined to the job."""

    def __init__(self, job: KerasJob, *, updates: int | None, updates_per_epoch: int | None) -> None:
        self._job = job
        self._updates = updates
        self._updates_per_epoch = updates_per_epoch

    @property
    def update(self) -> int:
        """Number of updates that are done; after a resume, those of before count."""
        return self._job.progress.update

    @property
    def epoch(self) -> int:
        """Number of epochs that are done."""
        return self._job.progress.epoch

    def batches(self, data: Iterable[Any]) -> Iterator[Any]:
        """Yield the batches of ``data``, from the one on that comes after those of before a resume, to the last update.

        ``data`` gives the batches of all epochs of this rank, in an order that seeds determine.
        """
        for batch in rest(iter(data), self.update):
            if self._updates is not None and self.update >= self._updates:
                return
            yield batch

    def step(self, **losses: Any) -> None:
        """Note that an update was made, with its losses on this rank; every rank must call, after each update.

        The means over the ranks are recorded. Where the job was asked to end, it is saved and ends here.
        """
        # Without a length of epochs, all updates are in one.
        position = self._job.progress.position + 1
        ended = position == self._updates_per_epoch
        self._job.report_update(
            {name: float(value) for name, value in losses.items()}, position=position, ended=ended, place={}
        )

    def evaluated(self, **metrics: Any) -> None:
        """Record an evaluation, as means over the ranks; every rank must call."""
        self._job.report_evaluation({name: float(value) for name, value in metrics.items()})


def _part(name: str) -> Any:
    """Import a module of mtrain that needs TensorFlow."""
    # When it is used: importing this module must not bring TensorFlow into a process that has another framework.
    return import_module(f"mtrain_tensorflow.{name}")


def _join_job() -> KerasJob:
    """Return the job of this script, over the ranks of Horovod where the script has called ``hvd.init()``."""
    collectives = _part("collective")
    hvd: Any = sys.modules.get("horovod.tensorflow")
    is_joined = hvd is not None and hvd.is_initialized() and hvd.size() > 1
    collective = collectives.TensorflowCollective(hvd) if is_joined else collectives.Alone()
    return KerasJob(collective, device=_part("probe").device())
