"""The options of the cluster ``kubernetes``, and the rules for names in a Kubernetes cluster."""

import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from mtrain.errors import UsageError

MAX_LABEL = 63
"""Longest name of a host, and longest value of a label (RFC 1123; the limits of Kubernetes)."""
LABEL = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"
QUANTITY = r"^[0-9]+(\.[0-9]+)?(m|[kMGTPE]|[KMGTPE]i)?$"

Name = Annotated[str, Field(pattern=rf"^{LABEL}(\.{LABEL})*$", max_length=253)]
"""Name of an object that exists in the cluster already."""
Quantity = Annotated[str, BeforeValidator(lambda value: str(value)), Field(pattern=QUANTITY)]
"""An amount as Kubernetes writes it: ``4``, ``500m``, ``16Gi``."""
Folder = Annotated[str, Field(pattern=r"^/[^:,]+$")]
"""Absolute path in a container; ``:`` cannot be mounted."""


class KubernetesOptions(BaseModel):
    """The keys of ``cluster.options``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    image: str = Field(min_length=1, description="container image that has mtrain and the backend's libraries")
    kind: Literal["job", "trainjob"] = Field(
        "job", description="job: an indexed Job, for any cluster; trainjob: a TrainJob of Kubeflow Trainer"
    )
    namespace: Name | None = Field(None, description="null: the namespace of the current context of kubeconfig")
    python: str = Field("python", min_length=1, description="interpreter that has mtrain, in the image")
    cpu: Quantity = Field("4", description="processors of each pod")
    memory: Quantity = Field("16Gi", description="memory of each pod; shm counts towards it")
    gpus: int = Field(0, ge=0, description="NVIDIA GPUs of each pod; as many ranks, unless nproc_per_node is set")
    shm: Quantity = Field("2Gi", description="size of /dev/shm")
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
    queue: Name | None = Field(None, description="local queue of Kueue, which starts all pods together or none")
    node_selector: dict[str, str] = Field(default_factory=dict, description="labels that a node must have")
    tolerations: list[dict[str, Any]] = Field(default_factory=list, description="tolerations of taints, as in a pod")
    priority_class: Name | None = Field(None, description="PriorityClass of the pods")
    spread: bool = Field(default=False, description="no two pods of the job on one node")
    isolate: bool = Field(
        default=True, description="a NetworkPolicy lets only the pods of the job connect to each other"
    )
    env: dict[str, str] = Field(default_factory=dict, description="further environment variables of the pods")


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
