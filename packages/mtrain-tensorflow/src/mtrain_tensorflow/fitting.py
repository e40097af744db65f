"""A callback of Keras that joins ``model.fit`` to a job."""

from typing import Any

import tensorflow as tf

from mtrain.errors import ScriptError
from mtrain_tensorflow import internals
from mtrain_tensorflow.job import KerasJob
from mtrain_tensorflow.variables import Variables


class FitCallback(tf.keras.callbacks.Callback):
    """Records, saves and stops ``model.fit``, and lets it go on where a checkpoint was written."""

    def __init__(self, job: KerasJob) -> None:
        super().__init__()
        self._job = job
        self._has_begun = False
        self._iterators = 0
        """Iterators that Keras has made of the data before the present one."""
        self._drawn = 0
        """Batches that were drawn from the present one."""
        self._iterator: Any = None
        self._skipped: Any = None
        """The iterator that stands where the checkpoint was written, in the place of ``_iterator``."""
        self._metrics: list[Any] | None = None

    def set_model(self, model: Any) -> None:
        """Take the model, and say where ``fit`` begins."""
        super().set_model(model)
        internals.begin_at(model, lambda: (self._job.progress.epoch, self._job.progress.position))

    def on_train_begin(self, logs: Any = None) -> None:
        """Restore the checkpoint that is resumed."""
        if self._has_begun:
            raise ScriptError(
                "mtrain_tensorflow.keras.Callback: given to model.fit twice; a script has one training with it, "
                "of as many epochs as it wants"
            )
        self._has_begun = True
        if not self.model.built:
            raise ScriptError(
                "mtrain_tensorflow.keras.Callback: the model has no variables before its first batch; begin it with "
                "tf.keras.layers.Input(shape=...), or call model.build(...)"
            )
        steps = self.params.get("steps")
        self._variables = Variables(self.model, self.model.variables, self.model.optimizer)
        total = None if steps is None else steps * self.params["epochs"]
        place = self._job.begin(self._variables, total=total, updates_per_epoch=steps)
        if place:
            self._iterators, self._drawn, self._metrics = place["iterators"], place["drawn"], place["metrics"]
        # Keras's function for a batch draws it from the iterator itself. One of ours calls it, and knows how many were drawn.
        self._train = self.model.train_function
        self.model.train_function = self._train_on

    def _train_on(self, iterator: Any) -> Any:
        """Train on the next batch; at a resume, on the one that comes after those of before."""
        if self._iterator is None:
            self._iterator = iterator
            self._skipped = self._moved_on(iterator)
        elif iterator is not self._iterator:
            self._iterator = self._skipped = iterator
            self._iterators, self._drawn = self._iterators + 1, 0
        # Not before the first batch: Keras resets its metrics when an epoch begins.
        if self._metrics is not None:
            self._variables.restore_metrics(self._metrics)
            self._metrics = None
        return self._train(self._skipped)

    def _moved_on(self, iterator: Any) -> Any:
        """Return the iterator that stands where the checkpoint was written."""
        # Each new iterator of a data set may shuffle anew, so as many are begun as there were before.
        data = internals.dataset_of(iterator)
        for number in range(self._iterators if data is not None else 0):
            next(iterator if number == 0 else iter(data), None)
        found = iterator if self._iterators == 0 or data is None else iter(data)
        for _ in range(self._drawn):
            next(found, None)
        return found

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Record the update, and end the job here where that was asked for."""
        before = self._job.progress.position
        self._drawn += batch + 1 - before
        steps = self.params.get("steps")
        self._job.report_update(
            {name: float(value) for name, value in (logs or {}).items()},
            position=batch + 1,
            ended=steps is not None and batch + 1 >= steps,
            place={"iterators": self._iterators, "drawn": self._drawn, "metrics": self._variables.metrics()},
        )

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Record what the epoch's evaluation has measured."""
        self._job.end_epoch()
        measured = {name: float(value) for name, value in (logs or {}).items() if name.startswith("val_")}
        if measured:
            self._job.report_evaluation(measured)

    def on_train_end(self, logs: Any = None) -> None:
        """Save, and give the model its own function back."""
        self._job.save_last()
        self.model.train_function = self._train
