"""Manifests for tests: made for many jobs, checked strictly, and read as the pods would get them."""

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import kubernetes_validate
import yaml
from pydantic import BaseModel

from mtrain.core.interfaces.queue import Submission
from mtrain.spec import config
from mtrain_clusters._kubernetes.options import KubernetesOptions
from mtrain_clusters._kubernetes.queue import KubernetesQueue

# It reads the schemas of a whole version, megabytes of JSON, for each document.
kubernetes_validate.utils.schema_contents = cache(kubernetes_validate.utils.schema_contents)

BACKENDS = ("ddp", "deepspeed", "horovod", "fleet")
KINDS = ("job", "trainjob")
OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "none": {},
    "volumes": {"data_claim": "images", "runs_claim": "runs", "data_path": "/images", "runs_path": "/work/runs"},
    "gpus": {"gpus": 2, "cpu": 16, "memory": "64Gi", "shm": "8Gi", "node_selector": {"pool": "gpu"}},
    "place": {
        "namespace": "team",
        "spread": True,
        "tolerations": [{"key": "gpu", "operator": "Exists", "effect": "NoSchedule"}],
        "priority_class": "low",
        "service_account": "trainer",
    },
    "queue": {"queue": "team-queue", "ttl_s": 600, "backoff": 0, "grace_s": 300, "isolate": False},
    "credentials": {
        "secret_env": {"AWS_SECRET_ACCESS_KEY": "aws/key"},
        "env_from": ["wandb"],
        "image_pull_secrets": ["registry"],
    },
    "secret": {"secret": "mtrain", "env": {"NCCL_DEBUG": "INFO"}, "user": 4711, "python": "/opt/venv/bin/python"},
}
VERSIONS = ("1.29", kubernetes_validate.latest_version())
"""The oldest version of Kubernetes with all fields that are used, and the newest that the schemas are there for."""
CORE = ("Job", "ConfigMap", "Service", "NetworkPolicy")


def submission(*, backend: str = "ddp", hosts: int = 2, ranks: int | None = None, **more: Any) -> Submission:
    """The shipped spec digits as it is submitted."""
    values = dict(more.pop("values", None) or _digits(backend))
    made = {
        "name": "digits",
        "spec": yaml.dump(values, Dumper=yaml.CSafeDumper, sort_keys=False),
        "spec_path": Path("/home/user/runs/.submitted/digits/spec.yml"),
        "hosts": hosts,
        "ranks_per_host": ranks,
        "backend": backend,
        "python": "/home/user/venv/bin/python",
        "folder": Path("/home/user"),
    }
    return Submission(**{**made, **more})


@cache
def _digits(backend: str) -> Mapping[str, Any]:
    loaded = config.load(
        "digits", overrides=[f"backend.name={backend}", "cluster.name=kubernetes", "cluster.options.image=x"]
    )
    return loaded.values


def options(**given: Any) -> KubernetesOptions:
    return KubernetesOptions(image="registry.example/mtrain:1", **given)


def documents(submission: Submission, given: KubernetesOptions) -> list[dict[str, Any]]:
    """The documents of a request, read back from their YAML."""
    return list(yaml.load_all(KubernetesQueue(given).request(submission), Loader=yaml.CSafeLoader))


def every_case() -> list[tuple[str, str, str, int]]:
    """Backend, kind, name of the options, number of hosts."""
    return list(itertools.product(BACKENDS, KINDS, OPTIONS, (1, 3)))


class Invalid(AssertionError):
    """The API server would refuse a document, or ignore a part of it."""


def check(document: Mapping[str, Any]) -> None:
    """Check a document against the schemas of its API; fields that these do not have are refused.

    Raises:
        Invalid: the document is wrong.
    """
    try:
        if document["kind"] in CORE:
            for version in VERSIONS:
                kubernetes_validate.validate(dict(document), version, strict=True)
        else:
            _check_kubeflow(document)
    except Invalid:
        raise
    except Exception as error:
        raise Invalid(f"{document['kind']}: {error}") from error


def _check_kubeflow(document: Mapping[str, Any]) -> None:
    from kubeflow_trainer_api import models  # more than a second, which collecting need not take

    kinds: dict[str, type[BaseModel]] = {
        "TrainJob": models.TrainerV1alpha1TrainJob,
        "ClusterTrainingRuntime": models.TrainerV1alpha1ClusterTrainingRuntime,
    }
    read = kinds[document["kind"]].from_dict(dict(document)).to_dict()  # type: ignore[attr-defined]
    if read != document:  # these models leave out what they do not know
        raise Invalid(f"{document['kind']}: {document} is read as {read}")
    for pod_job in _jobs_in(document):
        kubernetes_validate.validate(pod_job, VERSIONS[-1], strict=True)


