"""The queue of the cluster ``kubernetes``: an API server takes a job, tells its state, and ends it."""

import contextlib
import dataclasses
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from mtrain.core.interfaces.queue import Phase, Queue, QueuedJob, QueueState, Submission
from mtrain.errors import UsageError
from mtrain.spec import outputs
from mtrain.spec.files import read_text
from mtrain.spec.yaml_reader import dumped_all
from mtrain_clusters._kubernetes import job, trainjob
from mtrain_clusters._kubernetes.client import Client, Existing, Missing
from mtrain_clusters._kubernetes.options import KubernetesOptions
from mtrain_clusters._kubernetes.pods import Manifest

INDEX_LABEL = "batch.kubernetes.io/job-completion-index"
POLL_S = 2.0
"""Seconds between two questions whether a pod has started."""
MAX_REQUEST_BYTES = 4 << 20
CLUSTER_WIDE = "ClusterTrainingRuntime"
"""The only kind of object that several jobs share."""


class KubernetesQueue(Queue):
    """Jobs of one kind in one namespace."""

    def __init__(self, options: KubernetesOptions) -> None:
        self.options = options

    def request(self, submission: Submission) -> str:
        """See ``Queue``: the documents as YAML."""
        make = trainjob.manifests if self.options.kind == "trainjob" else job.manifests
        head = ""
        if self.options.runs_claim is None:
            head = "# No runs_claim is given: checkpoints vanish with their pod, and a pod in its place begins anew.\n"
        return head + dumped_all(make(submission, self.options))

    @property
    def suffix(self) -> str:
        """See ``Queue``."""
        return ".yml"

    def submit(self, submission: Submission, request: Path) -> str:
        """See ``Queue``. What belongs to the job is deleted with it, whoever deletes it."""
        client = Client(self.options.namespace)
        # The main object comes first: the others name it as their owner, by the uid that the server gives it.
        main, *others = _place(request, client.namespace)
        for document in (each for each in others if each["kind"] == CLUSTER_WIDE):
            _share(client, document)
        try:
            created = client.create(main)
        except Existing as error:
            remedy = f"kubectl delete {main['kind'].lower()} {main['metadata']['name']}"
            raise UsageError(f"{error}; give another --name, or delete it first: {remedy}") from error
        owner = {key: main[key] for key in ("apiVersion", "kind")} | {
            key: created["metadata"][key] for key in ("name", "uid")
        }
        try:
            for document in (each for each in others if each["kind"] != CLUSTER_WIDE):
                client.create({**document, "metadata": {**document["metadata"], "ownerReferences": [owner]}})
        except UsageError:
            # A job without its ConfigMap would wait for it for ever.
            client.delete(main["kind"], created["metadata"]["name"])
            raise
        return str(created["metadata"]["name"])

    def state(self, job: QueuedJob) -> QueueState:
        """See ``Queue``."""
        client = Client(_namespace(job) or self.options.namespace)
        try:
            document = client.read(self._kind, job.id)
        except Missing:
            text = "the API server has no such job any more: it was deleted, or options.ttl_s have passed since its end"
            return QueueState(phase="unknown", text=text)
        pods = client.pods(self._pods_of(job))
        creator = f"{job.id}-{trainjob.NODE}-0" if self.options.kind == "trainjob" else job.id
        state = _state(document, pods)
        obstacle = _obstacle(client, document, pods, creator) if state.phase == "waiting" else None
        return state if obstacle is None else dataclasses.replace(state, text=f"{state.text}; {obstacle}")

    def logs(self, job: QueuedJob, *, follow: bool) -> Iterator[str]:
        """See ``Queue``: what the pods of the first host printed, one after the other where they were replaced."""
        client, shown = Client(_namespace(job) or self.options.namespace), set()
        while True:
            ended = not follow or self._has_ended(client, job)
            for pod in client.pods({**self._pods_of(job), INDEX_LABEL: "0"}):
                if pod.metadata.name not in shown and (ended or _has_started(pod)):
                    shown.add(pod.metadata.name)
                    if _has_started(pod):
                        yield from client.log(pod.metadata.name, follow=follow)
            if ended:
                break
            time.sleep(POLL_S)
        # A Job that fails for another host deletes the pods that still run, with what they printed.
        failed = [] if shown or not self._has_ended(client, job) else client.pods(self._pods_of(job))
        for pod in [pod for pod in failed if pod.status.phase == "Failed"][-1:]:
            yield f"the pods of the first host were deleted; pod {pod.metadata.name}:"
            yield from client.log(pod.metadata.name, follow=False)

    def cancel(self, job: QueuedJob) -> None:
        """See ``Queue``: delete the job; its pods get SIGTERM, and ``grace_s`` to save their state."""
        client = Client(_namespace(job) or self.options.namespace)
        try:
            client.delete(self._kind, job.id)
        except Missing:
            return

    @property
    def _kind(self) -> str:
        return "TrainJob" if self.options.kind == "trainjob" else "Job"

    def _pods_of(self, job: QueuedJob) -> dict[str, str]:
        """Return the labels of the pods of a job."""
        if self.options.kind == "trainjob":
            return {"jobset.sigs.k8s.io/jobset-name": job.id}
        return {"batch.kubernetes.io/job-name": job.id}

    def _has_ended(self, client: Client, job: QueuedJob) -> bool:
        try:
            document = client.read(self._kind, job.id)
        except Missing:
            return True
        return _verdict(document) is not None


