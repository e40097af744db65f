"""The client of the API server: the official one, with its errors in one sentence.

Objects are read and written as plain values. The two APIs of the official client that are used here are the one of the
core objects, and the one that serves all named groups, those of Kubernetes itself included.
"""

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mtrain.errors import UsageError
from mtrain.spec import remedies
from mtrain.system import environment
from mtrain_clusters._kubernetes.pods import Manifest

CONFLICT, NOT_FOUND = 409, 404
CONNECT_S, READ_S = 10, 60
"""Seconds that the API server may take to accept a connection, and to answer a question."""
NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
"""The namespace of a pod, beside the token of its account."""
SILENT_S = 24 * 3600
"""Seconds that a pod whose log is followed may print nothing."""


class Missing(UsageError):
    """The API server has no such object."""


class Existing(UsageError):
    """The API server has an object of this name already."""


@dataclass(frozen=True, slots=True)
class Resource:
    """The place in which the API server keeps the objects of one kind."""

    group: str
    """API group; empty for core objects."""
    version: str
    plural: str
    namespaced: bool = True


RESOURCES: Mapping[str, Resource] = {
    "Job": Resource("batch", "v1", "jobs"),
    "NetworkPolicy": Resource("networking.k8s.io", "v1", "networkpolicies"),
    "TrainJob": Resource("trainer.kubeflow.org", "v1alpha1", "trainjobs"),
    "ClusterTrainingRuntime": Resource("trainer.kubeflow.org", "v1alpha1", "clustertrainingruntimes", namespaced=False),
    "ConfigMap": Resource("", "v1", "configmaps"),
    "Service": Resource("", "v1", "services"),
}


