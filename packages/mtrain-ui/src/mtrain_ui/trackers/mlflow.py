"""The reporter ``mlflow``: parameters, curves, images and checkpoints of a job as a run of an MLflow server or store."""

import io
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import Field

from mtrain.core.interfaces.reporter import ReportedRun
from mtrain.core.record_files import write_json
from mtrain.spec.files import MAX_OWN_BYTES, parse_json, read_bytes
from mtrain.system import environment
from mtrain_ui.trackers.tracker import Point, ServiceOptions, Tracker, import_library, parameters

# A resumed job goes on in the run that this file names.
FILE = "mlflow.json"
"""File of the run folder that names the MLflow run."""
MAX_METRICS = 1000
"""Largest number of metrics that one call of MLflow's interface accepts."""
MAX_PARAMETERS = 100
MAX_VALUE = 500
"""Characters of a parameter that every store accepts."""
# MLflow would try for minutes before it says that a server is down, and tell its makers about the use of it.
DEFAULTS = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",
    "MLFLOW_DISABLE_TELEMETRY": "true",
}
"""Variables that are set unless the user has."""
DOWN = ("INTERNAL_ERROR", "TEMPORARILY_UNAVAILABLE", "REQUEST_LIMIT_EXCEEDED", "DEADLINE_EXCEEDED")
"""Codes of MLflow's exceptions when a server cannot be reached, or cannot answer now."""
STATUS = {"done": "FINISHED", "interrupted": "KILLED", "failed": "FAILED"}


class MLflow(Tracker):
    """Sends the spec as parameters, losses, learning rates and metrics as metrics, and images. A resumed job goes on in the same run.

    What the job repeats after it is resumed is sent again with the same steps.
    """

    class Options(ServiceOptions):
        """The tracking store, and what the run is called there."""

        tracking_uri: str | None = Field(
            default=None,
            description="server or store, such as http://host:5000, sqlite:////data/mlflow.db or a folder; null: as MLflow has "
            "it (MLFLOW_TRACKING_URI)",
        )
        experiment: str = Field(default="mtrain", description="name of the experiment, which is made if it is missing")
        run_name: str | None = Field(default=None, description="null: the name of the run folder")

    def __init__(self, options: Options, run: ReportedRun) -> None:
        super().__init__(options, run)
        environment.set_defaults(DEFAULTS)
        self._client: Any = import_library(
            "mlflow", lambda mlflow: mlflow.MlflowClient(tracking_uri=options.tracking_uri)
        )
        self._id = ""

    def open(self) -> None:
        """Go on with the run that the run folder names, or make one."""
        self._id = self._resume_run() or self._create()

    def _resume_run(self) -> str | None:
        """Return the id of the run that the run folder names, set to running again; None: it names none that exists."""
        from mlflow.exceptions import MlflowException

        file = self.run.folder / FILE
        if not file.is_file():
            return None
        run_id = str(parse_json(read_bytes(file, limit=MAX_OWN_BYTES))["run_id"])
        try:
            self._client.update_run(run_id, status="RUNNING")
        except MlflowException as error:
            # A server that is away must not make a second run of the same job.
            if self.is_down(error):
                raise
            return None  # It was deleted, or the store is another one.
        return run_id

    def _create(self) -> str:
        options = self.options
        experiment = self._client.get_experiment_by_name(options.experiment)
        number = experiment.experiment_id if experiment else self._client.create_experiment(options.experiment)
        created = self._client.create_run(number, run_name=options.run_name or self.run.folder.name)
        run_id = str(created.info.run_id)
        write_json(self.run.folder / FILE, {"run_id": run_id, "tracking_uri": self._client.tracking_uri})
        self._send_parameters(run_id)
        return run_id

    def _send_parameters(self, run_id: str) -> None:
        from mlflow.entities import Param

        # A store in files makes folders of slashes.
        pairs = [(_allow(name).replace("/", "_"), value[:MAX_VALUE]) for name, value in parameters(self.run.spec)]
        for first in range(0, len(pairs), MAX_PARAMETERS):
            self._client.log_batch(run_id, params=[Param(*pair) for pair in pairs[first : first + MAX_PARAMETERS]])

    def send_points(self, points: Sequence[Point]) -> None:
        """See ``Tracker.send_points``."""
        from mlflow.entities import Metric

        now_ms = int(time.time() * 1000)
        for first in range(0, len(points), MAX_METRICS):
            part = points[first : first + MAX_METRICS]
            metrics = [Metric(_metric(name), value, now_ms, update) for name, value, update in part]
            self._client.log_batch(self._id, metrics=metrics)

    def send_image(self, name: str, content: bytes, update: int) -> None:
        """See ``Tracker.send_image``."""
        from PIL import Image

        with Image.open(io.BytesIO(content)) as image:
            self._client.log_image(self._id, image.convert("RGB"), key=name, step=update)

    def send_checkpoint(self, folder: Path, update: int) -> None:
        """See ``Tracker.send_checkpoint``."""
        self._client.log_artifacts(self._id, str(folder), artifact_path=f"checkpoints/{folder.name}")

    def send_end(self, reason: str, error: str) -> None:
        """See ``Tracker.send_end``."""
        if error:
            self._client.set_tag(self._id, "mtrain.error", error[:MAX_VALUE])
        self._client.set_terminated(self._id, status=STATUS.get(reason, "FAILED"))

    def is_down(self, error: Exception) -> bool:
        """See ``Tracker.is_down``."""
        from mlflow.exceptions import MlflowException

        return error.error_code in DOWN if isinstance(error, MlflowException) else super().is_down(error)


def _metric(name: str) -> str:
    """Return the name of a curve as MLflow takes it: ``metric/AP/cat`` becomes ``metric/AP.cat``."""
    # A store in files keeps ``metric/AP`` as a file, which cannot also be the folder of ``cat``.
    group, slash, rest = _allow(name).partition("/")
    return group + slash + rest.replace("/", ".")


def _allow(name: str) -> str:
    """Return a name with other characters than MLflow allows in the names of metrics and parameters replaced by ``_``."""
    return "".join(sign if sign.isalnum() or sign in "_-. /" else "_" for sign in name)
