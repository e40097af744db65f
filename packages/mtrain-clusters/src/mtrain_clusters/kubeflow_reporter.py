"""The reporter ``kubeflow``: the progress of a TrainJob in its status, through the status server of Kubeflow Trainer.

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

from mtrain.core.interfaces.reporter import Record, ReportedRun, Reporter
from mtrain.records.history import points
from mtrain.system import environment

log = logging.getLogger(__name__)
URL, CERTIFICATE, TOKEN = (f"KUBEFLOW_TRAINER_SERVER_{name}" for name in ("URL", "CA_CERT", "TOKEN"))
INTERVAL_S = 10.0
"""Least number of seconds between two requests; Kubeflow asks for at least 5."""
TIMEOUT_S = 5.0
"""Seconds that the server may take to accept a connection, and to answer."""
MAX_METRICS = 32
"""Most metrics of one status."""


def server_of(environ: Mapping[str, str]) -> "StatusServer | None":
    """Return the status server that Kubeflow's variables name, or None where they are not set."""
    url, certificate, token = (environ.get(name, "") for name in (URL, CERTIFICATE, TOKEN))
    if not (url and certificate and token):
        return None
    if urlsplit(url).scheme != "https":
        log.warning("%s: %s is no https URL, and the token is not sent to it", URL, url)
        return None
    return StatusServer(url, certificate=Path(certificate), token=Path(token))


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


class Kubeflow(Reporter):
    """Sends the share of updates that are done, the seconds left, and the newest losses and metrics.

    Where Kubeflow's variables are not set, it does nothing.
    """

    def __init__(self, options: Any, run: ReportedRun, *, interval_s: float = INTERVAL_S) -> None:
        super().__init__(options, run)
        self._losses: dict[str, float | None] = {}
        self._metrics: dict[str, float] = {}
        self._progress: Mapping[str, int] = {}
        self._began: tuple[float, int] | None = None
        """Time of the first update of this process, and its number."""
        server = server_of(environment.caller())
        self._sender = None if server is None else Sender(server, interval_s=interval_s)

    def update(self, record: Record) -> None:
        """Offer the progress after an update to the thread that sends it."""
        if self._sender is None:
            return
        self._losses = {
            name: value for name, value in points(record).items() if name.startswith(("loss/", "learning_"))
        }
        self._progress = self._progress_after(record)
        self._sender.offer(self._status())

    def evaluation(self, record: Record) -> None:
        """Offer the metrics: no update may follow the last evaluation."""
        self._metrics = points(record)
        if self._sender is not None:
            self._sender.offer(self._status())

    def end(self, record: Record) -> None:
        """Send the last status, which may take ``TIMEOUT_S``, twice at most."""
        if self._sender is None:
            return
        if record.get("reason") == "done":
            last = record.get("last") or {}  # Of an earlier process, where this one had nothing left to evaluate.
            metrics = {f"metric/{name}": value for name, value in last.items() if name not in ("update", "epoch")}
            self._metrics = self._metrics or metrics
            self._progress = _progress_of(share=1.0, left_s=0.0)
            self._sender.offer(self._status())
        self._sender.close()

    def failure(self, record: Record) -> None:
        """As at any other end."""
        self.end(record)

    def _status(self) -> dict[str, Any]:
        """Return the whole status. Kubeflow puts it in the place of the one before, so nothing known may be left out."""
        return {**self._progress, **_describe_metrics({**self._losses, **self._metrics})}

    def _progress_after(self, record: Record) -> Mapping[str, int]:
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


class Sender:
    """A thread that sends the newest status, at most one each ``interval_s`` seconds."""

    def __init__(self, server: StatusServer, *, interval_s: float) -> None:
        self._server = server
        self._interval_s = interval_s
        self._newest: dict[str, Any] | None = None
        self._changed = threading.Condition()
        self._closed = False
        self._told = False
        self._thread = threading.Thread(target=self._send_all, name="kubeflow-status", daemon=True)
        self._thread.start()

    def offer(self, status: dict[str, Any]) -> None:
        """Replace what will be sent next."""
        with self._changed:
            self._newest = status
            self._changed.notify()

    def close(self) -> None:
        """Send what is left at once, and end the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(2 * TIMEOUT_S)

    def _send_all(self) -> None:
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


def _describe_metrics(known: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a status that holds metrics, which Kubeflow takes as text, and the time."""
    numbers = {name: value for name, value in known.items() if isinstance(value, int | float)}
    finite = [(name, value) for name, value in numbers.items() if math.isfinite(value)]
    metrics = [{"name": name, "value": f"{value:.6g}"} for name, value in finite[:MAX_METRICS]]
    return {"metrics": metrics, "lastUpdatedTime": datetime.now(UTC).isoformat(timespec="seconds")}
