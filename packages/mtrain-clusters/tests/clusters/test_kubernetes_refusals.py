"""Names and variables that cannot work are refused by the plan, and so are credentials in clear text."""

import pytest
from pydantic import ValidationError

from mtrain.commands import main
from mtrain.errors import UsageError

pytest.importorskip("kubernetes_validate", reason="the extra kube is not installed")
import yaml
from tests.clusters import manifests as made

EXISTS = {"key": "gpu", "operator": "Exists"}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"namespace": "a.b"}, "namespace"),
        ({"namespace": "n" * 64}, "namespace"),
        ({"queue": "q" * 64}, "queue"),
        ({"secret": "My_Secret"}, "secret"),
        ({"env": {"HOME": "/x"}}, "leave it out"),
        ({"env": {"AB": "x"}, "secret_env": {"AB": "s/k"}}, "leave one of them out"),
        ({"secret_env": {"HOME": "s/k"}}, "leave it out"),
        ({"secret_env": {"MTRAIN_CLUSTER_SECRET": "s/k"}}, "cluster.options.secret"),
        ({"secret_env": {"KEY": "only-a-name"}}, "secret_env"),
        ({"env_from": ["A"]}, "env_from"),
        ({"image_pull_secrets": ["a_b"]}, "image_pull_secrets"),
    ],
)
def test_names_and_variables_that_cannot_work_are_refused_before(given, words):
    with pytest.raises(ValidationError) as refusal:
        made.options(**given) if "image" not in given else made.KubernetesOptions(**given)
    assert words in str(refusal.value)


@pytest.mark.parametrize(
    "given",
    [
        {"image": "localhost:5000/team/my__image-x.y:Tag_1"},
        {"image": f"registry.example/a@sha256:{'0' * 64}"},
        {"tolerations": [{"operator": "Exists"}, {**EXISTS, "effect": "NoExecute", "tolerationSeconds": 0}]},
        {"tolerations": [{"key": "example.com/gpu", "value": ""}]},
        {"node_selector": {"kubernetes.io/arch": "amd64", "empty": ""}},
        {"memory": "2Gi", "shm": "2048Mi", "cpu": "500m"},
        {"cpu": 0.5, "memory": 8_000_000_000},
        {"data_path": "/runs"},  # without a claim it is not mounted
        {"runs_path": "/runs/", "data_path": "/runs-of-data", "data_claim": "d"},
    ],
)
@pytest.mark.parametrize("kind", made.KINDS)
def test_what_the_api_server_takes_is_taken(given, kind):
    options = made.KubernetesOptions(**{"image": "mtrain:1", "kind": kind, **given})
    for document in made.documents(made.submission(), options):
        made.check(document)


@pytest.mark.parametrize("kind", made.KINDS)
def test_secrets_reach_the_pods_as_references(kind):
    options = made.options(
        kind=kind,
        secret_env={"AWS_SECRET_ACCESS_KEY": "aws.team/secret-key"},
        env_from=["wandb"],
        image_pull_secrets=["registry"],
    )
    documents = made.documents(made.submission(), options)
    for pod in made.pods(documents, secrets={"secret-key": "of the Secret"}):
        (container,) = pod.spec["containers"]
        assert pod.env["AWS_SECRET_ACCESS_KEY"] == "of the Secret"
        assert container["envFrom"] == [{"secretRef": {"name": "wandb"}}]
        assert pod.spec["imagePullSecrets"] == [{"name": "registry"}]


def test_values_of_variables_are_not_expanded():
    (pod, _) = made.pods(made.documents(made.submission(), made.options(env={"FORM": "$(HOME)/$$x$"})))
    assert pod.env["FORM"] == "$(HOME)/$$x$"


@pytest.mark.parametrize(
    ("spec", "env", "place"),
    [
        ({}, {"AWS_SECRET_ACCESS_KEY": "abc"}, "env.AWS_SECRET_ACCESS_KEY"),
        ({}, {"PROXY": "http://bob:hunter2@proxy"}, "env.PROXY"),
        ({}, {"X": "ghp_0123456789abcdefghij"}, "env.X"),
        ({"report": {"reporters": {"mlflow": {"tracking_uri": "http://bob:hunter2@h"}}}}, {}, "mlflow.tracking_uri"),
        ({"report": {"reporters": {"wandb": {"api_key": "0123"}}}}, {}, "wandb.api_key"),
        ({"data": {"root": "s3://me:hunter2@bucket/x"}}, {}, "data.root"),
        ({"data": {"options": {"urls": ["https://h/x?token=abcdef"]}}}, {}, "data.options.urls.0"),
    ],
)
def test_a_credential_in_clear_text_is_refused_without_being_repeated(spec, env, place):
    values = {**yaml.safe_load(made.submission().spec), **spec}
    with pytest.raises(UsageError) as refusal:
        made.documents(made.submission(values=values), made.options(env=env))
    assert place in str(refusal.value)
    assert "secret_env" in str(refusal.value)
    assert "hunter2" not in str(refusal.value)


def test_an_argument_of_a_script_that_is_a_credential_is_refused(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("")
    with pytest.raises(UsageError) as refusal:
        made.documents(made.submission(arguments=(str(script), "--api-key", "hunter2")), made.options())
    assert "secret_env" in str(refusal.value)
    assert "hunter2" not in str(refusal.value)


@pytest.mark.parametrize(
    ("spec", "env"),
    [
        ({"model": {"options": {"tokenizer": "bert", "author": "me"}}}, {}),
        ({"data": {"root": "s3://bucket/a@b"}}, {"NCCL_SOCKET_IFNAME": "eth0"}),
        (
            {"report": {"reporters": {"mlflow": {"tracking_uri": "http://mlflow:5000"}}}},
            {"S3_ENDPOINT_URL": "http://s3:9"},
        ),
    ],
)
def test_what_is_no_credential_is_taken(spec, env):
    values = {**yaml.safe_load(made.submission().spec), **spec}
    made.documents(made.submission(values=values), made.options(env=env))


def test_the_plan_names_the_key_that_is_wrong(capsys):
    flags = ["--cluster", "kubernetes", "-N", "2", "-o", "cluster.options={image: mtrain:1, env: {HOME: /x}}"]
    assert main(["plan", "-c", "digits", *flags]) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: ")
    assert "cluster.options" in message
    assert "env: HOME is set by mtrain" in message
    assert "Value error" not in message