class Client:
    """Connection to the API server that kubeconfig names, or to the one of the pod in which this process runs."""

    def __init__(self, namespace: str | None) -> None:
        """Read kubeconfig. ``namespace``: None, that of its current context.

        Raises:
            UsageError: the client is not installed, or there is no kubeconfig.
        """
        try:
            from kubernetes import client
        except ImportError as error:
            raise UsageError(
                "cluster.name: kubernetes needs the package `kubernetes` to reach the API server; "
                f"install it with: {remedies.install('mtrain-clusters[kubernetes]')}"
            ) from error
        context = _loaded_context()
        self.namespace = namespace or context or "default"
        connection = client.ApiClient()
        self._core, self._groups = client.CoreV1Api(connection), client.CustomObjectsApi(connection)

    def create(self, document: Manifest) -> Manifest:
        """Create an object, and return it as the API server has stored it.

        Raises:
            Existing: there is one of this name.
            UsageError: the API server refuses it.
        """
        kind, name = document["kind"], document["metadata"]["name"]
        what, resource = f"{kind} {name}", RESOURCES[kind]
        if not resource.group:
            method = {"ConfigMap": "create_namespaced_config_map", "Service": "create_namespaced_service"}[kind]
            created = self._call(what, getattr(self._core, method), self.namespace, document)
            return {"metadata": {"name": created.metadata.name, "uid": created.metadata.uid}}
        place = (self.namespace,) if resource.namespaced else ()
        method = "create_namespaced_custom_object" if place else "create_cluster_custom_object"
        words = (resource.group, resource.version, *place, resource.plural, document)
        created = self._call(what, getattr(self._groups, method), *words)
        return dict(created)

    def read(self, kind: str, name: str) -> Manifest:
        """Return an object.

        Raises:
            Missing: there is none of this name.
            UsageError: the API server does not answer.
        """
        resource = RESOURCES[kind]
        place = (self.namespace,) if resource.namespaced else ()
        method = "get_namespaced_custom_object" if place else "get_cluster_custom_object"
        words = (resource.group, resource.version, *place, resource.plural, name)
        return dict(self._call(f"{kind} {name}", getattr(self._groups, method), *words))

    def delete(self, kind: str, name: str) -> None:
        """Delete an object, and all that belongs to it before.

        Raises:
            Missing: there is none of this name.
            UsageError: the API server refuses.
        """
        resource = RESOURCES[kind]
        words = (resource.group, resource.version, self.namespace, resource.plural, name)
        self._call(
            f"{kind} {name}",
            self._groups.delete_namespaced_custom_object,
            *words,
            propagation_policy="Foreground",
        )

    def pods(self, selector: Mapping[str, str]) -> list[Any]:
        """Return the pods with these labels, the oldest first."""
        text = ",".join(f"{key}={value}" for key, value in selector.items())
        found = self._call("pods", self._core.list_namespaced_pod, self.namespace, label_selector=text)
        return sorted(found.items, key=lambda pod: pod.metadata.creation_timestamp)

    def warning(self, kind: str, name: str, *, since: str) -> str | None:
        """Return the newest warning about an object; None: there is none, or this user may not read events."""
        wanted = f"involvedObject.kind={kind},involvedObject.name={name},type=Warning"
        try:
            found = self._call("events", self._core.list_namespaced_event, self.namespace, field_selector=wanted)
        except UsageError:
            return None
        # An event of an earlier object of this name may be an hour old.
        times = [(event.last_timestamp or event.metadata.creation_timestamp, event) for event in found.items]
        recent = [(time, event) for time, event in times if f"{time:%Y-%m-%dT%H:%M:%SZ}" >= since]
        if not recent:
            return None
        _, newest = max(recent, key=lambda timed: timed[0])
        return f"{newest.reason}: {newest.message}"

    def log(self, pod: str, *, follow: bool) -> Iterator[str]:
        """Yield the lines that a pod has printed. ``follow``: also those to come, until it ends."""
        response = self._call(
            f"log of pod {pod}",
            self._core.read_namespaced_pod_log,
            pod,
            self.namespace,
            follow=follow,
            _preload_content=False,
            _request_timeout=(CONNECT_S, SILENT_S if follow else READ_S),
        )
        with contextlib.closing(response):
            rest = b""
            for chunk in response.stream(decode_content=True):
                *lines, rest = (rest + chunk).split(b"\n")
                yield from (line.decode(errors="replace") for line in lines)
            if rest:
                yield rest.decode(errors="replace")

    def _call(self, what: str, method: Callable[..., Any], *words: Any, **options: Any) -> Any:
        """Call a method of the official client.

        Raises:
            UsageError: with the API server's own words.
        """
        from kubernetes.client.exceptions import ApiException
        from urllib3.exceptions import HTTPError

        options.setdefault("_request_timeout", (CONNECT_S, READ_S))
        try:
            return method(*words, **options)
        except ApiException as error:
            kinds = {CONFLICT: Existing, NOT_FOUND: Missing}
            kind = kinds.get(error.status or 0, UsageError)
            raise kind(f"kubernetes, {what}: {_message(error)}") from error
        except HTTPError as error:
            raise UsageError(f"kubernetes, {what}: the API server cannot be reached: {error}") from error


def _loaded_context() -> str | None:
    """Load kubeconfig, or what a pod has instead, and return the namespace of its context."""
    from kubernetes import config

    file = environment.caller().get("KUBECONFIG")  # the client would read it once, when it is imported
    try:
        config.load_kube_config(file)
        _, active = config.list_kube_config_contexts(file)
        namespace = active.get("context", {}).get("namespace")
        return None if namespace is None else str(namespace)
    except config.ConfigException as error:
        missing = error
    try:
        config.load_incluster_config()
    except config.ConfigException:
        raise UsageError(
            f"no kubeconfig can be used ({missing}); set KUBECONFIG to one, or write the manifests to a file with "
            "`mtrain plan --cluster kubernetes` and give it to kubectl"
        ) from missing
    return _own_namespace()


def _own_namespace() -> str | None:
    """Return the namespace of the pod in which this process runs; None: it is not told."""
    try:
        return NAMESPACE_FILE.read_text(encoding="utf-8").strip() or None
    except OSError:
        return None


def _message(error: Any) -> str:
    """Return the sentence in the API server's answer, or its status."""
    try:
        return str(json.loads(error.body)["message"])
    except (TypeError, ValueError, KeyError):
        return f"{error.status} {error.reason}"
