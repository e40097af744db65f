"""A malicious spec, policy, environment or peer achieves nothing, and is reported in one line."""

import os
import stat
import subprocess
import sys

import pytest

from mtrain.errors import PluginError, SpecError, UsageError
from mtrain.spec import config, plugins
from mtrain.system.environment import clean, forward, redact, redacted_words
from mtrain.system.job_secret import CLUSTER_VARIABLE, VARIABLE, draw_secret
from tests.sources import source_files

BILLION_LAUGHS = "a: &a [x,x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{chr(98 + i)}: &{chr(98 + i)} [{','.join(['*' + chr(97 + i)] * 10)}]\n" for i in range(12)
)
MERGED_LAUGHS = "a: &a {x: 1}\n" + "".join(
    f"{chr(98 + i)}: &{chr(98 + i)} {{<<: [{','.join(['*' + chr(97 + i)] * 10)}]}}\n" for i in range(12)
)
BOMBS = {
    "nested in brackets": ("train: " + "[" * 200_000, "nested deeper than 40"),
    "nested in braces": ("model: " + "{a: " * 100_000, "nested deeper than 40"),
    "nested by indent": ("\n".join(" " * i + "a:" for i in range(1000)), "nested deeper than 40"),
    "questions": ("? " * 100_000, "nested deeper than 40"),
    "aliases": (BILLION_LAUGHS, "aliases expand"),
    "merged aliases": (MERGED_LAUGHS, "aliases expand"),
    "contains itself": ("a: &a [*a]\n", "aliases expand"),
    "merges itself": ("a: &a {<<: *a}\n", "aliases expand"),
    "long list": ("cluster: {devices: [" + "1," * 40_000 + "1]}", "more than 30000 values"),
    "long integer": ("train: {batch_size: " + "9" * 3000 + "}", "given inf, expected an integer"),
    "longer integer": ("train: {batch_size: " + "9" * 300_000 + "}", "given inf, expected an integer"),
    "long hexadecimal": ("train: {batch_size: 0x" + "f" * 3000 + "}", "given inf, expected an integer"),
    "beyond 64 bits": ("train: {epochs: 100000000000000000000}", "given 1e+20, expected an integer"),
    "large exponent": ("optimizer: {learning_rate: 1e999999999}", "given inf, expected a number"),
    "a million ranks": ("cluster: {nproc_per_node: 1000000}", "expected an integer > 0 and <= 1024"),
    "a million loaders": ("data: {workers: 1000000}", "expected an integer >= 0 and <= 1024"),
    "images of a million pixels a side": ("data: {image_size: 1000000}", "expected an integer > 0 and <= 16384"),
    "long file": ("a: " + "x" * 3_000_000, "more than 1000000 bytes"),
    "control characters": ("a: \0b", "special characters are not allowed"),
}


@pytest.fixture
def spec_file(tmp_path):
    def write(text: str) -> str:
        path = tmp_path / "spec.yml"
        path.write_text(text, encoding="utf-8")
        return str(path)

    return write


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_is_refused_in_one_short_line(spec_file, name):
    text, message = BOMBS[name]
    with pytest.raises(SpecError, match=message.replace("+", r"\+").replace("(", r"\(")) as caught:
        config.load(spec_file(text), environ={})
    line = next(problem for problem in caught.value.problems if message in problem)
    assert "\n" not in line
    assert len(line) < 400


def test_thousands_of_mistakes_are_not_all_explained(spec_file):
    text = "train: {" + ",".join(f"k{i}: 1" for i in range(3000)) + "}"
    with pytest.raises(SpecError) as caught:
        config.load(spec_file(text), environ={})
    assert len(caught.value.problems) == 100
    assert any("and 2900 mistakes more" in problem for problem in caught.value.problems)


@pytest.mark.parametrize(
    "value", [["train.epochs=" + "9" * 500_000], ["x" * 500_000], ["model.options.x=" + "[1," * 3000]]
)
def test_a_long_override_is_not_repeated_whole(value):
    with pytest.raises(SpecError) as caught:
        config.load("digits", overrides=value, environ={})
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    "text", ["!!python/object/apply:os.system [touch owned]", "!!python/name:os.system", "!exec x", "!!binary aGk="]
)
def test_tags_build_nothing(spec_file, tmp_path, monkeypatch, text):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SpecError, match=r"tag .* is not allowed"):
        config.load(spec_file(f"train: {text}"), environ={})
    assert not (tmp_path / "owned").exists()


@pytest.mark.parametrize("kind", ["pipe", "folder", "device"])
def test_what_is_no_file_is_refused_and_not_waited_for(tmp_path, kind):
    path = tmp_path / "spec.yml"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to("/dev/zero")
    with pytest.raises(SpecError, match=r"no such file|is a folder"):
        config.load(str(path), environ={})
    with pytest.raises(PluginError, match="is no file"):
        plugins.read_policy(path)


