"""The pods of a job: their command, volumes, security settings and place, which both kinds of job share."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import yaml

from mtrain.core.interfaces.queue import Submission
from mtrain.errors import UsageError
from mtrain.spec.yaml_reader import dump
from mtrain.system.job_secret import CLUSTER_VARIABLE
from mtrain_clusters._kubernetes.credentials import refuse_clear_text
from mtrain_clusters._kubernetes.options import (
    CODE_FOLDER,
    HOME,
    SHARED_MEMORY,
    SPEC_FOLDER,
    TEMPORARY,
    VARIABLES,
    KubernetesOptions,
    check_name,
)
from mtrain_clusters._kubernetes.own_code import MAX_BYTES, SUBFOLDER, OwnCode, own_code_of

Manifest = dict[str, Any]
"""A document of the Kubernetes API, or a part of one."""

SPEC_FILE = "spec.yml"
# The kubelet replaces it, so the command needs no shell.
INDEX = "$(JOB_COMPLETION_INDEX)"
"""The kubelet replaces it in the command with the value of this variable, which every indexed Job sets."""
# No word that a user can give contains a NUL character.
_INDEX = "\0index"
"""Stands for ``INDEX`` among the words of the command."""
# In the pods, the command names the hosts.
PLACE_KEYS = ("name", "options", "nodes", "ips")
"""Keys of the section ``cluster`` that say where to submit the job."""
LOOPBACK, EVERY_ADDRESS = "127.0.0.1", "0.0.0.0"  # noqa: S104 - in a pod, whose NetworkPolicy says who may connect
"""``report.metrics_address`` by default, at which nobody outside of a pod could read, and what it is in a pod instead."""
WRONG_USE, ENDED_FROM_OUTSIDE = 2, 143
"""Exit codes of mtrain: nothing was started because the request is wrong; ended by SIGTERM, with the state saved."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PodPlan:
    """The command and the environment of the pods of one job, independent of the kind of the job."""

    submission: Submission
    options: KubernetesOptions
    container: str
    """Name of the container that trains."""
    pods: str
    """Beginning of the pods' host names; ``-0``, ``-1`` ... follow."""
    domain: str
    """Name of the headless Service, under which the pods' names resolve."""
    code: OwnCode
    """The user's own code, which the pods are given."""

    @property
    def name(self) -> str:
        """Return the name of the run, which is the name of the job."""
        return self.submission.name

    @property
    def hosts(self) -> list[str]:
        """Return the host names of the pods, the first host's first; empty for a job of one pod."""
        count = self.submission.hosts
        return [f"{self.pods}-{index}.{self.domain}" for index in range(count)] if count > 1 else []

    @property
    def metrics_port(self) -> int | None:
        """Return the port at which Prometheus reads the metrics of a pod; None: there is none."""
        report = yaml.safe_load(self.submission.spec).get("report") or {}
        port: int | None = report.get("metrics_port")
        return port

    def labels(self) -> dict[str, str]:
        """Return the labels of every object of the job."""
        return {"app.kubernetes.io/name": "mtrain", "app.kubernetes.io/instance": self.name}

    def metadata(self, name: str | None = None, **more: Any) -> Manifest:
        """Return the metadata of an object of the job; ``name``: None, that of the job."""
        where = {} if self.options.namespace is None else {"namespace": self.options.namespace}
        return {"name": name or self.name, **where, "labels": self.labels(), **more}

    def command(self) -> list[str]:
        """Return the command of every pod, word by word; only the place among the hosts differs."""
        hosts = self.hosts
        # One pod is a job of one host; without --nnodes 1 it would be asked for the other pods of its indexed Job.
        place = ["--ips", ",".join(hosts), "--node-rank", _INDEX] if hosts else ["--nnodes", "1"]
        submission = replace(self.submission, arguments=self.code.in_pods(list(self.submission.arguments)))
        words = submission.command(
            python=self.options.python, spec=f"{SPEC_FOLDER}/{SPEC_FILE}", more=["--cluster", "auto", *place]
        )
        return [INDEX if word == _INDEX else literal(word) for word in words]

    def spec(self) -> str:
        """Return the spec for the pods: that of the submission, with the folders and the waiting time of the pods.

        Raises:
            UsageError: it is too large for a ConfigMap, or asks for more ranks than GPUs.
        """
        values: dict[str, Any] = self.code.in_pods(yaml.safe_load(self.submission.spec))
        cluster = {key: value for key, value in values.get("cluster", {}).items() if key not in PLACE_KEYS}
        # Pods of one job may start minutes apart, where nodes are added or images are pulled.
        cluster["join_timeout_s"] = self.options.wait_s
        ranks = self._ranks()
        if ranks is not None:
            cluster["nproc_per_node"] = ranks
        report = {**values.get("report", {}), "dir": self.options.runs_path}
        if report.get("metrics_address", LOOPBACK) == LOOPBACK:
            report["metrics_address"] = EVERY_ADDRESS
        values |= {"cluster": cluster, "report": report}
        refuse_clear_text(values, self.options.env, self.submission.arguments)
        text = dump(values)
        if len(text.encode()) > MAX_BYTES:
            raise UsageError(
                f"the spec has {len(text.encode())} bytes, but a ConfigMap holds {MAX_BYTES}; put long lists into "
                "files of the image or of the data volume"
            )
        return text

    def _ranks(self) -> int | None:
        """Return the number of ranks of each pod: as the spec says, else one on each GPU; None: decided in the pod."""
        given, gpus = self.submission.ranks_per_host, self.options.gpus
        if gpus and given is not None and given > gpus:
            raise UsageError(
                f"cluster.nproc_per_node: {given} ranks on each pod with cluster.options.gpus {gpus}; ask for {given} "
                "GPUs, or for fewer ranks"
            )
        return given if given is not None else gpus or None

    def environment(self) -> list[Manifest]:
        """Return the environment variables of the container."""
        options = self.options
        values = {**VARIABLES, **options.env}
        variables: list[Manifest] = [{"name": key, "value": literal(value)} for key, value in values.items()]
        secret = {} if options.secret is None else {CLUSTER_VARIABLE: f"{options.secret}/{CLUSTER_VARIABLE}"}
        for variable, place in {**secret, **options.secret_env}.items():
            name, _, key = place.rpartition("/")
            variables.append({"name": variable, "valueFrom": {"secretKeyRef": {"name": name, "key": key}}})
        return variables

    def resources(self) -> Manifest:
        """Return requests and limits, which are equal: no pod takes from another, and none is evicted for its use."""
        # Equal requests and limits make the pods "Guaranteed", which are evicted last.
        amounts = {"cpu": self.options.cpu, "memory": self.options.memory}
        if self.options.gpus:
            amounts["nvidia.com/gpu"] = str(self.options.gpus)
        return {"requests": dict(amounts), "limits": dict(amounts)}

    def volumes(self) -> tuple[list[Manifest], list[Manifest]]:
        """Return the volumes that differ from job to job, and where the container has them."""
        shared = {"medium": "Memory", "sizeLimit": self.options.shm}
        volumes: list[Manifest] = [
            {"name": "spec", "configMap": {"name": spec_name(self.name)}},
            {"name": "shm", "emptyDir": shared},
        ]
        mounts: list[Manifest] = [
            {"name": "spec", "mountPath": SPEC_FOLDER, "readOnly": True},
            {"name": "shm", "mountPath": SHARED_MEMORY},
        ]
        if self.options.data_claim is not None:
            claim = {"claimName": self.options.data_claim, "readOnly": True}
            volumes.append({"name": "data", "persistentVolumeClaim": claim})
            mounts.append({"name": "data", "mountPath": self.options.data_path, "readOnly": True})
        if self.code.files:
            _, items = self.code.contents()
            volumes.append({"name": "code", "configMap": {"name": code_name(self.name), "items": items}})
            mounts.append({"name": "code", "mountPath": CODE_FOLDER, "subPath": SUBFOLDER, "readOnly": True})
        runs = self.options.runs_claim
        volumes.append(
            {"name": "runs", **({"persistentVolumeClaim": {"claimName": runs}} if runs else {"emptyDir": {}})}
        )
        mounts.append({"name": "runs", "mountPath": self.options.runs_path})
        return volumes, mounts

    def place(self) -> Manifest:
        """Return what decides about the nodes of the pods, and what differs in their security from job to job."""
        options = self.options
        user: Manifest = {"runAsUser": options.user, "runAsGroup": options.user, "fsGroup": options.user}
        place: Manifest = {
            "terminationGracePeriodSeconds": options.grace_s,
            "securityContext": {**user, "fsGroupChangePolicy": "OnRootMismatch"},
        }
        if options.service_account is not None:
            place["serviceAccountName"] = options.service_account
        if options.node_selector:
            place["nodeSelector"] = dict(options.node_selector)
        if options.tolerations:
            place["tolerations"] = [dict(each) for each in options.tolerations]
        if options.image_pull_secrets:
            place["imagePullSecrets"] = [{"name": name} for name in options.image_pull_secrets]
        if options.spread:
            apart = {"labelSelector": {"matchLabels": self.labels()}, "topologyKey": "kubernetes.io/hostname"}
            place["affinity"] = {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [apart]}}
        return place

    def in_queue(self, spec: Manifest) -> Manifest:
        """Return the metadata and the spec of the job, which waits in a queue of Kueue if one is named."""
        metadata = self.metadata()
        if self.options.queue is not None:
            metadata["labels"]["kueue.x-k8s.io/queue-name"] = self.options.queue
            spec = {**spec, "suspend": True}  # Kueue lets it run
        return {"metadata": metadata, "spec": spec}


