"""The manifests of a plain indexed Job: it needs nothing in the cluster but Kubernetes 1.29 or newer."""

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

CONTAINER = "mtrain"


def manifests(submission: Submission, options: KubernetesOptions) -> list[Manifest]:
    """Return the documents of a job: Job, ConfigMap and, for several pods, Service and NetworkPolicy.

    Raises:
        UsageError: the name of the run, or its spec, does not fit.
    """
    name = submission.name
    plan = plan_pods(submission, options, container=CONTAINER, pods=name)
    documents = [_job(plan), *config_maps(plan)]
    if plan.hosts:
        selector = {"batch.kubernetes.io/job-name": name}
        documents.append(_service(plan, selector))
        if options.isolate:
            documents.append(network_policy(plan, selector))
    return documents


def _job(plan: PodPlan) -> Manifest:
    options, count = plan.options, plan.submission.hosts
    spec: Manifest = {
        "completions": count,
        "parallelism": count,
        **failure_rules(options, container=CONTAINER),
        "template": {"metadata": {"labels": plan.labels()}, "spec": _pod(plan)},
    }
    if options.ttl_s is not None:
        spec["ttlSecondsAfterFinished"] = options.ttl_s
    return {"apiVersion": "batch/v1", "kind": "Job", **plan.in_queue(spec)}


def _pod(plan: PodPlan) -> Manifest:
    pod, place = base_pod(plan.options, container=CONTAINER), plan.place()
    volumes, mounts = plan.volumes()
    (container,) = pod["containers"]
    container |= {
        "image": plan.options.image,
        "command": plan.command(),
        "env": plan.environment(),
        "resources": plan.resources(),
    }
    if plan.metrics_port is not None:
        container["ports"] = [{"name": "metrics", "containerPort": plan.metrics_port, "protocol": "TCP"}]
    container["volumeMounts"] += mounts
    pod["volumes"] += volumes
    security = pod["securityContext"] | place.pop("securityContext")
    pod |= {**place, "securityContext": security}
    if plan.hosts:
        pod["subdomain"] = plan.domain
    if plan.options.priority_class is not None:
        pod["priorityClassName"] = plan.options.priority_class
    return pod


def _service(plan: PodPlan, selector: dict[str, str]) -> Manifest:
    """Return the headless Service under which the pods' names resolve, from their start on."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": plan.metadata(plan.domain),
        "spec": {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": selector},
    }
