"""The former keys ``cluster.launcher`` and ``cluster.ssh`` keep their meaning beside the keys that replaced them."""

from pathlib import Path

import pytest

from mtrain.errors import SpecError
from mtrain.spec import config, former_keys
from mtrain.spec.config import Given


@pytest.fixture
def spec(tmp_path, monkeypatch):
    """Return a function that writes a spec with the given section ``cluster`` and loads it."""
    monkeypatch.chdir(tmp_path)

    def load(cluster: str = "{}", *overrides: str, **flags):
        Path("mine.yml").write_text(f"_BASE_: digits\ncluster: {cluster}\n")
        typed = {name.replace("__", "."): Given(value, f"--{name}") for name, value in flags.items()}
        return config.load("mine.yml", overrides=overrides, flags=typed, environ={})

    return load


def names(loaded) -> tuple[str, str]:
    return loaded.spec.cluster.name, loaded.spec.launcher.name


@pytest.mark.parametrize(
    ("launcher", "expected"),
    [
        ("ssh", ("ssh", "auto")),
        ("manual", ("manual", "auto")),
        ("torchrun", ("auto", "torchrun")),
        ("auto", ("auto",) * 2),
    ],
)
def test_the_former_launcher_is_a_cluster_or_a_launcher(spec, launcher, expected):
    loaded = spec(f"{{launcher: {launcher}}}")
    assert names(loaded) == expected
    assert loaded.spec.cluster.launcher == "auto"


def test_the_value_keeps_the_place_where_it_was_written(spec):
    assert str(spec("{launcher: ssh}").origin("cluster.name")) == "mine.yml:2"
    assert str(spec("{}", cluster__launcher="ssh").origin("cluster.name")) == "--cluster__launcher"


@pytest.mark.parametrize(
    ("section", "override", "expected"),
    [
        ("{name: ssh}", "cluster.launcher=manual", "manual"),
        ("{launcher: ssh}", "cluster.name=manual", "manual"),
        ("{name: ssh}", "cluster.launcher=auto", "auto"),
        ("{launcher: ssh}", "cluster.launcher=torchrun", "auto"),
        ("{name: ssh}", "cluster.launcher=torchrun", "ssh"),
        ("{name: ssh, launcher: ssh}", "cluster.threads=1", "ssh"),
        ("{name: ssh, launcher: auto}", "cluster.threads=1", "ssh"),
    ],
)
def test_the_stronger_source_counts_whichever_key_it_uses(spec, section, override, expected):
    assert spec(section, override).spec.cluster.name == expected


def test_two_values_from_one_source_are_one_error(spec):
    with pytest.raises(SpecError) as caught:
        spec("{name: manual, launcher: ssh}")
    assert list(caught.value.problems) == [
        "mine.yml:2 cluster.launcher: given 'ssh', but cluster.name is 'manual' (mine.yml:2); keep one of them, "
        "cluster.name is the name now"
    ]
    with pytest.raises(SpecError, match=r"cluster\.ssh\.port: given 22, but cluster\.options\.port is 2222"):
        spec("{name: ssh, ssh: {port: 22}, options: {port: 2222}}")


def test_an_unknown_name_is_answered_with_launchers_and_clusters(spec):
    with pytest.raises(SpecError, match=r"no launcher or cluster 'shh' \(known: .*manual, .*ssh, .*torchrun.*'ssh'\?"):
        spec("{launcher: shh}")


@pytest.mark.parametrize(
    ("section", "override", "port"),
    [
        ("{name: ssh, ssh: {port: 22}}", "cluster.ssh.user=me", 22),
        ("{name: ssh, options: {port: 22}}", "cluster.ssh.user=me", 22),
        ("{name: ssh, ssh: {port: 22}}", "cluster.options.port=23", 23),
        ("{name: ssh, options: {port: 22}}", "cluster.ssh.port=23", 23),
        ("{launcher: ssh, options: {port: 22}}", "cluster.ssh.port=null", None),
    ],
)
def test_options_of_ssh_are_read_from_both_places(spec, section, override, port):
    assert former_keys.cluster_options(spec(section, override).spec).get("port") == port


def test_a_spec_that_was_written_with_all_its_keys_loads_as_it_was(spec, tmp_path):
    import yaml

    first = spec("{launcher: ssh, ssh: {user: me}, options: {connect_timeout_s: 20}, ips: [10.0.0.1]}")
    (tmp_path / "again.yml").write_text(yaml.safe_dump(dict(first.values)))
    again = config.load("again.yml", environ={})
    assert again.spec == first.spec
    assert former_keys.cluster_options(again.spec) == {"user": "me", "connect_timeout_s": 20}


def test_default_options_of_a_policy_yield_to_the_former_section(spec, tmp_path):
    (tmp_path / "plugins.toml").write_text("[clusters.ssh]\noptions = { port = 1, connect_timeout_s = 3 }\n")
    loaded = spec("{name: ssh, ssh: {port: 22}}")
    assert former_keys.cluster_options(loaded.spec) == {"port": 22, "connect_timeout_s": 3}


def test_options_need_a_plugin_that_has_them(spec):
    with pytest.raises(SpecError, match=r"cluster\.options\.port: cluster\.name is auto, which has no options"):
        spec("{options: {port: 22}}")
    with pytest.raises(SpecError, match=r"launcher\.options\.x=1: launcher\.name is auto, which has no options"):
        spec("{}", "launcher.options.x=1")