def plan_pods(submission: Submission, options: KubernetesOptions, *, container: str, pods: str) -> PodPlan:
    """Return the plan of a job whose pods are called ``pods-0``, ``pods-1`` ...

    Raises:
        UsageError: the name of the run does not fit, or the pods cannot have a part of the user's code.
    """
    name = submission.name
    check_name(name, longest=f"{pods}-{submission.hosts - 1}")
    code = own_code_of(submission)
    return PodPlan(submission=submission, options=options, container=container, pods=pods, domain=name, code=code)


def literal(word: str) -> str:
    """Return a word of a command, or a variable's value, in which the kubelet replaces nothing: it expands ``$(NAME)``."""
    return word.replace("$", "$$")


def spec_name(name: str) -> str:
    """Return the name of the ConfigMap that holds the spec of a job."""
    return f"{name}-spec"


def code_name(name: str) -> str:
    """Return the name of the ConfigMap that holds the own code of a job."""
    return f"{name}-code"


def config_maps(plan: PodPlan) -> list[Manifest]:
    """Return the ConfigMap with the spec, and the one with the user's own code if there is some."""
    contents = {spec_name(plan.name): {"data": {SPEC_FILE: plan.spec()}}}
    if plan.code.files:
        contents[code_name(plan.name)], _ = plan.code.contents()
    return [
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": plan.metadata(name), "immutable": True, **content}
        for name, content in contents.items()
    ]


