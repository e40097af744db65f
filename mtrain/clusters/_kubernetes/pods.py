"""The pods of a job: their command, volumes, security settings and place, which both kinds of job share."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import yaml

from mtrain.clusters._kubernetes.options import KubernetesOptions
from mtrain.core.queue import Submission
from mtrain.errors import UsageError
from mtrain.spec.yaml_reader import dumped
from mtrain.system.job_secret import CLUSTER_VARIABLE

Manifest = dict[str, Any]
"""A document of the Kubernetes API, or a part of one."""

HOME = "/home/mtrain"
TEMPORARY = "/tmp"  # noqa: S108 - a volume of the pod, which no other pod sees
SHARED_MEMORY = "/dev/shm"  # noqa: S108
SPEC_FOLDER = "/etc/mtrain"
SPEC_FILE = "spec.yml"
INDEX = "$(JOB_COMPLETION_INDEX)"
"""The kubelet replaces it in the command with the value of this variable, which every indexed Job sets: no shell is needed."""
MAX_SPEC_BYTES = 1 << 20
"""Size of a ConfigMap's content that the API server still accepts."""
PLACE_KEYS = ("name", "options", "nodes", "ips")
"""Keys of the section ``cluster`` that say where to submit the job. In the pods, the command names the hosts."""
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

    @property
    def name(self) -> str:
        """Return the name of the run, which is the name of the job."""
        return self.submission.name

    @property
    def hosts(self) -> list[str]:
        """Return the host names of the pods, the first host's first; empty for a job of one pod."""
        count = self.submission.hosts
        return [f"{self.pods}-{index}.{self.domain}" for index in range(count)] if count > 1 else []

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
        place = ["--ips", ",".join(hosts), "--node-rank", INDEX] if hosts else ["--nnodes", "1"]
        return self.submission.command(
            python=self.options.python, spec=f"{SPEC_FOLDER}/{SPEC_FILE}", more=["--cluster", "auto", *place]
        )

    def spec(self) -> str:
        """Return the spec for the pods: that of the submission, with the folders and the waiting time of the pods.

        Raises:
            UsageError: it is too large for a ConfigMap, or asks for more ranks than GPUs.
        """
        values: dict[str, Any] = yaml.safe_load(self.submission.spec)
        cluster = {key: value for key, value in values.get("cluster", {}).items() if key not in PLACE_KEYS}
        if cluster.get("launcher") == "kubernetes":  # former key of cluster.name
            del cluster["launcher"]
        cluster["join_timeout_s"] = self.options.wait_s
        ranks = self._ranks()
        if ranks is not None:
            cluster["nproc_per_node"] = ranks
        report = {**values.get("report", {}), "dir": self.options.runs_path}
        if self.options.kind == "trainjob":
            # Kubeflow shows the progress of a TrainJob, unless the spec says that it shall not.
            report["reporters"] = {"kubeflow": True, **report.get("reporters", {})}
        text = dumped({**values, "cluster": cluster, "report": report})
        if len(text.encode()) > MAX_SPEC_BYTES:
            raise UsageError(
                f"the spec has {len(text.encode())} bytes, but a ConfigMap holds {MAX_SPEC_BYTES}; put long lists into "
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
        # Libraries name their caches after the user, whom the image's /etc/passwd may not list.
        own = {"HOME": HOME, "USER": "mtrain", "LOGNAME": "mtrain", "PYTHONUNBUFFERED": "1"}
        for name in self.options.env:
            if name in (*own, CLUSTER_VARIABLE):
                remedy = "put it into a Secret and name that with cluster.options.secret"
                raise UsageError(
                    f"cluster.options.env: {name} is set by mtrain; "
                    f"{remedy if name == CLUSTER_VARIABLE else 'leave it out'}"
                )
        variables: list[Manifest] = [
            {"name": key, "value": value} for key, value in {**own, **self.options.env}.items()
        ]
        if self.options.secret is not None:
            reference = {"name": self.options.secret, "key": CLUSTER_VARIABLE}
            variables.append({"name": CLUSTER_VARIABLE, "valueFrom": {"secretKeyRef": reference}})
        return variables

    def resources(self) -> Manifest:
        """Return requests and limits, which are equal: no pod takes from another, and none is evicted for its use."""
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
            place["tolerations"] = [dict(toleration) for toleration in options.tolerations]
        if options.spread:
            apart = {"labelSelector": {"matchLabels": self.labels()}, "topologyKey": "kubernetes.io/hostname"}
            place["affinity"] = {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [apart]}}
        return place

    def queue_labels(self) -> dict[str, str]:
        """Return the label by which Kueue takes the job into its queue; empty without one."""
        return {} if self.options.queue is None else {"kueue.x-k8s.io/queue-name": self.options.queue}