def _share(client: Client, document: Manifest) -> None:
    """Create an object that several jobs share, unless it is there: its name says what it contains.

    Raises:
        UsageError: it is not there, and the API server refuses it.
    """
    name = document["metadata"]["name"]
    try:
        client.create(document)
    except Existing:
        return
    except UsageError as error:
        # A server asks first whether this user may create it.
        with contextlib.suppress(UsageError):
            client.read(document["kind"], name)
            return
        remedy = "an administrator can apply it once, from what `mtrain plan` prints, and let you read it"
        raise UsageError(f"{error}; {remedy}") from error


def _place(request: Path, namespace: str) -> list[Manifest]:
    """Return the documents of a request, and write into it the namespace to which they are given."""
    text = request.read_text(encoding="utf-8")
    head = "".join(line for line in text.splitlines(keepends=True) if line.startswith("#"))
    documents = list(yaml.safe_load_all(text))
    for document in documents:
        if document["kind"] != CLUSTER_WIDE:
            # Without it, a later command would look for the job in the namespace that the context has by then.
            document["metadata"]["namespace"] = namespace
    outputs.write_text(request, head + dumped_all(documents))
    return documents


def _namespace(job: QueuedJob) -> str | None:
    """Return the namespace to which a job was given; None: its request is gone."""
    try:
        main = next(iter(yaml.safe_load_all(read_text(job.request, limit=MAX_REQUEST_BYTES))))
        return str(main["metadata"]["namespace"])
    except (OSError, ValueError, yaml.YAMLError, StopIteration, KeyError, TypeError, RecursionError):
        return None


def _verdict(document: Manifest) -> tuple[Phase, str] | None:
    """Return how a Job or TrainJob ended, and why, or None while it has not."""
    for condition in document.get("status", {}).get("conditions") or ():
        phase: Phase | None = {"Complete": "done", "Failed": "failed"}.get(condition["type"])  # type: ignore[assignment]
        if phase is not None and condition["status"] == "True":
            words = (condition["type"], condition.get("reason"), condition.get("message"))
            return phase, ": ".join(word for word in words if word)
    return None


def _state(document: Manifest, pods: list[Any]) -> QueueState:
    verdict = _verdict(document)
    if verdict is not None:
        phase, text = verdict
        return QueueState(phase=phase, text=text, code=0 if phase == "done" else _exit_code(pods))
    running = [pod for pod in pods if pod.status.phase == "Running"]
    wanted = _pods_wanted(document)
    text = f"{len(running)} of {wanted} pods are running"
    for condition in document.get("status", {}).get("conditions") or ():
        if condition["type"] == "Suspended" and condition["status"] == "True":
            text = f"Suspended: {condition.get('message') or condition.get('reason') or 'waits for its queue'}"
    if document["metadata"].get("deletionTimestamp"):
        text = f"Terminating: {text}"
    nodes = tuple(dict.fromkeys(pod.spec.node_name for pod in running if pod.spec.node_name))
    return QueueState(phase="running" if len(running) == wanted else "waiting", text=text, hosts=nodes)


def _obstacle(client: Client, document: Manifest, pods: list[Any], creator: str) -> str | None:
    """Return what keeps a pod from running, in the cluster's words; None: nothing that is told.

    ``creator``: name of the Job that creates the pods.
    """
    since = document["metadata"].get("creationTimestamp", "")
    for pod in pods:
        if pod.status.phase == "Pending" and (
            told := _pending(pod) or client.warning("Pod", pod.metadata.name, since=since)
        ):
            return f"pod {pod.metadata.name}: {told}"
    there = [pod for pod in pods if pod.status.phase in ("Pending", "Running")]
    return client.warning("Job", creator, since=since) if len(there) < _pods_wanted(document) else None


def _pending(pod: Any) -> str | None:
    """Return what the scheduler, or the node, says of a pod that has not started."""
    for told in pod.status.conditions or ():
        if told.type == "PodScheduled" and told.status == "False":
            return f"{told.reason}: {told.message}"
    for status in pod.status.container_statuses or ():
        if status.state is not None and (told := status.state.waiting) is not None and told.message:
            return f"{told.reason}: {told.message}"
    return None


def _pods_wanted(document: Manifest) -> int:
    spec = document["spec"]
    return int(spec["completions"] if document["kind"] == "Job" else spec["trainer"]["numNodes"])


def _exit_code(pods: list[Any]) -> int | None:
    """Return the exit code of the pod that failed last; None: none is known."""
    ends = [
        status.state.terminated
        for pod in pods
        for status in pod.status.container_statuses or ()
        if status.state is not None and status.state.terminated is not None and status.state.terminated.exit_code
    ]
    ends.sort(key=lambda end: str(end.finished_at))
    return int(ends[-1].exit_code) if ends else None


def _has_started(pod: Any) -> bool:
    return pod.status.phase in ("Running", "Succeeded", "Failed")
