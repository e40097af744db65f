"""The reporter ``mlflow``: parameters and curves of a job as a run of an MLflow tracking server or store."""

import json
import math
import time
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from mtrain.core.reporter import Record, ReportedRun, Reporter
from mtrain.errors import PluginError
from mtrain.files import parse_json
from mtrain.report.history import rate_of
from mtrain.report.reporter import write_json
from mtrain.spec import remedies

FILE = "mlflow.json"
"""File of the run folder that names the MLflow run, so that a resumed job goes on in it."""
MAX_METRICS = 1000
"""Largest number of metrics that one call of MLflow's interface accepts."""
MAX_PARAMETERS = 100
MAX_VALUE = 500
"""Characters of a parameter that every store accepts."""
SPEEDS = ("norm", "samples_per_s", "wait_share", "memory_bytes")


class MLflow(Reporter):
    """Sends the spec as parameters, and losses, rates and figures as metrics. A resumed job goes on in the same run.

    What the job repeats after it is resumed is sent again with the same steps.
    """

    class Options(BaseModel):
        """The tracking store, and what the run is called there."""

        model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

        tracking_uri: str | None = Field(
            default=None,
            description="server or store, such as http://host:5000, sqlite:////data/mlflow.db or a folder; null: as MLflow has "
            "it (MLFLOW_TRACKING_URI)",
        )
        experiment: str = Field(default="mtrain", description="name of the experiment, which is made if it is missing")
        run_name: str | None = Field(default=None, description="null: the name of the run folder")
        send_every_s: float = Field(default=5.0, ge=0, description="seconds between two transfers of the curves")

    def __init__(self, options: Options, run: ReportedRun) -> None:
        super().__init__(options, run)
        try:
            from mlflow import MlflowClient
        except ModuleNotFoundError as error:
            raise PluginError(
                f"report.reporters.mlflow: the package {error.name} is not installed; install it with: {remedies.install('mlflow')}"
            ) from error
        self._client: Any = MlflowClient(tracking_uri=options.tracking_uri)
        self._waiting: list[tuple[str, float, int]] = []
        self._sent_at = time.monotonic()
        self._every_s = options.send_every_s
        self._id = self._resumed() or self._created(options)

    def _resumed(self) -> str | None:
        """Return the id of the run that the run folder names, set to running again; None: it names none that exists."""
        from mlflow.exceptions import MlflowException

        file = self.run.folder / FILE
        if not file.is_file():
            return None
        run_id = str(parse_json(file.read_bytes())["run_id"])
        try:
            self._client.update_run(run_id, status="RUNNING")
        except MlflowException:  # It was deleted, or the store is another one.
            return None
        return run_id

    def _created(self, options: Options) -> str:
        experiment = self._client.get_experiment_by_name(options.experiment)
        number = experiment.experiment_id if experiment else self._client.create_experiment(options.experiment)
        created = self._client.create_run(number, run_name=options.run_name or self.run.folder.name)
        run_id = str(created.info.run_id)
        write_json(self.run.folder / FILE, {"run_id": run_id, "tracking_uri": self._client.tracking_uri})
        parameters = list(_parameters(self.run.spec))
        for first in range(0, len(parameters), MAX_PARAMETERS):
            self._send(run_id, parameters=parameters[first : first + MAX_PARAMETERS])
        return run_id

    def update(self, record: Record) -> None:
        """Keep the curves' points of an update, and send all that are kept when it is time."""
        values = {f"loss/{name}": value for name, value in record["losses"].items()}
        values |= {"rate": rate_of(record)} | {name: record.get(name) for name in SPEEDS}
        self._keep(values, int(record["update"]))
        if time.monotonic() - self._sent_at >= self._every_s or len(self._waiting) >= MAX_METRICS // 2:
            self._flush()

    def evaluation(self, record: Record) -> None:
        """Send the figures, and the points that are kept."""
        figures = {f"evaluation/{_allowed(name)}": value for name, value in record["figures"].items()}
        self._keep(figures, int(record["update"]))
        self._flush()

    def end(self, record: Record) -> None:
        """Send what is left, and end the run."""
        self._close("FINISHED" if record.get("reason") == "done" else "KILLED")

    def failure(self, record: Record) -> None:
        """Send what is left, and end the run as failed, with the error as a tag."""
        self._client.set_tag(self._id, "mtrain.error", str(record.get("error", ""))[:MAX_VALUE])
        self._close("FAILED")

    def _close(self, status: str) -> None:
        self._flush()
        self._client.set_terminated(self._id, status=status)

    def _keep(self, values: Mapping[str, Any], step: int) -> None:
        """Keep numbers until they are sent; other values are left out, and those that are not finite, which stores refuse."""
        numbers = {name: value for name, value in values.items() if isinstance(value, int | float)}
        self._waiting += [(name, float(value), step) for name, value in numbers.items() if math.isfinite(value)]

    def _flush(self) -> None:
        from mlflow.entities import Metric

        waiting, self._waiting = self._waiting, []
        self._sent_at = time.monotonic()
        now_ms = int(time.time() * 1000)
        for first in range(0, len(waiting), MAX_METRICS):
            metrics = [Metric(name, value, now_ms, step) for name, value, step in waiting[first : first + MAX_METRICS]]
            self._send(self._id, metrics=metrics)

    def _send(self, run_id: str, *, metrics: Any = (), parameters: list[tuple[str, str]] | None = None) -> None:
        from mlflow.entities import Param

        self._client.log_batch(run_id, metrics=metrics, params=[Param(*pair) for pair in parameters or ()])


def _parameters(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield (dotted path, value as text) for every value of a spec."""
    for name, value in values.items():
        path = prefix + _allowed(name).replace("/", "_")  # a store in files makes folders of slashes
        if isinstance(value, Mapping) and value:
            yield from _parameters(value, f"{path}.")
        else:
            yield path, (value if isinstance(value, str) else json.dumps(value))[:MAX_VALUE]


def _allowed(name: str) -> str:
    """Return a name with other characters than MLflow allows in the names of metrics and parameters replaced by ``_``."""
    return "".join(sign if sign.isalnum() or sign in "_-. /" else "_" for sign in name)
