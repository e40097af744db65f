"""`mtrain doctor` looks at this host and its libraries, and lets backends add up, through the launchers that training
uses."""

import json
import os
import socket
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from shlex import quote, split

import pytest

import mtrain
import mtrain_ui
from mtrain.commands import main
from mtrain.jobs.preflight.libraries import libraries, own_packages, this_host
from mtrain.spec import packages
from mtrain.spec.plugins import PluginEntry
from mtrain.system import placement

ROOT = Path(__file__).parents[2]
TRACE = quote(f"{ROOT}/packages/mtrain-trace")

HIDING = """
import sys
from importlib.machinery import PathFinder

class Hiding:
    @staticmethod
    def find_spec(name, path=None, target=None):
        hidden = name.partition(".")[0] in ("torch", "paddle", "horovod", "deepspeed")
        return None if hidden else PathFinder.find_spec(name, path, target)

    invalidate_caches = PathFinder.invalidate_caches
    find_distributions = PathFinder.find_distributions

sys.meta_path[sys.meta_path.index(PathFinder)] = Hiding
"""
"""As ``sitecustomize``: an environment in which no framework is installed."""


@pytest.fixture(autouse=True)
def _home(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


def doctor(capsys, *arguments):
    """Exit code, and findings by check."""
    code = main(["doctor", "--json", *arguments])
    answer = json.loads(capsys.readouterr().out)
    by_check = {}
    for finding in answer["findings"]:
        by_check.setdefault(finding["check"], []).append(finding)
    assert (answer["state"] == "bad") == (code == 1)
    return code, by_check


@pytest.mark.job
def test_the_host_and_the_library_of_a_backend_are_described(capsys):
    before = set(sys.modules)
    code, found = doctor(capsys, "--quick", "-b", "ddp")
    assert code == 0
    of_packages = ["mtrain-trace", *packages.PACKAGES]
    assert list(found) == ["machine", "cores", "shm", "torch", *of_packages]
    assert {found[name][0]["text"] for name in of_packages} == {f"version {mtrain.__version__}"}
    assert sys.executable in found["machine"][0]["text"]
    assert found["torch"][0]["text"].startswith("torch 2.")
    assert "torch" not in set(sys.modules) - before, "frameworks are imported in processes of their own"


@pytest.mark.job
def test_a_package_of_another_version_is_in_the_way(capsys, monkeypatch):
    monkeypatch.setattr(mtrain_ui, "__version__", "0.0.9")
    code, found = doctor(capsys, "--quick", "-b", "ddp")
    assert code == 1
    assert [name for name, rows in found.items() if rows[0]["state"] == "bad"] == ["mtrain-ui"]


def test_each_package_is_installed_absent_of_another_version_or_broken(monkeypatch):
    installed = metadata.distribution

    def distribution(name):
        if name in ("mtrain-clusters", "mtrain-deploy"):
            raise metadata.PackageNotFoundError(name)
        return installed(name)

    monkeypatch.setattr(metadata, "distribution", distribution)
    monkeypatch.setattr(mtrain_ui, "__version__", "0.0.9")
    monkeypatch.setitem(sys.modules, "mtrain_sweep", None)
    found = {finding.check: finding for finding in own_packages()}
    assert list(found) == ["mtrain-trace", *packages.PACKAGES]
    deploy, ui, sweep = found.pop("mtrain-deploy"), found.pop("mtrain-ui"), found.pop("mtrain-sweep")
    clusters = found.pop("mtrain-clusters")
    assert {finding.state for finding in found.values()} == {"ok"}
    assert deploy.state == "absent"
    assert deploy.text.startswith("not installed; it brings export, quantise, prune, serve")
    names = clusters.text.partition("it brings ")[2].split(", ")
    assert names.count("slurm") == 1, "it is a cluster and an allocation"
    assert len(names) == len(set(names))
    assert deploy.remedy.endswith(f"-m pip install -e {quote(f'{ROOT}/packages/mtrain-deploy')}")
    assert (ui.state, ui.text) == ("bad", f"mtrain-ui has version 0.0.9, mtrain {mtrain.__version__}")
    assert split(ui.remedy)[-1].endswith("packages/mtrain-ui")
    assert (sweep.state, sweep.text.partition(":")[0]) == ("bad", "mtrain-sweep cannot be imported")


@pytest.mark.job
def test_a_spec_that_lies_here_and_was_not_given_is_told(capsys, tmp_path):
    assert "spec" not in doctor(capsys, "--quick", "-b", "ddp")[1]
    (tmp_path / "mtrain.yml").write_text("_BASE_: digits\n")
    code, found = doctor(capsys, "--quick", "-b", "ddp")
    assert code == 0
    assert found["spec"][0]["text"].startswith("mtrain.yml in the current folder says which hosts, ranks and backend")


@pytest.mark.job
@pytest.mark.parametrize(
    ("backend", "ranks"),
    [
        ("ddp", 2),
        pytest.param("solo", 1, marks=pytest.mark.slow),
        pytest.param("fleet", 2, marks=pytest.mark.slow),
        pytest.param("horovod", 2, marks=pytest.mark.slow),
        pytest.param("deepspeed", 2, marks=pytest.mark.slow),
    ],
)
def test_the_ranks_of_a_backend_add_up(capsys, tmp_path, backend, ranks):
    code, found = doctor(capsys, "-b", backend, "--devices", "cpu")
    assert code == 0
    (finding,) = found["all-reduce"]
    assert finding["text"].startswith(f"{backend}: {ranks} rank{'s' if ranks > 1 else ''} on this host, first sum ")
    assert list((tmp_path / "home/.cache/mtrain/doctor").glob("*/*")) == [], "nothing stays of one that went well"
    assert not (tmp_path / "runs").exists()


@pytest.mark.job
@pytest.mark.skipif(bool(list(Path("/dev").glob("nvidia[0-9]*"))), reason="this machine has a GPU")
def test_an_all_reduce_that_fails_is_told_with_its_error_and_its_logs_stay(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("mtrain.system.placement.count_devices", lambda environ: 1)  # or the plan would refuse CUDA
    code, found = doctor(capsys, "-b", "solo", "-o", "backend.options.device=cuda")
    assert code == 1
    (finding,) = found["all-reduce"]
    assert finding["state"] == "bad"
    assert "cuda" in finding["text"].lower()
    assert (tmp_path / "home/.cache/mtrain/doctor/solo/logs/rank-0.log").exists()


@pytest.mark.job
def test_a_spec_that_cannot_train_is_told_as_training_would(capsys, tmp_path):
    (tmp_path / "mine.yml").write_text("_BASE_: digits\ndata: {format: coco, root: nowhere}\n")
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        code, found = doctor(capsys, "--quick", "-b", "ddp", "-c", "mine.yml", "--master-port", str(port))
    assert code == 1
    assert f"cluster.master_port: {port} is in use" in found["spec"][0]["text"]
    code, found = doctor(capsys, "--quick", "-b", "ddp", "-c", "mine.yml")
    assert code == 1
    assert "nowhere" in found["spec"][0]["text"]


@pytest.mark.parametrize(
    "arguments",
    [("--ips", "a,b", "--hostfile", "x"), ("-c", "no-such-spec.yml"), ("-b", "no_such_backend"), ("--cluster", "ssh")],
)
def test_wrong_use_is_2(capsys, arguments):
    assert main(["doctor", "--quick", *arguments]) == 2
    assert capsys.readouterr().err


@pytest.mark.job
def test_where_nothing_is_installed_it_says_what_to_install(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(HIDING)
    environ = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-m", "mtrain", "doctor", "--json"], env=environ, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 1, done.stderr
    findings = {finding["check"]: finding for finding in json.loads(done.stdout)["findings"]}
    assert findings["torch"]["state"] == "absent"
    assert f"-m pip install -e {TRACE} -e '{ROOT}[ddp]'" in findings["torch"]["remedy"]
    assert f"-m pip install -e {TRACE} -e '{ROOT}[fleet-cpu]'" in findings["paddle"]["remedy"]
    assert f"{sys.executable} -m mtrain doctor --build-horovod" in findings["horovod"]["remedy"]
    assert findings["libraries"]["text"] == "no backend can train here: no framework is installed"
    assert "all-reduce" not in findings


def test_a_missing_requirement_of_the_requested_backend_is_bad():
    lacking = PluginEntry("backends", "mine", "x:Y", "mine", needs="a_module_that_nobody_has", extra="mine")
    first, *_ = libraries([lacking], chosen="mine", environ=os.environ)
    assert (first.state, first.check) == ("bad", "a_module_that_nobody_has")
    assert "mine cannot train without it" in first.text
    assert libraries([lacking], chosen=None, environ=os.environ)[0].state == "absent"


@pytest.mark.job
@pytest.mark.parametrize(
    ("body", "text"),
    [
        ("raise ImportError('libfoo.so.1: no such file')", "ImportError: libfoo.so.1: no such file"),
        ("import os; os.kill(os.getpid(), 11)", "its process was ended by signal 11"),
        ("print('hello')", None),
    ],
    ids=["raises", "crashes", "works"],
)
def test_a_library_of_a_strangers_backend_is_imported_in_a_process_of_its_own(tmp_path, monkeypatch, body, text):
    (tmp_path / "strange_library.py").write_text(body)
    monkeypatch.syspath_prepend(str(tmp_path))
    entry = PluginEntry("backends", "mine", "x:Y", "mine", needs="strange_library")
    found = libraries([entry], chosen=None, environ={**os.environ, "PYTHONPATH": str(tmp_path)})[0]
    expected = f"strange_library is installed and cannot be used: {text}" if text else "strange_library can be imported"
    assert (found.state, found.text) == ("bad" if text else "ok", expected)
    assert "strange_library" not in sys.modules


def test_limits_of_a_container_are_told(tmp_path):
    quota = tmp_path / "cpu.max"
    quota.write_text("10000 100000\n")
    cores = this_host({}, quota=quota)[1]
    assert (cores.check, cores.state) == ("cores", "warning")
    assert "of which this container may use 0.1" in cores.text
    quota.write_text("max 100000\n")
    assert this_host({}, quota=quota)[1].state == "ok"
    assert this_host({}, quota=tmp_path / "none")[1].state == "ok"
    assert this_host({}, quota=quota, shared=tmp_path / "none")[2].state == "warning"


@pytest.mark.parametrize(
    ("text", "cores"), [("150000 100000\n", 1), ("5000 100000\n", 1), ("max 100000\n", 0), ("nonsense", 0), ("1 0", 0)]
)
def test_ranks_take_their_threads_from_the_limit_of_a_container(tmp_path, text, cores):
    quota = tmp_path / "cpu.max"
    quota.write_text(text)
    assert placement.usable_cores(quota=quota) == (cores or placement.visible_cores())


def test_thread_settings_of_the_shell_are_told_to_count_for_nothing(tmp_path):
    text = this_host({"OMP_NUM_THREADS": "7"}, quota=tmp_path / "none")[1].text
    assert "OMP_NUM_THREADS=7 of this shell is not passed on" in text
