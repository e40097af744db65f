"""The manifests for Kubeflow Trainer: a TrainJob, and the ClusterTrainingRuntime of its backend.

mtrain starts the ranks of each pod itself, so a runtime needs no policy of a framework, only pods that find each other.
This is what makes one runtime possible for Paddle as well, which none of Kubeflow's own serves.
"""

import hashlib
import json

from mtrain.core.interfaces.queue import Submission
from mtrain_clusters._kubernetes.options import KubernetesOptions
from mtrain_clusters._kubernetes.pods import (
    Manifest,
    PodPlan,
    base_pod,
    config_maps,
    failure_rules,
    network_policy,
    plan_pods,
)

NODE = "node"
"""Name that Kubeflow Trainer prescribes for the replicated job that trains, and for its container."""
MANAGER = "mtrain/submit"
"""Says in a TrainJob who made its patches."""


def manifests(submission: Submission, options: KubernetesOptions) -> list[Manifest]:
    """Return the documents of a job: TrainJob, ClusterTrainingRuntime, ConfigMap and perhaps NetworkPolicy.

    Raises:
        UsageError: the name of the run, or its spec, does not fit.
    """
    name = submission.name
    pods = f"{name}-{NODE}-0"  # as JobSet names the pods of the first and only Job of this replicated job
    plan = plan_pods(submission, options, container=NODE, pods=pods)
    runtime = _runtime(submission.backend, options)
    documents = [_train_job(plan, runtime["metadata"]["name"]), runtime, *config_maps(plan)]
    if plan.hosts and options.isolate:
        documents.append(network_policy(plan, {"jobset.sigs.k8s.io/jobset-name": name}))
    return documents


def _train_job(plan: PodPlan, runtime: str) -> Manifest:
    options = plan.options
    spec: Manifest = {
        "runtimeRef": {"apiGroup": "trainer.kubeflow.org", "kind": "ClusterTrainingRuntime", "name": runtime},
        "trainer": {
            "image": options.image,
            "command": plan.command(),
            "numNodes": plan.submission.hosts,
            "env": plan.environment(),
            "resourcesPerNode": plan.resources(),
        },
        "runtimePatches": [{"manager": MANAGER, "trainingRuntimeSpec": {"template": {"spec": _patch(plan)}}}],
    }
    return {"apiVersion": "trainer.kubeflow.org/v1alpha1", "kind": "TrainJob", **plan.in_queue(spec)}


def _patch(plan: PodPlan) -> Manifest:
    """Return the patch of the runtime's JobSet: what differs from job to job in the pods."""
    volumes, mounts = plan.volumes()
    pod = {**plan.place(), "volumes": volumes, "containers": [{"name": NODE, "volumeMounts": mounts}]}
    template = {"metadata": {"labels": plan.labels()}, "spec": pod}
    return {"replicatedJobs": [{"name": NODE, "template": {"spec": {"template": template}}}]}


def _runtime(backend: str, options: KubernetesOptions) -> Manifest:
    """Return the runtime of a backend."""
    pod = base_pod(options, container=NODE)
    pod["containers"][0]["image"] = "mtrain"  # every TrainJob names its own
    if options.priority_class is not None:
        pod["priorityClassName"] = options.priority_class
    job: Manifest = {
        "metadata": {"labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}},
        "spec": {**failure_rules(options, container=NODE), "template": {"spec": pod}},
    }
    jobs: Manifest = {
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
        "replicatedJobs": [{"name": NODE, "template": job}],
    }
    if options.ttl_s is not None:
        jobs["ttlSecondsAfterFinished"] = options.ttl_s
    spec: Manifest = {"mlPolicy": {"numNodes": 1}, "template": {"spec": jobs}}
    # A runtime exists once in the whole cluster. With a digest of its content in its name, a job with other options, or
    # of another version of mtrain, does not change it for others.
    digest = hashlib.sha256(json.dumps(spec, sort_keys=True).encode()).hexdigest()[:8]
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "ClusterTrainingRuntime",
        "metadata": {
            "name": f"mtrain-{backend.replace('_', '-')}-{digest}",
            "labels": {"app.kubernetes.io/name": "mtrain"},
        },
        "spec": spec,
    }
