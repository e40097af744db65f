"""Every manifest for Kubernetes passes strict schemas, and its pods run what was planned."""

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from mtrain.commands.options import load_job
from mtrain.commands.train import train
from mtrain.errors import UsageError
from mtrain.jobs.place import run_name_for
from mtrain.jobs.plan.machine import Machine
from mtrain.jobs.plan.means import own_node
from mtrain.jobs.plan.plan import make_plan
from mtrain.spec import config

pytest.importorskip("kubernetes_validate", reason="the extra kube is not installed")
pytest.importorskip("kubeflow_trainer_api", reason="the extra kube is not installed")
from tests.clusters import manifests as made
from tests.clusters.manifests import BACKENDS, KINDS, OPTIONS, Invalid

from mtrain.spec import yaml_reader

NAMESPACE_LABEL = "kubernetes.io/metadata.name"
"""Label that the API server gives every namespace: its name."""


@pytest.mark.parametrize(("backend", "kind", "name", "hosts"), made.every_case())
def test_every_manifest_is_valid(backend, kind, name, hosts):
    given = made.options(kind=kind, **OPTIONS[name])
    documents = made.documents(made.submission(backend=backend, hosts=hosts), given)
    for document in documents:
        made.check(document)
    namespaces = {document["metadata"].get("namespace") for document in documents if "Runtime" not in document["kind"]}
    assert namespaces == {given.namespace}