def network_policy(plan: PodPlan, selector: Mapping[str, str]) -> Manifest:
    """Return the NetworkPolicy that lets only the pods of the job connect to each other.

    The ports of collectives ask nobody who he is, whatever framework opens them. The port for Prometheus is open to the
    pods of one namespace, too.
    """
    pods = {"matchLabels": dict(selector)}
    namespace, port = plan.options.metrics_namespace, plan.metrics_port
    readers: Manifest = {"podSelector": {}}
    if namespace is not None:
        readers = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}}}
    metrics = [] if port is None else [{"from": [readers], "ports": [{"port": port, "protocol": "TCP"}]}]
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": plan.metadata(),
        "spec": {
            "podSelector": pods,
            "policyTypes": ["Ingress"],
            "ingress": [{"from": [{"podSelector": pods}]}, *metrics],
        },
    }


def base_pod(options: KubernetesOptions, *, container: str) -> Manifest:
    """Return the part of a pod's spec that is the same for every job: security, and the folders for temporary files."""
    secrets = [{"secretRef": {"name": name}} for name in options.env_from]
    return {
        "restartPolicy": "Never",  # asked for by podFailurePolicy; the Job starts another pod in its place
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
        "containers": [
            {
                "name": container,
                "securityContext": {
                    "allowPrivilegeEscalation": False,
                    "readOnlyRootFilesystem": True,
                    "capabilities": {"drop": ["ALL"]},
                },
                **({"envFrom": secrets} if secrets else {}),
                "volumeMounts": [{"name": "home", "mountPath": HOME}, {"name": "tmp", "mountPath": TEMPORARY}],
            }
        ],
        "volumes": [{"name": "home", "emptyDir": {}}, {"name": "tmp", "emptyDir": {}}],
    }


def failure_rules(options: KubernetesOptions, *, container: str) -> Manifest:
    """Return the part of a Job's spec that says what follows from the failure of a pod."""

    def exits(code: int) -> Manifest:
        return {"containerName": container, "operator": "In", "values": [code]}

    return {
        "completionMode": "Indexed",
        "backoffLimitPerIndex": options.backoff,
        "maxFailedIndexes": 0,
        "podReplacementPolicy": "Failed",  # not before the former pod has ended: two would write the same files
        # A pod that was disrupted (preempted, evicted, its node drained) or that saved its state after SIGTERM is
        # replaced, however often. Wrong use fails the job at once, since it would fail again. Any other failure is
        # tried again.
        "podFailurePolicy": {
            "rules": [
                {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                {"action": "Ignore", "onExitCodes": exits(ENDED_FROM_OUTSIDE)},
                {"action": "FailJob", "onExitCodes": exits(WRONG_USE)},
            ]
        },
    }
