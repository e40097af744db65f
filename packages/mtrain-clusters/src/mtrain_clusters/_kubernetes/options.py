"""The options of the cluster ``kubernetes``, and the rules for names in a Kubernetes cluster."""

import re
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from mtrain.errors import UsageError
from mtrain.system.job_secret import CLUSTER_VARIABLE
from mtrain_clusters._kubernetes.rules import (
    LABEL,
    MAX_INT32,
    MAX_LABEL,
    Cores,
    Folder,
    Image,
    LabelKey,
    LabelValue,
    Memory,
    Name,
    SecretKey,
    ShortName,
    Tolerated,
    Variable,
    amount,
    overlap,
)

# Not the home in the image, whose files a volume there would hide.
HOME = "/home/job"
"""HOME of the pods."""
TEMPORARY = "/tmp"  # noqa: S108 - a volume of the pod, which no other pod sees
SHARED_MEMORY = "/dev/shm"  # noqa: S108
SPEC_FOLDER = "/etc/mtrain"
CODE_FOLDER = "/etc/mtrain-code"
MOUNTED = (HOME, TEMPORARY, SHARED_MEMORY, SPEC_FOLDER, CODE_FOLDER)
"""Folders of every pod that are volumes."""
# Libraries name their caches after the user, whom the image's /etc/passwd may not list.
VARIABLES = {"HOME": HOME, "USER": "mtrain", "LOGNAME": "mtrain", "PYTHONUNBUFFERED": "1"}
"""Environment variables of every pod."""


class KubernetesOptions(BaseModel):
    """The keys of ``cluster.options``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    image: Image = Field(description="container image that has mtrain and the backend's libraries")
    kind: Literal["job", "trainjob"] = Field(
        "job", description="job: an indexed Job, for any cluster; trainjob: a TrainJob of Kubeflow Trainer"
    )
    namespace: ShortName | None = Field(None, description="null: the namespace of the current context of kubeconfig")
    python: str = Field("python", min_length=1, description="interpreter that has mtrain, in the image")
    cpu: Cores = Field("4", description="processors of each pod")
    memory: Memory = Field("16Gi", description="memory of each pod; shm counts towards it")
    gpus: int = Field(
        0, ge=0, le=MAX_INT32, description="NVIDIA GPUs of each pod; as many ranks, unless nproc_per_node is set"
    )
    shm: Memory = Field("2Gi", description="size of /dev/shm")
    data_claim: Name | None = Field(None, description="PersistentVolumeClaim of the data, mounted read-only")
    data_path: Folder = Field("/data", description="where it is mounted")
    runs_claim: Name | None = Field(
        None, description="PersistentVolumeClaim of the run folders; null: they vanish with their pod"
    )
    runs_path: Folder = Field("/runs", description="where it is mounted; replaces report.dir")
    secret: Name | None = Field(
        None, description="Secret whose key MTRAIN_CLUSTER_SECRET the hosts prove to each other"
    )
    service_account: Name | None = Field(None, description="ServiceAccount of the pods; null: the namespace's default")
    user: int = Field(
        1000, ge=1, le=MAX_INT32, description="number of the user and group in the pods; 0, root, is refused"
    )
    wait_s: int = Field(1800, ge=4, description="seconds that a pod waits until all others run")
    grace_s: int = Field(60, ge=1, le=MAX_INT32, description="seconds in which a pod that is to end may save its state")
    ttl_s: int | None = Field(
        None, ge=0, le=MAX_INT32, description="seconds after which a job that has ended is deleted; null: never"
    )
    backoff: int = Field(
        3, ge=0, le=MAX_INT32, description="times that each pod may fail and be started again; disruptions count not"
    )
    queue: ShortName | None = Field(None, description="local queue of Kueue, which starts all pods together or none")
    node_selector: dict[LabelKey, LabelValue] = Field(default_factory=dict, description="labels that a node must have")
    tolerations: list[Tolerated] = Field(default_factory=list, description="tolerations of taints, as in a pod")
    priority_class: Name | None = Field(None, description="PriorityClass of the pods")
    spread: bool = Field(default=False, description="no two pods of the job on one node")
    isolate: bool = Field(
        default=True, description="a NetworkPolicy lets only the pods of the job connect to each other"
    )
    metrics_namespace: ShortName | None = Field(
        None, description="namespace from which Prometheus may read report.metrics_port; null: that of the job"
    )
    env: dict[Variable, str] = Field(default_factory=dict, description="further environment variables of the pods")
    secret_env: dict[Variable, SecretKey] = Field(
        default_factory=dict, description="environment variables from Secrets: variable -> SECRET/KEY"
    )
    env_from: list[Name] = Field(default_factory=list, description="Secrets all of whose keys become variables")
    image_pull_secrets: list[Name] = Field(
        default_factory=list, description="Secrets with which the image is fetched from a private registry"
    )

    @model_validator(mode="after")
    def _fit_together(self) -> Self:
        if amount(self.shm) > amount(self.memory):
            raise ValueError(
                f"shm {self.shm} given with memory {self.memory}, but /dev/shm counts towards memory; ask for less shm or "
                "more memory"
            )
        folders = {"runs_path": self.runs_path} | ({"data_path": self.data_path} if self.data_claim else {})
        if found := overlap(folders, MOUNTED):
            key, other = found
            raise ValueError(f"{key} {folders[key]} and {other} overlap, and both are mounted; give another {key}")
        for key, variables in (("env", self.env), ("secret_env", self.secret_env)):
            for name in variables:
                if problem := self._problem_of(name, key):
                    raise ValueError(f"{key}: {name} {problem}")
        return self

    def _problem_of(self, name: str, key: str) -> str | None:
        """Return what is wrong with a variable that ``key`` sets; None: nothing."""
        if name == CLUSTER_VARIABLE:
            return "is set by mtrain; put it into a Secret and name that with cluster.options.secret"
        if name in VARIABLES:
            return "is set by mtrain; leave it out"
        if key == "env" and name in self.secret_env:
            return "is given in env and in secret_env; leave one of them out"
        return None


def check_name(name: str, *, longest: str) -> None:
    """Refuse a name of a run that cannot name the objects of its job.

    ``longest``: the longest host name that is made of it.

    Raises:
        UsageError: it is no RFC 1123 label that begins with a letter, or too long.
    """
    if not re.fullmatch(LABEL, name) or not name[0].isalpha():
        proposal = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
        proposal = proposal if proposal[:1].isalpha() else f"run-{proposal}".rstrip("-")
        raise UsageError(
            f"--name {name}: Kubernetes takes lower-case letters, digits and -, beginning with a letter (RFC 1123); "
            f"name the run with --name {proposal}"
        )
    if len(longest) > MAX_LABEL:
        room = MAX_LABEL - (len(longest) - len(name))
        raise UsageError(
            f"--name {name}: it has {len(name)} characters, but its pods' names have room for {room} ({longest}); "
            "give a shorter --name"
        )