def test_a_policy_that_is_a_bomb_is_refused(tmp_path):
    file = tmp_path / "plugins.toml"
    file.write_text("a = " + "[" * 100_000)
    with pytest.raises(PluginError, match="nested too deeply") as caught:
        plugins.read_policy(file)
    assert len(str(caught.value)) < 300
    file.write_text("#" * 2_000_000)
    with pytest.raises(PluginError, match="more than 1000000 bytes"):
        plugins.read_policy(file)


@pytest.mark.parametrize("host", ["-oProxyCommand=id", "a b", "$(id)", "a;id", "a\n", ""])
@pytest.mark.parametrize("key", ["ips", "master_addr"])
def test_a_host_that_is_none_is_refused_with_the_spec(host, key):
    value = [host] if key == "ips" else host
    with pytest.raises(SpecError, match=rf"cluster\.{key}.* expected a name of ASCII letters"):
        config.load("digits", flags={f"cluster.{key}": value}, environ={})


# ------------------------------------------------------------------------------------------------------ plugins' policy
@pytest.fixture
def stranger(tmp_path, monkeypatch):
    """A distribution that is installed and offers a model, and leaves a trace when it is imported."""
    site = tmp_path / "site"
    (site / "stranger-1.0.dist-info").mkdir(parents=True)
    (site / "stranger-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: stranger\nVersion: 1.0\n")
    points = "[mtrain.models]\nstrange = stranger:Strange\n"
    (site / "stranger-1.0.dist-info" / "entry_points.txt").write_text(points)
    lines = [f"open({str(tmp_path / 'owned')!r}, 'w').close()", "from pydantic import BaseModel"]
    lines += ["from mtrain.core.interfaces import Model", "class Strange(Model):", "    kind = 'detection'"]
    lines += ["    class Options(BaseModel): pass", ""]
    (site / "stranger.py").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.delitem(sys.modules, "stranger", raising=False)
    return tmp_path / "owned"


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ('[models]\nenabled = ["yolov5"]\n', "is disabled by"),
        ('[models]\ndisabled = ["strange"]\n', "is disabled by"),
        ('[models.strange]\ndistribution = "known"\n', "no model 'strange' from the distribution 'known'"),
    ],
)
def test_a_plugin_outside_the_policy_is_not_even_imported(stranger, tmp_path, policy, message):
    file = tmp_path / "plugins.toml"
    file.write_text(policy)
    with pytest.raises(PluginError, match=message):
        plugins.load("models", "strange", policy=plugins.read_policy(file))
    with pytest.raises(SpecError, match=message):
        config.load("digits", flags={"model.name": "strange", "plugins": str(file)}, environ={})
    assert not stranger.exists()


def test_a_plugin_that_no_policy_forbids_loads(stranger, tmp_path):
    assert plugins.load("models", "strange", policy=plugins.read_policy()).__name__ == "Strange"
    assert stranger.exists()


def test_listing_plugins_imports_none(stranger):
    assert "strange" in [entry.name for entry in plugins.names("models")]
    assert not stranger.exists()


# ---------------------------------------------------------------------------------------------------------- environment
def test_other_hosts_are_told_the_settings_of_libraries_and_what_was_asked_for():
    values = {"NCCL_DEBUG": "INFO", "LD_LIBRARY_PATH": "/cuda", "PYTHONPATH": "/src", "LC_ALL": "C", "FLAGS_cudnn": "1"}
    own = {
        "PATH": "/bin",
        "HOME": "/root",
        "USER": "me",
        "SSH_AUTH_SOCK": "/tmp/s",
        "HF_TOKEN": "t",
        "http_proxy": "http://p",
    }
    stale = {
        "RANK": "1",
        "MASTER_ADDR": "a",
        "PADDLE_PORT": "1",
        VARIABLE: "s",
        "MTRAIN_TRAIN__SEED": "1",
        "FLAGS_selected_gpus": "0",
    }
    environ = values | own | stale | {"DATA_ROOT": "/data", "TORCH_API_TOKEN": "t", "DATA_TOKEN": "t"}
    assert forward(environ) == values
    assert forward(environ, ["DATA_ROOT", "NOT_SET"]) == values | {"DATA_ROOT": "/data"}
    assert forward(environ, ["DATA_*"]) == values | {"DATA_ROOT": "/data"}, "a secret is told only by its full name"
    assert forward(environ, ["HF_TOKEN"]) == values | {"HF_TOKEN": "t"}


@pytest.mark.parametrize("name", ["", "*", "A B", "A=1", "A;id", "1A", "A**", "-A"])
def test_what_is_no_name_of_a_variable_is_not_forwarded(name):
    with pytest.raises(UsageError, match="is no name of an environment variable"):
        forward({}, [name])


