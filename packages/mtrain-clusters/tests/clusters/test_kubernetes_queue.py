"""Jobs are given to an API server through the official client; the server is a played one, see ``api_server``."""

import threading
import time
from contextlib import redirect_stderr, redirect_stdout
from datetime import UTC, datetime
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

pytest.importorskip("kubernetes", reason="the extra kube is not installed")
pytest.importorskip("kubernetes_validate", reason="the extra kube is not installed")
from tests.clusters.api_server import ApiServer, served

from mtrain.commands import main
from mtrain_clusters._kubernetes import queue

FLAGS = ("-c", "digits", "--cluster", "kubernetes", "-N", "2", "-o", "cluster.options.image=mtrain:1")
TRAIN_JOB = ("-o", "cluster.options.kind=trainjob")


@pytest.fixture
def server(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with served() as state:
        monkeypatch.setenv("KUBECONFIG", str(state.kubeconfig(tmp_path / "kubeconfig")))
        yield state


def _mtrain(*words: str, code: int = 0) -> str:
    """What a command of mtrain prints."""
    output = StringIO()
    with redirect_stdout(output), redirect_stderr(output):
        actual = main(words)
    assert actual == code, output.getvalue()
    return output.getvalue()


def test_a_job_is_submitted_and_its_parts_belong_to_it(server: ApiServer):
    assert "submitted job digits to kubernetes: run digits" in _mtrain("submit", *FLAGS)
    uid = server.job("digits")["metadata"]["uid"]
    for plural, name in (("configmaps", "digits-spec"), ("services", "digits"), ("networkpolicies", "digits")):
        (owner,) = server.objects["default", plural, name]["metadata"]["ownerReferences"]
        assert owner == {"apiVersion": "batch/v1", "kind": "Job", "name": "digits", "uid": uid}


def test_a_train_job_is_submitted_with_a_runtime_that_others_share(server: ApiServer):
    for name in ("one", "two"):
        _mtrain("submit", *FLAGS, *TRAIN_JOB, "--name", name)
    (runtime,) = server.names("clustertrainingruntimes")
    assert "ownerReferences" not in server.objects["", "clustertrainingruntimes", runtime]["metadata"]
    assert server.names("trainjobs") == ["one", "two"]
    assert server.names("configmaps") == ["one-spec", "two-spec"]


def test_a_runtime_that_an_administrator_has_applied_serves_who_may_not_create_it(server: ApiServer):
    _mtrain("submit", *FLAGS, *TRAIN_JOB, "--name", "one")
    server.forbidden = {"clustertrainingruntimes"}  # as a real server, which refuses before it looks for the name
    _mtrain("submit", *FLAGS, *TRAIN_JOB, "--name", "two")
    assert server.names("trainjobs") == ["one", "two"]
    (runtime,) = server.names("clustertrainingruntimes")
    del server.objects["", "clustertrainingruntimes", runtime]
    text = _mtrain("submit", *FLAGS, *TRAIN_JOB, "--name", "three", code=2)
    assert 'is forbidden: User "me"' in text
    assert "an administrator can apply it once" in text
    assert server.names("trainjobs") == ["one", "two"]


@pytest.mark.parametrize(
    ("options", "plural", "label"),
    [((), "jobs", ""), (TRAIN_JOB, "trainjobs", "jobset.sigs.k8s.io/jobset-name")],
)
def test_the_state_follows_pods_and_conditions(server: ApiServer, options, plural, label):
    _mtrain("submit", *FLAGS, *options)
    assert "waiting [0 of 2 pods are running]" in _mtrain("status")
    server.pod("digits-0-a", "digits", 0, "Running", label=label)
    server.pod("digits-1-a", "digits", 1, "Pending", label=label)
    assert "waiting on node-0 [1 of 2 pods are running]" in _mtrain("status")
    server.pod("digits-1-a", "digits", 1, "Running", label=label)
    assert "running on node-0, node-1 [2 of 2 pods are running]" in _mtrain("status")
    server.end("digits", "Complete", plural=plural)
    assert "done [Complete, exit code 0]" in _mtrain("status")
    server.pod("digits-1-a", "digits", 1, "Failed", code=2, label=label)
    server.end("digits", "Failed", plural=plural, reason="PodFailurePolicy", message="Container failed")
    assert "failed [Failed: PodFailurePolicy: Container failed, exit code 2]" in _mtrain("status")


@pytest.mark.parametrize(
    ("options", "label", "job"),
    [((), "", "digits"), (TRAIN_JOB, "jobset.sigs.k8s.io/jobset-name", "digits-node-0")],
)
def test_a_waiting_job_tells_what_keeps_its_pods_from_running(server: ApiServer, options, label, job):
    quota = 'pods "digits-1-x" is forbidden: exceeded quota: small, requested: cpu=4, used: cpu=4, limited: cpu=6'
    _mtrain("submit", *FLAGS, *options)
    server.warn("Job", job, quota)
    server.warn("Job", job, "of an hour before", hour=8)
    server.warn("Job", "other", "of another job", hour=10)
    assert f"waiting [0 of 2 pods are running; FailedCreate: {quota}]" in _mtrain("status")
    server.pod("digits-0-a", "digits", 0, "Running", label=label)
    assert f"waiting on node-0 [1 of 2 pods are running; FailedCreate: {quota}]" in _mtrain("status")
    server.pod("digits-1-a", "digits", 1, "Pending", label=label)
    assert "waiting on node-0 [1 of 2 pods are running]" in _mtrain("status")  # it was created since
    server.warn("Pod", "digits-1-a", 'configmap "c" not found', reason="FailedMount")
    assert 'running; pod digits-1-a: FailedMount: configmap "c" not found]' in _mtrain("status")
    pod = server.objects["default", "pods", "digits-1-a"]
    waiting = {"reason": "ImagePullBackOff", "message": 'Back-off pulling image "mtrain:1"'}
    pod["status"]["containerStatuses"] = [
        {"name": "m", "state": {"waiting": waiting}, "image": "i", "imageID": "", "ready": False, "restartCount": 0}
    ]
    assert 'pod digits-1-a: ImagePullBackOff: Back-off pulling image "mtrain:1"]' in _mtrain("status")
    unbound = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/2 nodes have room"}
    pod["status"]["conditions"] = [unbound]
    assert "pod digits-1-a: Unschedulable: 0/2 nodes have room]" in _mtrain("status")
    server.pod("digits-1-a", "digits", 1, "Running", label=label)
    assert "running on node-0, node-1 [2 of 2 pods are running]" in _mtrain("status")


def test_who_may_not_read_events_is_told_the_state_without_them(server: ApiServer):
    server.forbidden = {"events"}
    _mtrain("submit", *FLAGS)
    assert "waiting [0 of 2 pods are running]" in _mtrain("status")


def _ended_pod(code: int | None, minute: int) -> SimpleNamespace:
    """A pod as the official client returns it, ended at that minute of an hour; None: it runs."""
    ended = (
        None
        if code is None
        else SimpleNamespace(exit_code=code, finished_at=datetime(2026, 1, 1, 9, minute, tzinfo=UTC))
    )
    statuses = [SimpleNamespace(state=SimpleNamespace(terminated=ended)), SimpleNamespace(state=None)]
    return SimpleNamespace(status=SimpleNamespace(phase="Failed", container_statuses=statuses))


@pytest.mark.parametrize(
    ("pods", "code"),
    [
        ([(143, 5), (1, 40), (137, 20)], 1),
        ([(1, 40), (143, 5), (0, 50)], 1),
        ([(0, 50), (None, 0)], None),
        ([], None),
    ],
)
def test_the_exit_code_of_a_failed_job_is_that_of_the_pod_that_failed_last(pods, code):
    job = {"status": {"conditions": [{"type": "Failed", "status": "True"}]}}
    state = queue._state(job, [_ended_pod(*pod) for pod in pods])
    assert (state.phase, state.code) == ("failed", code)


def test_a_suspended_job_waits_in_the_words_of_its_queue(server: ApiServer):
    _mtrain("submit", *FLAGS, "-o", "cluster.options.queue=team")
    assert server.job("digits")["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team"
    server.end("digits", "Suspended", message="Job suspended")
    assert "waiting [Suspended: Job suspended]" in _mtrain("status")


def test_logs_are_those_of_the_first_host_and_of_its_pods_in_turn(server: ApiServer):
    _mtrain("submit", *FLAGS)
    server.pod("digits-0-a", "digits", 0, "Failed", code=143)
    server.pod("digits-0-b", "digits", 0, "Running")
    server.pod("digits-1-a", "digits", 1, "Running")
    server.logs = {"digits-0-a": "update 1\nsaved\n", "digits-0-b": "goes on: größer\nlast", "digits-1-a": "of another"}
    assert _mtrain("logs").splitlines() == ["update 1", "saved", "goes on: größer", "last"]


def test_logs_of_a_failed_job_are_those_of_the_pod_that_failed_where_the_first_hosts_pods_were_deleted(
    server: ApiServer,
):
    _mtrain("submit", *FLAGS)
    server.pod("digits-1-a", "digits", 1, "Failed", code=143)
    server.pod("digits-1-b", "digits", 1, "Failed", code=2)
    server.logs = {"digits-1-a": "saved\n", "digits-1-b": "error: /nowhere: no such folder\n"}
    assert _mtrain("logs") == ""  # the first host's pod is yet to come
    server.end("digits", "Failed", reason="PodFailurePolicy")
    for flags in ((), ("-f",)):
        head, line = _mtrain("logs", *flags).splitlines()
        assert (head, line) == (
            "the pods of the first host were deleted; pod digits-1-b:",
            "error: /nowhere: no such folder",
        )


def test_followed_logs_go_on_in_the_pod_that_replaces_another_until_the_job_ends(server: ApiServer, monkeypatch):
    monkeypatch.setattr("mtrain_clusters._kubernetes.queue.POLL_S", 0.05)
    _mtrain("submit", *FLAGS)
    server.pod("digits-0-a", "digits", 0, "Pending")
    server.logs = {"digits-0-a": "before\n", "digits-0-b": "after\n"}

    def happen() -> None:
        """Let the command look at least twice at each state."""
        for change in (
            lambda: server.pod("digits-0-a", "digits", 0, "Failed", code=143),
            lambda: server.pod("digits-0-b", "digits", 0, "Running"),
            lambda: server.end("digits", "Complete"),
        ):
            before = len(server.asked)
            while len(server.asked) < before + 4:
                time.sleep(0.01)
            change()

    thread = threading.Thread(target=happen)
    thread.start()
    assert _mtrain("logs", "-f").splitlines() == ["before", "after"]
    thread.join()


def test_cancel_deletes_the_job_and_its_parts(server: ApiServer):
    _mtrain("submit", *FLAGS)
    assert "asked to end" in _mtrain("cancel")
    assert server.objects == {}
    assert "unknown [the API server has no such job any more" in _mtrain("status")
    _mtrain("cancel")  # one that is gone is no error


def test_a_name_that_is_taken_is_refused_and_nothing_is_left(server: ApiServer):
    _mtrain("submit", *FLAGS)
    (Path("runs") / ".submitted").rename("elsewhere")  # as another user's
    before = dict(server.objects)
    assert (
        'jobs "digits" already exists; give another --name, or delete it first: kubectl delete job digits'
        in _mtrain("submit", *FLAGS, code=2)
    )
    assert server.objects == before
    assert not list(Path("runs").glob(".submitted/*/*"))


def test_a_part_that_is_refused_takes_the_job_with_it(server: ApiServer):
    server.forbidden = {"networkpolicies"}
    assert 'NetworkPolicy digits: networkpolicies is forbidden: User "me"' in _mtrain("submit", *FLAGS, code=2)
    assert server.objects == {}
    _mtrain("submit", *FLAGS, "-o", "cluster.options.isolate=false")


def test_the_namespace_is_that_of_the_context_unless_it_is_given(server: ApiServer, tmp_path):
    server.kubeconfig(tmp_path / "kubeconfig", namespace="team")
    _mtrain("submit", *FLAGS)
    _mtrain("submit", *FLAGS, "--name", "other", "--namespace", "mine")
    assert {key[0] for key in server.objects if key[1] == "jobs"} == {"team", "mine"}


def test_a_job_is_found_where_it_was_given_when_the_context_has_changed(server: ApiServer, tmp_path):
    server.kubeconfig(tmp_path / "kubeconfig", namespace="team")
    _mtrain("submit", *FLAGS)
    server.objects["other", "jobs", "digits"] = server.job("digits", namespace="team") | {"status": {}}
    server.kubeconfig(tmp_path / "kubeconfig", namespace="other")
    server.job("digits", namespace="team")["status"] = {"conditions": [{"type": "Complete", "status": "True"}]}
    assert "digits: done" in _mtrain("status")
    _mtrain("submit", *FLAGS, "--name", "second")
    _mtrain("cancel", "second")
    assert [key[0] for key in server.objects if key[1] == "jobs"] == ["team", "other"]


def test_a_pod_submits_to_its_own_namespace(server: ApiServer, tmp_path, monkeypatch):
    from kubernetes import client, config

    def load() -> None:
        configuration = client.Configuration(host=f"http://127.0.0.1:{server.port}")
        configuration.api_key["authorization"] = "Bearer of-a-user"
        client.Configuration.set_default(configuration)

    file = tmp_path / "namespace"
    file.write_text("team-of-the-pod\n")
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "absent"))
    monkeypatch.setattr(config, "load_incluster_config", load)
    monkeypatch.setattr("mtrain_clusters._kubernetes.client.NAMESPACE_FILE", file)
    monkeypatch.setattr(client.Configuration, "_default", None)
    _mtrain("submit", *FLAGS)
    assert {key[0] for key in server.objects if key[1] != "clustertrainingruntimes"} == {"team-of-the-pod"}