def _jobs_in(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The Jobs that a runtime makes, as documents of their own, since their schema says more than Kubeflow's models."""
    if document["kind"] != "ClusterTrainingRuntime":
        return []
    return [
        {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": each["name"]}, "spec": each["template"]["spec"]}
        for each in document["spec"]["template"]["spec"]["replicatedJobs"]
    ]


# ------------------------------------------------------------------------------------------------ what a pod would run
@dataclass(frozen=True)
class Pod:
    """One pod of a job as the kubelet would start it."""

    index: int
    host: str
    """Its name, under which the others find it."""
    argv: Sequence[str]
    env: Mapping[str, str]
    files: Mapping[str, str]
    """Mounted files: path -> content."""
    writable: Sequence[str]
    """Folders that it may write to."""
    spec: Mapping[str, Any]
    """The spec of the pod."""


def pods(documents: Sequence[Mapping[str, Any]], *, secrets: Mapping[str, str] | None = None) -> list[Pod]:
    """The pods of a job; ``secrets``: the variables in Secrets, by name."""
    by_kind: dict[str, Any] = {document["kind"]: document for document in documents}
    by_kind["ConfigMap"] = [document for document in documents if document["kind"] == "ConfigMap"]
    main = documents[0]
    template = _job_pod(main) if main["kind"] == "Job" else _train_job_pod(main, by_kind["ClusterTrainingRuntime"])
    count = main["spec"]["completions"] if main["kind"] == "Job" else main["spec"]["trainer"]["numNodes"]
    return [_pod(index, main, template, by_kind, secrets or {}) for index in range(count)]


def _job_pod(document: Mapping[str, Any]) -> dict[str, Any]:
    return dict(document["spec"]["template"]["spec"])


def _train_job_pod(document: Mapping[str, Any], runtime: Mapping[str, Any]) -> dict[str, Any]:
    """The runtime's pod with the TrainJob's patches, lists merged by name, as Kubeflow Trainer documents it."""
    assert document["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    (patched,) = document["spec"]["runtimePatches"][0]["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    (own,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    pod, patch = own["template"]["spec"]["template"]["spec"], patched["template"]["spec"]["template"]["spec"]
    (container,), (change,) = pod["containers"], patch["containers"]
    trainer = document["spec"]["trainer"]
    merged = {
        **container,
        **{key: trainer[key] for key in ("image", "command", "env")},
        "resources": trainer["resourcesPerNode"],
        "volumeMounts": [*container["volumeMounts"], *change["volumeMounts"]],
    }
    security = {**pod["securityContext"], **patch["securityContext"]}
    volumes = [*pod["volumes"], *patch["volumes"]]
    subdomain = document["metadata"]["name"]  # JobSet's default
    return {
        **pod,
        **patch,
        "containers": [merged],
        "volumes": volumes,
        "securityContext": security,
        "subdomain": subdomain,
    }


def _pod(
    index: int,
    main: Mapping[str, Any],
    template: Mapping[str, Any],
    by_kind: Mapping[str, Any],
    secrets: Mapping[str, str],
) -> Pod:
    (container,) = template["containers"]
    env = {"JOB_COMPLETION_INDEX": str(index)}
    for variable in container["env"]:
        assert variable["name"] not in env, f"{variable['name']} is set twice"
        reference = variable.get("valueFrom", {}).get("secretKeyRef", {})
        env[variable["name"]] = secrets[reference["key"]] if reference else expanded(variable["value"], env)
    argv = [expanded(word, env) for word in container["command"]]
    name = main["metadata"]["name"]
    host = f"{name}-{index}" if main["kind"] == "Job" else f"{name}-node-0-{index}"
    if template.get("subdomain"):
        host += f".{template['subdomain']}"
    return Pod(index, host, argv, env, _files(container, template, by_kind), _writable(container, template), template)


def expanded(text: str, env: Mapping[str, str]) -> str:
    """What the kubelet makes of a word: ``$(NAME)`` becomes the value of a variable that is known, ``$$`` becomes ``$``."""
    return re.sub(
        r"\$(?:(\$)|\(([^)]*)\))", lambda found: found[1] or env.get(found[2], found[0]), text, flags=re.DOTALL
    )


def _files(container: Mapping[str, Any], template: Mapping[str, Any], by_kind: Mapping[str, Any]) -> dict[str, str]:
    """The files of ConfigMaps as the container sees them: path -> content."""
    sources = {volume["name"]: volume for volume in template["volumes"]}
    files = {}
    for mount in container["volumeMounts"]:
        volume = sources[mount["name"]].get("configMap")
        if volume is None:
            continue
        (config,) = [each for each in by_kind["ConfigMap"] if each["metadata"]["name"] == volume["name"]]
        paths = volume.get("items") or [{"key": key, "path": key} for key in config["data"]]
        assert {item["key"] for item in paths} == set(config["data"])
        assert all(re.fullmatch(r"[-._a-zA-Z0-9]+", item["key"]) for item in paths)
        folder = f"{mount['subPath']}/" if "subPath" in mount else ""
        files |= {
            f"{mount['mountPath']}/{item['path'].removeprefix(folder)}": config["data"][item["key"]]
            for item in paths
            if item["path"].startswith(folder)
        }
    return files


def _writable(container: Mapping[str, Any], template: Mapping[str, Any]) -> list[str]:
    assert container["securityContext"]["readOnlyRootFilesystem"]
    sources = {volume["name"]: volume for volume in template["volumes"]}
    return [
        mount["mountPath"]
        for mount in container["volumeMounts"]
        if not mount.get("readOnly") and "configMap" not in sources[mount["name"]]
    ]