def spec_name(name: str) -> str:
    """Return the name of the ConfigMap that holds the spec of a job."""
    return f"{name}-spec"


def config_map(plan: PodPlan) -> Manifest:
    """Return the ConfigMap with the spec."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": plan.metadata(spec_name(plan.name)),
        "immutable": True,
        "data": {SPEC_FILE: plan.spec()},
    }


def network_policy(plan: PodPlan, selector: Mapping[str, str]) -> Manifest:
    """Return the NetworkPolicy that lets only the pods of the job connect to each other.

    The ports of collectives ask nobody who he is, whatever framework opens them.
    """
    pods = {"matchLabels": dict(selector)}
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": plan.metadata(),
        "spec": {"podSelector": pods, "policyTypes": ["Ingress"], "ingress": [{"from": [{"podSelector": pods}]}]},
    }


def base_pod(*, container: str) -> Manifest:
    """Return the part of a pod's spec that is the same for every job: security, and the folders for temporary files."""
    return {
        "restartPolicy": "Never",  # asked for by podFailurePolicy; the Job starts another pod in its place
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
        "containers": [
            {
                "name": container,
                "workingDir": HOME,
                "securityContext": {
                    "allowPrivilegeEscalation": False,
                    "readOnlyRootFilesystem": True,
                    "capabilities": {"drop": ["ALL"]},
                },
                "volumeMounts": [{"name": "home", "mountPath": HOME}, {"name": "tmp", "mountPath": TEMPORARY}],
            }
        ],
        "volumes": [{"name": "home", "emptyDir": {}}, {"name": "tmp", "emptyDir": {}}],
    }


def failure_rules(options: KubernetesOptions, *, container: str) -> Manifest:
    """Return the part of a Job's spec that says what follows from the failure of a pod.

    A pod that was disrupted (preempted, evicted, its node drained) or that saved its state after SIGTERM is replaced,
    however often. Wrong use fails the job at once, since it would fail again. Any other failure is tried again.
    """

    def exits(code: int) -> Manifest:
        return {"containerName": container, "operator": "In", "values": [code]}

    return {
        "completionMode": "Indexed",
        "backoffLimitPerIndex": options.backoff,
        "maxFailedIndexes": 0,
        "podReplacementPolicy": "Failed",  # not before the former pod has ended: two would write the same files
        "podFailurePolicy": {
            "rules": [
                {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                {"action": "Ignore", "onExitCodes": exits(ENDED_FROM_OUTSIDE)},
                {"action": "FailJob", "onExitCodes": exits(WRONG_USE)},
            ]
        },
    }


def for_pods(submission: Submission, options: KubernetesOptions) -> Submission:
    """Return the submission as pods can run it.

    Raises:
        UsageError: it runs a user's script, which the pods do not have.
    """
    if submission.arguments:
        raise UsageError(
            f"{submission.arguments[0]}: a script cannot be submitted to kubernetes, whose pods do not have it; put it "
            "into the image and start it there, or name your model and data in a spec"
        )
    return replace(submission, python=options.python)