def _places(node: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths of all mappings in a document, but of those whose keys are free."""
    free = ("labels", "data", "matchLabels", "nodeSelector", "limits", "requests", "selector", "drop")
    if isinstance(node, dict):
        return [
            path,
            *(place for key, value in node.items() if key not in free for place in _places(value, (*path, key))),
        ]
    if isinstance(node, list):
        return [place for index, value in enumerate(node) for place in _places(value, (*path, index))]
    return []


@pytest.mark.parametrize("kind", KINDS)
def test_a_field_that_does_not_exist_is_refused_anywhere(kind):
    given = made.options(
        kind=kind, **{key: value for name in ("volumes", "place") for key, value in OPTIONS[name].items()}
    )
    for document in made.documents(made.submission(), given):
        for path in _places(document):
            wrong = copy.deepcopy(document)
            node = wrong
            for key in path:
                node = node[key]
            node["terminationGracePeriodSecond"] = 60
            with pytest.raises(Invalid):
                made.check(wrong)


def test_values_of_another_type_are_refused():
    job, *_ = made.documents(made.submission(), made.options())
    job["spec"]["completions"] = "2"
    with pytest.raises(Invalid):
        made.check(job)


# ------------------------------------------------------------------------------------------ the pods run what was planned
def _planned(pod: made.Pod, tmp_path: Path) -> tuple[config.Loaded, Any]:
    """Plan what a pod runs, with mtrain's own start code."""
    (path,) = [word for word in pod.argv if word in pod.files]
    file = tmp_path / "spec.yml"
    file.write_text(pod.files[path], encoding="utf-8")
    command = list(pod.argv)
    assert command[1:4] == ["-m", "mtrain", "train"]
    words = [str(file) if word == path else word for word in command[4:]]
    params = train.make_context("train", words).params
    assert params["resume"] == "if-any"
    loaded = load_job(params)
    run_dir = Path(loaded.spec.report.dir) / run_name_for(loaded, resume="if-any")
    return loaded, make_plan(loaded, run_dir=run_dir, resume=None, machine=Machine(cores=4, devices=0))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_pods_run_the_plan_of_hosts_with_their_names(kind, backend, tmp_path):
    given = made.options(kind=kind, runs_path="/work/runs")
    pods = made.pods(made.documents(made.submission(backend=backend, hosts=4, ranks=2), given))
    names = [pod.host for pod in pods]
    flags = {"cluster.ips": names, "cluster.nproc_per_node": 2, "backend.name": backend, "report.dir": "/work/runs"}
    expected = make_plan(
        config.load("digits", flags={path: config.Given(value, "") for path, value in flags.items()}),
        run_dir=Path("/work/runs/digits"),
        resume=None,
        machine=Machine(cores=4, devices=0),
    )
    for pod in pods:
        loaded, plan = _planned(pod, tmp_path)
        assert own_node(loaded) == pod.index
        assert [host.address for host in plan.hosts] == names
        assert plan.commands == expected.commands
        assert not Path("/home/mtrain").is_relative_to(pod.env["HOME"]), "no volume hides the image's files"
        assert not {"/home", "/home/mtrain"} & set(pod.writable)
        assert "workingDir" not in pod.spec["containers"][0]
        assert plan.numbers == expected.numbers
        assert loaded.spec.cluster.joining_s == given.wait_s
        assert "/work/runs" in pod.writable


def test_the_names_of_the_pods_are_those_that_kubernetes_and_jobset_give():
    names = {
        kind: [pod.host for pod in made.pods(made.documents(made.submission(), made.options(kind=kind)))]
        for kind in KINDS
    }
    assert names == {
        "job": ["digits-0.digits", "digits-1.digits"],
        "trainjob": ["digits-node-0-0.digits", "digits-node-0-1.digits"],
    }


@pytest.mark.parametrize("kind", KINDS)
def test_one_pod_is_a_job_of_one_host(kind, tmp_path):
    documents = made.documents(made.submission(hosts=1), made.options(kind=kind))
    (pod,) = made.pods(documents)
    _, plan = _planned(pod, tmp_path)
    assert len(plan.hosts) == 1
    assert {"Service", "NetworkPolicy"}.isdisjoint(document["kind"] for document in documents)


def test_a_pod_has_as_many_ranks_as_gpus_unless_the_spec_says_otherwise():
    for ranks, expected in ((None, 4), (2, 2)):
        (pod,) = made.pods(made.documents(made.submission(hosts=1, ranks=ranks), made.options(gpus=4)))
        assert yaml.safe_load(*pod.files.values())["cluster"]["nproc_per_node"] == expected
        assert pod.spec["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "4"
    with pytest.raises(UsageError, match=r"4 ranks on each pod with cluster\.options\.gpus 2"):
        made.documents(made.submission(ranks=4), made.options(gpus=2))


# --------------------------------------------------------------------------------------------------------------- security
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", OPTIONS)
def test_the_pods_have_no_privileges(kind, name):
    documents = made.documents(made.submission(), made.options(kind=kind, **OPTIONS[name]))
    for pod in made.pods(documents, secrets={"MTRAIN_CLUSTER_SECRET": "known", "key": "known"}):
        (container,) = pod.spec["containers"]
        assert pod.spec["automountServiceAccountToken"] is False
        assert pod.spec["securityContext"]["runAsNonRoot"] is True
        assert pod.spec["securityContext"]["runAsUser"] == made.options(**OPTIONS[name]).user > 0
        assert pod.spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert container["resources"]["requests"] == container["resources"]["limits"]
        assert pod.env["HOME"] in pod.writable
        assert {"/tmp", "/dev/shm"} < set(pod.writable)
        assert not {"sh", "bash", "-c"} & set(container["command"]) - {"-c"}


def test_a_secret_is_a_reference_and_never_a_value():
    (pod, _) = made.pods(
        made.documents(made.submission(), made.options(**OPTIONS["secret"])), secrets={"MTRAIN_CLUSTER_SECRET": "known"}
    )
    assert pod.env["MTRAIN_CLUSTER_SECRET"] == "known"
    with pytest.raises(ValidationError, match=r"put it into a Secret"):
        made.options(env={"MTRAIN_CLUSTER_SECRET": "known"})


@pytest.mark.parametrize("kind", KINDS)
def test_prometheus_may_read_the_port_for_it_and_no_other(kind, tmp_path):
    values = yaml.safe_load(made.submission().spec)
    closed = made.documents(made.submission(), made.options(kind=kind))
    values["report"]["metrics_port"] = 9400
    for given, readers in (
        ({}, {"podSelector": {}}),
        ({"metrics_namespace": "monitoring"}, {"namespaceSelector": {"matchLabels": {NAMESPACE_LABEL: "monitoring"}}}),
    ):
        opened = made.documents(made.submission(values=values), made.options(kind=kind, **given))
        among, metrics = opened[-1]["spec"]["ingress"]
        assert [among] == closed[-1]["spec"]["ingress"]
        assert metrics == {"from": [readers], "ports": [{"port": 9400, "protocol": "TCP"}]}
        for document in opened:
            made.check(document)
    for pod in made.pods(opened):
        loaded, _ = _planned(pod, tmp_path)
        assert (loaded.spec.report.metrics_port, loaded.spec.report.metrics_address) == (9400, "0.0.0.0")
    values["report"]["metrics_address"] = "host"
    (pod, _) = made.pods(made.documents(made.submission(values=values), made.options(kind=kind)))
    assert _planned(pod, tmp_path)[0].spec.report.metrics_address == "host"


@pytest.mark.parametrize("kind", KINDS)
def test_failures_of_pods_have_the_consequences_of_their_exit_codes(kind):
    documents = made.documents(made.submission(), made.options(kind=kind, backoff=5))
    spec = documents[0]["spec"] if kind == "job" else made._jobs_in(documents[1])[0]["spec"]
    (container,) = spec["template"]["spec"]["containers"]

    def consequence(*, code: int, disrupted: bool = False) -> str:
        """What the first rule that matches says, as the Job controller reads them."""
        for rule in spec["podFailurePolicy"]["rules"]:
            exits = rule.get("onExitCodes")
            if disrupted and any(pattern["type"] == "DisruptionTarget" for pattern in rule.get("onPodConditions", ())):
                return rule["action"]
            if exits and exits["containerName"] == container["name"] and code in exits["values"]:
                return rule["action"]
        return "Count"

    assert consequence(code=2) == "FailJob"
    assert consequence(code=143) == "Ignore"
    assert consequence(code=2, disrupted=True) == consequence(code=137, disrupted=True) == "Ignore"
    assert consequence(code=1) == consequence(code=137) == "Count"
    assert (spec["backoffLimitPerIndex"], spec["maxFailedIndexes"], spec["podReplacementPolicy"]) == (5, 0, "Failed")
    assert (spec["completionMode"], spec["template"]["spec"]["restartPolicy"]) == ("Indexed", "Never")


# --------------------------------------------------------------------------------------------------- names, sizes, scripts
@pytest.mark.parametrize(
    ("name", "proposal"),
    [("Digits", "digits"), ("yolov5n_bccd", "yolov5n-bccd"), ("5n", "run-5n"), ("a.b", "a-b"), ("-", "run")],
)
def test_a_name_that_kubernetes_refuses_is_refused_with_another(name, proposal):
    with pytest.raises(UsageError, match=rf"--name {proposal}$"):
        made.documents(made.submission(name=name), made.options())
    made.documents(made.submission(name=proposal), made.options())


@pytest.mark.parametrize(("kind", "room"), [("job", 60), ("trainjob", 53)])
def test_a_name_may_be_as_long_as_its_pods_names_allow(kind, room):
    for count in (room, room + 1):
        one = made.submission(name="n" * count, hosts=11)
        if count == room:
            assert (
                max(len(pod.host.partition(".")[0]) for pod in made.pods(made.documents(one, made.options(kind=kind))))
                == 63
            )
        else:
            with pytest.raises(UsageError, match=f"have room for {room} "):
                made.documents(one, made.options(kind=kind))


def test_text_that_looks_like_a_number_is_in_quotes():
    """Kubernetes reads YAML 1.2, in which 1e3 is a number, and refuses a number as the value of a variable."""
    text = yaml_reader.dumped_all([{"env": [{"name": "RUN", "value": "1e3"}, {"name": "JOB", "value": "0008"}]}])
    assert "value: '1e3'" in text
    assert "value: '0008'" in text


def test_a_spec_that_no_config_map_holds_is_refused():
    values = {**yaml.safe_load(made.submission().spec), "text": "x" * (1 << 20)}
    with pytest.raises(UsageError, match="ConfigMap holds 1048576"):
        made.documents(made.submission(values=values), made.options())


def test_runs_that_would_vanish_are_named_on_top():
    from mtrain_clusters._kubernetes.queue import KubernetesQueue

    assert KubernetesQueue(made.options()).request(made.submission()).startswith("# No runs_claim is given")
    assert not KubernetesQueue(made.options(runs_claim="runs")).request(made.submission()).startswith("#")


def test_runtimes_of_different_content_have_different_names():
    def name(backend="ddp", **given):
        _, runtime, *_ = made.documents(made.submission(backend=backend), made.options(kind="trainjob", **given))
        return runtime["metadata"]["name"]

    assert name(namespace="a") == name(namespace="b")  # it may be shared
    names = [name(), name(backend="fleet"), name(backoff=1), name(ttl_s=60), name(priority_class="low")]
    assert len(set(names)) == len(names)
