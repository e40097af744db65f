"""The reporter ``tensorboard``: curves for TensorBoard. ``report.tensorboard`` of a spec switches it."""

from typing import Any

from mtrain.core.interfaces.reporter import Record, ReportedRun, Reporter
from mtrain.spec import collector


class TensorBoard(Reporter):
    """Writes TensorBoard events into ``tensorboard/`` of the run folder."""

    shares_records = True

    def __init__(self, options: Any, run: ReportedRun) -> None:
        super().__init__(options, run)
        # Imported here, because every rank loads this class and only rank 0 writes.
        with collector.pause():
            from mtrain.records.tensorboard import Events

        self._drawn_at = -1
        self._events = Events(run.folder / "tensorboard", start_update=run.start_update)

    def update(self, record: Record) -> None:
        """Write losses, learning rate and speed of one update."""
        self._events.update(record)

    def evaluation(self, record: Record) -> None:
        """Write the metrics of one evaluation."""
        self._events.evaluation(record)
        self._images(record, int(record["update"]))

    def image(self, record: Record) -> None:
        """Write a picture that a script has made."""
        content = (self.run.folder / record["file"]).read_bytes()
        self._events.image(str(record["name"]), content, update=int(record["update"]))

    def histogram(self, record: Record) -> None:
        """Write a histogram of a script."""
        self._events.histogram(str(record["name"]), record["counts"], record["edges"], update=int(record["update"]))

    def end(self, record: Record) -> None:
        """Write the images of a job that is done, and all events that wait."""
        self._images(record, int(record.get("updates", 0)))
        self._events.close()

    def failure(self, record: Record) -> None:
        """As at any other end."""
        self._events.close()

    def _images(self, record: Record, update: int) -> None:
        """Write the images that were drawn, for another reporter or at the end, once for each update."""
        for name in record.get("images", ()) if update != self._drawn_at else ():
            file = self.run.folder / name
            self._events.image(f"evaluation/{file.stem}", file.read_bytes(), update=update)
            self._drawn_at = update