@pytest.mark.parametrize("name", ["RANK", "MASTER_ADDR", "PADDLE_TRAINER_ID", "MTRAIN_JOB_SECRET"])
def test_what_only_the_plan_sets_is_not_forwarded(name):
    with pytest.raises(UsageError, match="only the plan sets it"):
        forward({}, [name])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("WANDB_API_KEY", "x"),
        ("DEPLOY_KEY", "x"),
        ("MYSQL_PWD", "x"),
        ("DB_PASS", "x"),
        ("SENTRY_DSN", "x"),
        ("GIT_ASKPASS_TOKEN", "x"),
        ("NOTE", "-----BEGIN OPENSSH PRIVATE KEY-----"),
        ("NOTE", "ghp_abcdefghijklmnopqrstuvwxyz0123456789"),
        ("NOTE", "AKIAABCDEFGHIJKLMNOP"),
        ("NOTE", "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.abc"),
        ("HEADERS", "Authorization: Bearer abcdefgh1234"),
        ("DB", "Server=x;User=me;Password=hunter2"),
    ],
)
def test_secrets_are_masked_whole(name, value):
    assert redact({name: value}) == {name: "***"}


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("postgres://me:p/w@x@host/db", "postgres://***@host/db"),
        ("http://host/path", "http://host/path"),
        ("/home/me", "/home/me"),
        ("a b c", "a b c"),
    ],
)
def test_passwords_in_addresses_are_masked(value, shown):
    assert redact({"CONDA_CHANNEL": value}) == {"CONDA_CHANNEL": shown}


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["-o", "plugin.api_key=hunter2"], ["-o", "plugin.api_key=***"]),
        (["--opt=a.note=hf_abcdefghijklmnopqr"], ["--opt=***"]),
        (["--token", "hunter2", "--name", "a"], ["--token", "***", "--name", "a"]),
        (["-o", "data.root=s3://me:hunter2@host/data"], ["-o", "data.root=s3://***@host/data"]),
        (["-c", "digits", "--seed", "7"], ["-c", "digits", "--seed", "7"]),
    ],
)
def test_secrets_are_masked_in_a_command(words, shown):
    assert redacted_words(words) == shown


def test_what_hosts_know_of_each_other_reaches_no_rank_and_no_other_host():
    assert clean({CLUSTER_VARIABLE: "x", "HOME": "/root"}) == {"HOME": "/root"}
    with pytest.raises(UsageError):
        forward({CLUSTER_VARIABLE: "x"}, [CLUSTER_VARIABLE])


def test_each_job_has_a_secret_of_its_own_that_no_other_job_inherits():
    assert draw_secret() != draw_secret()
    assert len(draw_secret()[VARIABLE]) == 64
    assert clean(draw_secret()) == {}


# ----------------------------------------------------------------------------------------------------------- run folder
@pytest.mark.job
def test_everything_that_a_run_writes_is_for_its_owner_alone(tmp_path):
    """TensorBoard's events, checkpoints, images and logs of a real job, started with a mask that lets everybody
    read."""
    words = ["-c", "digits", "--backend", "solo", "--devices", "cpu"]
    values = ["train.updates=2", "train.epochs=null", "train.batch_size=4", "data.image_size=64", "data.workers=0"]
    values += [
        "data.options.train=8",
        "data.options.val=4",
        f"data.root={tmp_path / 'digits'}",
        f"report.dir={tmp_path / 'runs'}",
    ]
    secret = {"MY_TOKEN": "open sesame"}
    process = subprocess.run(
        [sys.executable, "-m", "mtrain", *words, *(word for value in values for word in ("-o", value))],
        env={**os.environ, **secret}, capture_output=True, text=True, preexec_fn=lambda: os.umask(0),
    )  # fmt: skip
    assert process.returncode == 0, process.stderr
    run = tmp_path / "runs" / "digits"
    actual = [run, *run.rglob("*")]
    names = {path.name for path in actual}
    assert {
        "metrics.jsonl",
        "environment.json",
        "spec.yml",
        "weights.safetensors",
        "rank-0.log",
        "summary.json",
    } <= names
    wide = [path for path in actual if not path.is_symlink() and stat.S_IMODE(path.stat().st_mode) & 0o077]
    assert wide == []
    for path in actual:
        if path.is_file():
            content = path.read_bytes()
            assert b"open sesame" not in content, path
            assert VARIABLE.encode() not in content, path


def test_no_module_builds_a_command_for_a_shell_of_its_own():
    """``launchers/clusters/ssh.py`` alone makes text for a shell; no other module may ask for one."""
    for file in source_files(trace=True).values():
        text = file.read_text(encoding="utf-8")
        assert "shell=True" not in text, file
        assert "os.system(" not in text, file
        assert "os.popen(" not in text, file


def test_no_module_unpickles_or_reads_yaml_that_builds_objects():
    """``core/ranks/serialization.py`` reads pickles that hold data alone; ``weights/pickles.py`` interprets them itself."""
    forbidden = (
        "yaml.load(",
        "unsafe_load",
        "full_load",
        "UnsafeLoader",
        "FullLoader",
        "pickle.load",
        "allow_pickle=True",
    )
    for file in source_files(trace=True).values():
        text = file.read_text(encoding="utf-8")
        assert [word for word in (*forbidden, "gather_object(", "torch.load(", "paddle.load(") if word in text] == [], (
            file
        )
