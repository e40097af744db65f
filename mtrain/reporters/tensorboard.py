"""The reporter ``tensorboard``: curves for TensorBoard. ``report.tensorboard`` of a spec switches it."""

from typing import Any

from mtrain.core.reporter import Record, ReportedRun, Reporter


class TensorBoard(Reporter):
    """Writes TensorBoard events into ``tensorboard/`` of the run folder."""

    def __init__(self, options: Any, run: ReportedRun) -> None:
        super().__init__(options, run)
        # Imported here, because every rank loads this class and only rank 0 writes.
        from mtrain.report.tensorboard import Events

        self._events = Events(run.folder / "tensorboard", start_update=run.start_update)

    def update(self, record: Record) -> None:
        """Write losses, rate and speed of one update."""
        self._events.update(record)

    def evaluation(self, record: Record) -> None:
        """Write the figures of one evaluation."""
        self._events.evaluation(record["figures"], update=record["update"])

    def end(self, record: Record) -> None:
        """Flush, and end the writer's thread."""
        self._events.close()

    def failure(self, record: Record) -> None:
        """As at any other end."""
        self._events.close()