def test_a_wrong_token_is_said_in_the_servers_words(server: ApiServer, tmp_path):
    file = tmp_path / "kubeconfig"
    file.write_text(file.read_text().replace("of-a-user", "old"))
    assert "kubernetes, Job digits: Unauthorized" in _mtrain("submit", *FLAGS, code=2)


def test_a_server_that_is_not_there_is_said(server: ApiServer, tmp_path):
    server.port = 1
    server.kubeconfig(tmp_path / "kubeconfig")
    assert "the API server cannot be reached" in _mtrain("submit", *FLAGS, code=2)


def test_without_kubeconfig_nothing_is_submitted_and_the_remedy_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "absent"))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    text = _mtrain("submit", *FLAGS, code=2)
    assert "no kubeconfig can be used" in text
    assert "mtrain plan --cluster kubernetes" in text
    assert not list(Path("runs").glob(".submitted/*/*"))


def test_hosts_cannot_be_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = _mtrain("train", *FLAGS[:4], *FLAGS[6:], "--ips", "10.0.0.1,10.0.0.2", code=2)
    assert "leave out --ips" in text


@pytest.mark.parametrize("backend", ["ddp", "deepspeed", "horovod", "fleet"])
def test_the_plan_is_the_request_and_asks_no_server(tmp_path, monkeypatch, backend):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "absent"))
    kinds = [document["kind"] for document in yaml.safe_load_all(_mtrain("plan", *FLAGS, "-b", backend))]
    assert kinds == ["Job", "ConfigMap", "Service", "NetworkPolicy"]
