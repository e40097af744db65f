"""The options of the cluster ``kubernetes``, and the rules for names in a Kubernetes cluster. All else the API server checks."""

import posixpath
import re
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from mtrain.errors import UsageError
from mtrain.system.job_secret import CLUSTER_VARIABLE

# Not the home in the image, whose files a volume there would hide.
HOME = "/home/job"
"""HOME of the pods."""
TEMPORARY = "/tmp"  # noqa: S108 - a volume of the pod, which no other pod sees
SHARED_MEMORY = "/dev/shm"  # noqa: S108
SPEC_FOLDER = "/etc/mtrain"
CODE_FOLDER = "/etc/mtrain-code"
# Libraries name their caches after the user, whom the image's /etc/passwd may not list.
VARIABLES = {"HOME": HOME, "USER": "mtrain", "LOGNAME": "mtrain", "PYTHONUNBUFFERED": "1"}
"""Environment variables of every pod."""

MAX_LABEL = 63
"""Longest name of a host, and longest value of a label (RFC 1123; the limits of Kubernetes)."""
LABEL = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"
Name = Annotated[str, Field(pattern=rf"^{LABEL}(\.{LABEL})*$", max_length=253)]
"""Name of an object that exists in the cluster already."""
ShortName = Annotated[str, Field(pattern=rf"^{LABEL}$", max_length=MAX_LABEL)]
"""Name of a namespace, or one that is the value of a label too."""
Folder = Annotated[str, Field(pattern=r"^/[^:,]+$"), AfterValidator(posixpath.normpath)]
"""Absolute path in a container; ``:`` cannot be mounted."""
Amount = Annotated[str, BeforeValidator(str)]
"""A number of processors or bytes as Kubernetes writes it."""


class KubernetesOptions(BaseModel):
    """The keys of ``cluster.options``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    image: str = Field(description="container image that has mtrain and the backend's libraries")
    kind: Literal["job", "trainjob"] = Field(
        "job", description="job: an indexed Job, for any cluster; trainjob: a TrainJob of Kubeflow Trainer"
    )
    namespace: ShortName | None = Field(None, description="null: the namespace of the current context of kubeconfig")
    python: str = Field("python", min_length=1, description="interpreter that has mtrain, in the image")
    cpu: Amount = Field("4", description="processors of each pod")
    memory: Amount = Field("16Gi", description="memory of each pod; shm counts towards it")
    gpus: int = Field(0, ge=0, description="NVIDIA GPUs of each pod; as many ranks, unless nproc_per_node is set")
    shm: Amount = Field("2Gi", description="size of /dev/shm")
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
    user: int = Field(1000, ge=1, description="number of the user and group in the pods; 0, root, is refused")
    wait_s: int = Field(1800, ge=4, description="seconds that a pod waits until all others run")
    grace_s: int = Field(60, ge=1, description="seconds in which a pod that is to end may save its state")
    ttl_s: int | None = Field(
        None, ge=0, description="seconds after which a job that has ended is deleted; null: never"
    )
    backoff: int = Field(
        3, ge=0, description="times that each pod may fail and be started again; disruptions count not"
    )
    queue: ShortName | None = Field(None, description="local queue of Kueue, which starts all pods together or none")
    node_selector: dict[str, str] = Field(default_factory=dict, description="labels that a node must have")
    tolerations: list[dict[str, Any]] = Field(default_factory=list, description="tolerations of taints, as in a pod")
    priority_class: Name | None = Field(None, description="PriorityClass of the pods")
    spread: bool = Field(default=False, description="no two pods of the job on one node")
    isolate: bool = Field(
        default=True, description="a NetworkPolicy lets only the pods of the job connect to each other"
    )
    metrics_namespace: ShortName | None = Field(
        None, description="namespace from which Prometheus may read report.metrics_port; null: that of the job"
    )
    env: dict[str, str] = Field(default_factory=dict, description="further environment variables of the pods")
    secret_env: dict[str, Annotated[str, Field(pattern=r"^[^/]+/[^/]+$")]] = Field(
        default_factory=dict, description="environment variables from Secrets: variable -> SECRET/KEY"
    )
    env_from: list[Name] = Field(default_factory=list, description="Secrets all of whose keys become variables")
    image_pull_secrets: list[Name] = Field(
        default_factory=list, description="Secrets with which the image is fetched from a private registry"
    )

    @model_validator(mode="after")
    def _fit_together(self) -> Self:
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
