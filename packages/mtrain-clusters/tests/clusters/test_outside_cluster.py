"""A cluster in a folder of its own brings jobs to several hosts: no file of mtrain knows it."""

import json
from pathlib import Path

import pytest
from tests.clusters.conftest import run, says

from mtrain.spec import config
from tests.ports import held_port
from tests.sources import source_files

HOSTS = ("--cluster", "shell", "--ips", "127.0.0.1,127.0.0.2", "--nproc-per-node", "1")


def _arrays(run: str) -> dict[str, bytes]:
    """Return the content of every file of arrays in the last checkpoint of a run."""
    files = Path("runs", run, "checkpoints", "step-00000003").glob("*.safetensors")
    return {file.name: file.read_bytes() for file in files}


@pytest.mark.job
def test_two_hosts_of_an_outside_cluster_train_to_the_bits_of_two_ranks_on_one_host(here):
    says("-c", "spec.yml", "-b", "ddp", *HOSTS, "--master-port", str(held_port()), "--name", "hosts")
    assert (here / "reached.txt").read_text().split() == ["127.0.0.1", "127.0.0.2"]
    says("-c", "spec.yml", "-b", "ddp", "--nproc-per-node", "2", "--name", "ranks")
    assert set(_arrays("hosts")) == {"weights.safetensors", "ema.safetensors", "optimizer.safetensors"}
    assert _arrays("hosts") == _arrays("ranks")


@pytest.mark.smoke
@pytest.mark.job
def test_it_is_listed_shown_and_planned(here):
    entries = {entry["name"]: entry["state"] for entry in json.loads(says("plugins", "list", "clusters", "--json"))}
    assert [entries[name] for name in ("manual", "shell", "ssh")] == ["ready"] * 3
    assert "journal (text, default reached.txt)" in says("plugins", "show", "shell")
    options = ("-o", "cluster.options.journal=other.txt")
    plan = json.loads(says("plan", "-c", "spec.yml", "-b", "ddp", *HOSTS, *options, "--json"))
    assert plan["cluster"] == "shell"
    assert [(argv[0], argv[3]) for argv in plan["brought"]] == [("sh", "127.0.0.1"), ("sh", "127.0.0.2")]
    assert all("other.txt" in argv[2] for argv in plan["brought"])
    assert not (here / "other.txt").exists()


@pytest.mark.job
def test_a_host_that_its_command_does_not_reach_is_reported_under_its_name(here):
    (here / "outside_shell.py").write_text((here / "outside_shell.py").read_text().replace('exec "$@"', "exit 3"))
    process = run("-c", "spec.yml", "-b", "ddp", *HOSTS)
    assert process.returncode == 2
    assert "shell" in process.stdout + process.stderr
    assert "its agent did not start: exit code 3" in process.stdout + process.stderr
    assert not (here / "runs").exists()


@pytest.mark.job
def test_an_option_that_it_does_not_have_is_refused_with_the_nearest_one(here):
    process = run("plan", "-c", "spec.yml", "-o", "cluster.name=shell", "-o", "cluster.options.jurnal=x")
    assert process.returncode == 2
    assert "cluster.options.jurnal=x: unknown key; did you mean 'journal'?" in process.stderr


def test_options_of_a_cluster_that_a_flag_replaces_are_left_out_with_a_note(here):
    (here / "mine.yml").write_text("_BASE_: spec.yml\ncluster: {name: shell, options: {journal: a.txt}}\n")
    loaded = config.load("mine.yml", flags={"cluster.name": "auto"}, environ={})
    assert loaded.spec.cluster.options == {}
    assert [note.partition(": ")[0] for note in loaded.notes] == ["cluster.options.journal (mine.yml:2)"]


def test_no_file_of_mtrain_names_it():
    files = source_files(endings=(".py", ".toml", ".yml")).values()
    assert not any("outside_shell" in file.read_text(encoding="utf-8") for file in files)


UNDERIVED_LAUNCHER = """
from mtrain.core.interfaces import Command
from mtrain.system.launch_options import LaunchOptions

class Plain:
    class Options(LaunchOptions):
        nice: int = 0

    provides = frozenset({"torch"})
    agent = True

    def __init__(self, options):
        self.options = options

    def plan(self, argv, hosts, ranks_per_host):
        return [Command(host=host.address, argv=("nice", str(self.options.nice), *argv), env={}) for host in hosts]

    def deaths(self, log, status):
        return []
"""


@pytest.mark.job
def test_a_launcher_that_is_not_derived_has_the_defaults_and_options_of_its_own(here):
    (here / "underived_launcher.py").write_text(UNDERIVED_LAUNCHER)
    (here / "plugins.toml").write_text('[launchers.aaa]\nmodule = "underived_launcher:Plain"\n')
    flags = ("plan", "-c", "spec.yml", "-b", "ddp")
    assert json.loads(says(*flags, "--json"))["launcher"] == "torchrun", "not the first by name"
    (here / "plugins.toml").write_text(
        '[launchers]\ndisabled = ["torchrun"]\n[launchers.aaa]\nmodule = "underived_launcher:Plain"\n'
        "options = { nice = 3 }\n"
    )
    plan = json.loads(says(*flags, "--json"))
    assert (plan["launcher"], plan["commands"][0]["argv"][:2]) == ("aaa", ["nice", "3"])
    plan = json.loads(says(*flags, "--launcher", "aaa", "-o", "launcher.options.nice=7", "--json"))
    assert plan["commands"][0]["argv"][:2] == ["nice", "7"]
    for key, message in [
        ("nicer", "launcher.options.nicer: unknown key; did you mean 'nice'?"),
        ("threads", "launcher.options.threads: mtrain sets it"),
    ]:
        process = run(*flags, "-o", "launcher.name=aaa", "-o", f"launcher.options.{key}=1")
        assert process.returncode == 2
        assert message in process.stderr
