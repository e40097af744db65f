"""Report the progress of a TrainJob to Kubeflow Trainer, which shows it in the TrainJob's status.

Kubeflow sets three variables in the pods of a TrainJob where its feature ``TrainJobRuntimeStatus`` is on (KEP-2779): the URL
of its status server, the file of its certificate, and the file of a token, which is renewed from time to time. A server that
does not answer neither fails nor delays the job: a thread sends the newest status, and forgets the others.
"""

import json
import logging
import math
import threading
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from mtrain.report.reporter import Report

log = logging.getLogger(__name__)
URL, CERTIFICATE, TOKEN = (f"KUBEFLOW_TRAINER_SERVER_{name}" for name in ("URL", "CA_CERT", "TOKEN"))
INTERVAL_S = 10.0
"""Least number of seconds between two requests; Kubeflow asks for at least 5."""
TIMEOUT_S = 5.0
"""Seconds that the server may take to accept a connection, and to answer."""
MAX_METRICS = 32
"""Most figures of one status."""


def with_progress(report: Report, environ: Mapping[str, str]) -> Report:
    """Return ``report``, or one that sends the progress to Kubeflow too if ``environ`` has Kubeflow's variables."""
    url, certificate, token = (environ.get(name, "") for name in (URL, CERTIFICATE, TOKEN))
    if not (url and certificate and token):
        return report
    if urlsplit(url).scheme != "https":
        log.warning("%s: %s is no https URL, and the token is not sent to it", URL, url)
        return report
    return KubeflowReport(report, StatusServer(url, certificate=Path(certificate), token=Path(token)))


class StatusServer:
    """Kubeflow's status server. A request goes straight to it, since it is in the same cluster: through no proxy."""

    def __init__(self, url: str, *, certificate: Path, token: Path) -> None:
        self._url = urlsplit(url)
        self._certificate, self._token = certificate, token

    def send(self, status: Mapping[str, Any]) -> None:
        """Send a status.

        Raises:
            OSError: the server, the certificate or the token is not there, or the server refuses the status.
        """
        import http.client  # here, because they take a rank without Kubeflow a few hundredths of a second
        import ssl

        # Both files are read each time, because Kubeflow renews them.
        context = ssl.create_default_context(cafile=str(self._certificate))
        headers = {
            "Authorization": f"Bearer {self._token.read_text(encoding='ascii').strip()}",
            "Content-Type": "application/json",
        }
        connection = http.client.HTTPSConnection(self._url.netloc, timeout=TIMEOUT_S, context=context)
        try:
            path = self._url.path + (f"?{self._url.query}" if self._url.query else "")
            connection.request("POST", path, json.dumps({"trainerStatus": status}), headers)
            answer = connection.getresponse()
            if answer.status >= http.client.BAD_REQUEST:
                raise OSError(f"{answer.status} {answer.reason}: {answer.read(300).decode(errors='replace')}")
        finally:
            connection.close()


class KubeflowReport(Report):
    """Passes everything on to another report, and sends the progress to a status server."""

    def __init__(self, report: Report, server: StatusServer, *, interval_s: float = INTERVAL_S) -> None:
        self._report = report
        self._server = server
        self._interval_s = interval_s
        self._figures: dict[str, float] = {}
        self._began: tuple[float, int] | None = None
        """Time of the first update of this process, and its number."""
        self._newest: dict[str, Any] | None = None
        self._changed = threading.Condition()
        self._closed = False
        self._told = False
        self._thread = threading.Thread(target=self._send_all, name="kubeflow-status", daemon=True)
        self._thread.start()

    def update(self, record: Mapping[str, Any]) -> None:
        """See ``Report.update``."""
        self._report.update(record)
        losses = {f"loss_{name}" if name != "total" else "loss": value for name, value in record["losses"].items()}
        self._offer(_status(self._progress(record), {**losses, "rate": record["rate"], **self._figures}))

    def evaluation(self, figures: Mapping[str, float], *, update: int, epoch: int, **fields: Any) -> None:
        """See ``Report.evaluation``."""
        self._report.evaluation(figures, update=update, epoch=epoch, **fields)
        self._figures = dict(figures)

    def event(self, kind: str, **fields: Any) -> None:
        """See ``Report.event``."""
        self._report.event(kind, **fields)

    def close(self, summary: Mapping[str, Any]) -> None:
        """See ``Report.close``. The last status is sent at once; it may take ``TIMEOUT_S``, twice at most."""
        try:
            self._report.close(summary)
        finally:
            with self._changed:
                done = summary.get("reason") == "done"
                if done:
                    self._newest = {
                        **(self._newest or _status({}, self._figures)),
                        **_progress_of(share=1.0, left_s=0.0),
                    }
                self._closed = True
                self._changed.notify()
            self._thread.join(2 * TIMEOUT_S)

    def _progress(self, record: Mapping[str, Any]) -> Mapping[str, int]:
        """Return how far the job is after this update, and how long it will take at the speed it has had so far."""
        total, now = record.get("total_updates"), time.monotonic()
        if self._began is None:
            self._began = (now, record["update"])
        if not total:
            return {}
        began, first = self._began
        done = record["update"] + 1
        count = record["update"] - first
        left_s = (now - began) / count * (total - done) if count else None
        return _progress_of(share=min(done / total, 0.99), left_s=left_s)

    def _offer(self, status: dict[str, Any]) -> None:
        with self._changed:
            self._newest = status
            self._changed.notify()

    def _send_all(self) -> None:
        """Send the newest status, at most one each ``interval_s``, until the report is closed."""
        earliest = 0.0
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._newest is not None)
                if not self._closed:
                    self._changed.wait_for(lambda: self._closed, timeout=max(0.0, earliest - time.monotonic()))
                status, self._newest, closed = self._newest, None, self._closed
            if status is not None:
                self._send(status)
                earliest = time.monotonic() + self._interval_s
            if closed:
                return

    def _send(self, status: Mapping[str, Any]) -> None:
        from http.client import HTTPException

        try:
            self._server.send(status)
        except (OSError, ValueError, HTTPException) as error:
            if not self._told:
                self._told = True
                log.warning("the progress cannot be sent to Kubeflow, and the job goes on without: %s", error)


def _progress_of(*, share: float, left_s: float | None) -> dict[str, int]:
    left = {} if left_s is None else {"estimatedRemainingSeconds": max(0, round(left_s))}
    return {"progressPercentage": int(100 * share), **left}


def _status(progress: Mapping[str, int], figures: Mapping[str, float]) -> dict[str, Any]:
    finite = {name: value for name, value in figures.items() if math.isfinite(value)}
    metrics = [{"name": name, "value": f"{value:.6g}"} for name, value in list(finite.items())[:MAX_METRICS]]
    return {**progress, "metrics": metrics, "lastUpdatedTime": datetime.now(UTC).isoformat(timespec="seconds")}
