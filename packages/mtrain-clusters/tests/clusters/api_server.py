"""A played API server of Kubernetes on loopback, for the official client: it keeps what it is given, and starts nothing.

It refuses what the schemas of ``manifests.check`` refuse. Tests set the states of jobs and pods.
"""

import json
import re
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import yaml
from tests.clusters.manifests import Invalid, check

PATH = re.compile(
    r"^/(?:api|apis/(?P<group>[^/]+))/(?P<version>v\w+)(?:/namespaces/(?P<namespace>[^/]+))?/(?P<plural>[a-z]+)"
    r"(?:/(?P<name>[^/]+))?(?P<log>/log)?$"
)


@dataclass
class ApiServer:
    """What the server has, and what it was asked."""

    objects: dict[tuple[str, str, str], dict[str, Any]] = field(default_factory=dict)
    """(namespace, plural, name) -> object."""
    logs: dict[str, str] = field(default_factory=dict)
    """Name of a pod -> what it printed."""
    asked: list[tuple[str, str]] = field(default_factory=list)
    """Method and path of every request."""
    forbidden: set[str] = field(default_factory=set)
    """Plurals that this user may neither create nor list."""
    port: int = 0

    def kubeconfig(self, path: Path, *, namespace: str | None = None) -> Path:
        """Write a kubeconfig that names this server."""
        context: dict[str, Any] = {"cluster": "played", "user": "me", **({"namespace": namespace} if namespace else {})}
        content = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "played",
            "clusters": [{"name": "played", "cluster": {"server": f"http://127.0.0.1:{self.port}"}}],
            "users": [{"name": "me", "user": {"token": "of-a-user"}}],
            "contexts": [{"name": "played", "context": context}],
        }
        path.write_text(yaml.safe_dump(content))
        return path

    def names(self, plural: str) -> list[str]:
        """Names of the objects of a kind."""
        return [name for _, kind, name in self.objects if kind == plural]

    def job(self, name: str, *, namespace: str = "default", plural: str = "jobs") -> dict[str, Any]:
        return self.objects[namespace, plural, name]

    def end(self, name: str, kind: str, *, plural: str = "jobs", **words: str) -> None:
        """Give a job its last condition."""
        job = self.job(name, plural=plural)
        job["status"] = {"conditions": [{"type": kind, "status": "True", **words}]}

    def pod(self, name: str, job: str, index: int, phase: str, *, code: int | None = None, label: str = "") -> None:
        """Make a pod, or change its phase."""
        state: dict[str, Any] = {"running": {}}
        if code is not None:
            state = {"terminated": {"exitCode": code, "finishedAt": "2026-01-01T00:00:00Z"}}
        container = {"name": "mtrain", "state": state, "image": "i", "imageID": "", "ready": True, "restartCount": 0}
        former = self.objects.get(("default", "pods", name))
        created = former["metadata"]["creationTimestamp"] if former else f"2026-01-01T00:00:{len(self.objects):02d}Z"
        self.objects["default", "pods", name] = {
            "metadata": {
                "name": name,
                "creationTimestamp": created,
                "labels": {
                    label or "batch.kubernetes.io/job-name": job,
                    "batch.kubernetes.io/job-completion-index": str(index),
                },
            },
            "spec": {"nodeName": f"node-{index}", "containers": [{"name": "mtrain"}]},
            "status": {"phase": phase, "containerStatuses": [] if phase == "Pending" else [container]},
        }

    def warn(self, kind: str, name: str, message: str, *, hour: int = 9, reason: str = "FailedCreate") -> None:
        """Let a controller or a node tell something of an object at that hour."""
        event = f"{name}-{len(self.objects)}"
        self.objects["default", "events", event] = {
            "metadata": {"name": event, "creationTimestamp": "2026-01-01T00:00:00Z"},
            "involvedObject": {"kind": kind, "name": name},
            "type": "Warning",
            "reason": reason,
            "message": message,
            "lastTimestamp": f"2026-01-01T{hour:02d}:00:00Z",
        }

    # --------------------------------------------------------------------------------------------------------- requests
    def answer(self, method: str, url: str, body: bytes) -> tuple[int, Any]:
        """Return the status and the content of an answer; text is a log."""
        parts = urlsplit(url)
        self.asked.append((method, parts.path))
        found = PATH.match(parts.path)
        if found is None:
            return _failure(404, f"no such path: {parts.path}")
        namespace, plural, name = found["namespace"] or "", found["plural"], found["name"] or ""
        if method == "POST":
            return self._created(namespace, plural, json.loads(body))
        if found["log"]:
            return 200, self.logs[name]
        if not name:
            if plural in self.forbidden:
                return _failure(403, f'{plural} is forbidden: User "me" cannot list resource')
            wanted, fields = (parse_qs(parts.query).get(f"{what}Selector", [""])[0] for what in ("label", "field"))
            return 200, {
                "kind": "List",
                "apiVersion": "v1",
                "metadata": {},
                "items": self._matching(plural, wanted, fields),
            }
        key = (namespace, plural, name)
        if key not in self.objects:
            return _failure(404, f'{plural} "{name}" not found')
        if method == "DELETE":
            assert json.loads(body or b"{}").get("propagationPolicy") or "propagationPolicy" in parse_qs(parts.query)
            owner = self.objects.pop(key)["metadata"]["uid"]
            for other, value in list(self.objects.items()):
                if any(each["uid"] == owner for each in value["metadata"].get("ownerReferences", ())):
                    del self.objects[other]
            return 200, {"kind": "Status", "status": "Success"}
        return 200, self.objects[key]

    def _created(self, namespace: str, plural: str, document: dict[str, Any]) -> tuple[int, Any]:
        name = document["metadata"]["name"]
        if plural in self.forbidden:
            return _failure(403, f'{plural} is forbidden: User "me" cannot create resource')
        if (namespace, plural, name) in self.objects:
            return _failure(409, f'{plural} "{name}" already exists')
        try:
            check(document)
        except Invalid as error:
            return _failure(422, str(error))
        uid = f"uid-{len(self.asked)}"
        stored = {**document, "metadata": {**document["metadata"], "uid": uid}}
        self.objects[namespace, plural, name] = stored
        return 201, stored

    def _matching(self, plural: str, labels: str, fields: str) -> list[Mapping[str, Any]]:
        wanted, told = (dict(part.split("=", 1) for part in text.split(",") if part) for text in (labels, fields))

        def told_of(value: Any, path: str) -> Any:
            for key in path.split("."):
                value = value[key]
            return value

        return [
            value
            for (_, kind, _), value in list(self.objects.items())
            if kind == plural
            and wanted.items() <= value["metadata"].get("labels", {}).items()
            and all(told_of(value, path) == text for path, text in told.items())
        ]


def _failure(code: int, message: str) -> tuple[int, Any]:
    return code, {"kind": "Status", "apiVersion": "v1", "status": "Failure", "message": message, "code": code}


@contextmanager
def served() -> Iterator[ApiServer]:
    """The server while inside."""
    state = ApiServer()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _serve(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            if self.headers.get("Authorization") != "Bearer of-a-user":
                code, content = _failure(401, "Unauthorized")
            else:
                code, content = state.answer(self.command, self.path, body)
            data = content.encode() if isinstance(content, str) else json.dumps(content).encode()
            self.send_response(code)
            self.send_header("Content-Type", "text/plain" if isinstance(content, str) else "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            for start in range(0, len(data), 7):  # lines arrive in pieces
                self.wfile.write(data[start : start + 7] if isinstance(content, str) else data)
                if not isinstance(content, str):
                    break
                self.wfile.flush()
                time.sleep(0.001)

        do_GET = do_POST = do_DELETE = _serve

        def log_message(self, *words: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    state.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield state
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
