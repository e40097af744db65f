"""A remedy is a command that works: in a clone of the sources, and where mtrain was installed as a wheel."""

import re
import shlex
import subprocess
import sys
from importlib import metadata
from pathlib import Path, PurePath

import pytest

from mtrain.commands import main
from mtrain.spec import packages, remedies
from tests.sources import source_files

ROOT = Path(__file__).parents[2]


def test_in_a_clone_the_folder_is_installed(monkeypatch):
    both = f"-e {shlex.quote(f'{ROOT}/packages/mtrain-trace')} -e {shlex.quote(f'{ROOT}[ddp]')}"
    assert remedies.install("ddp", python="/opt/a b/python") == f"'/opt/a b/python' -m pip install {both}"
    monkeypatch.chdir(ROOT)
    assert remedies.install("fleet-cpu") == "pip install -e packages/mtrain-trace -e '.[fleet-cpu]'"
    assert remedies.install("") == "pip install -e packages/mtrain-trace -e ."


def test_the_clone_lies_in_a_folder_of_any_name(monkeypatch):
    monkeypatch.setattr(remedies, "checkout", lambda: Path("/opt/it's mine/mtrain"))
    words = shlex.split(remedies.install("ddp"))
    assert words[3::2] == ["/opt/it's mine/mtrain/packages/mtrain-trace", "/opt/it's mine/mtrain[ddp]"]


def test_a_clone_has_the_packages_that_mtrain_requires():
    required = [re.split("[ =]", line)[0] for line in metadata.requires("mtrain") or [] if line.startswith("mtrain-")]
    assert {PurePath(folder).name for folder in remedies.REQUIRED} == set(required) == {"mtrain-trace"}
    assert remedies.checkout() == ROOT


@pytest.mark.job
def test_without_mtrain_trace_one_error_names_the_command_that_installs_both(monkeypatch):
    """Whoever updates a clone, and not the installation from it, is in this state."""
    monkeypatch.chdir(ROOT)
    code = (
        "import sys; sys.modules['mtrain_trace'] = None; from mtrain.commands import main; sys.exit(main(sys.argv[1:]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "plan", "-c", "digits"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert (
        line == f"error: mtrain needs mtrain-trace, which is not installed; install both with: {remedies.install('')}"
    )


def test_where_there_is_no_clone_the_requirements_are_named(monkeypatch):
    monkeypatch.setattr(remedies, "checkout", lambda: None)
    extras = metadata.metadata("mtrain").get_all("Provides-Extra") or []
    known = {"ddp": ["torch"], "deepspeed": ["torch", "deepspeed"], "fleet-cpu": ["paddlepaddle"]}
    for extra in extras:
        words = shlex.split(remedies.install(extra))
        assert words[:2] == ["pip", "install"]
        names = [word.rstrip("<>=.,0123456789") for word in words[2:]]
        assert names == known.get(extra, names)
        assert not any("mtrain" in word for word in words), "no package index has mtrain under its name"


def test_an_extra_that_includes_others_names_their_requirements(monkeypatch):
    monkeypatch.setattr(remedies, "checkout", lambda: None)
    data, included = (set(shlex.split(remedies.install(extra))) for extra in ("data", "vision"))
    assert included < data
    assert any(word.startswith("datasets") for word in data)


def test_the_extra_fleet_brings_no_paddle_that_could_lie_over_another(monkeypatch):
    needs = [line for line in metadata.requires("mtrain") or [] if 'extra == "fleet"' in line.replace("'", '"')]
    assert needs == []
    assert {"fleet", "fleet-cpu", "fleet-gpu"} <= set(metadata.metadata("mtrain").get_all("Provides-Extra") or [])


def test_every_extra_that_a_remedy_names_exists():
    import tomllib

    files = source_files(endings=(".toml",)).values()
    described = [tomllib.loads(file.read_text(encoding="utf-8")) for file in files if file.name == "plugins.toml"]
    named = {
        entry["extra"] for kinds in described for kind in kinds.values() for entry in kind.values() if "extra" in entry
    }
    known = {
        extra if name == "mtrain" else f"{name}[{extra}]"
        for name in ("mtrain", *packages.PACKAGES)
        for extra in metadata.metadata(name).get_all("Provides-Extra") or []
    }
    assert named <= known | set(packages.PACKAGES)
    assert {"vision", "mtrain-language", "mtrain-ui[wandb]"} <= named


@pytest.mark.job
def test_horovod_is_built_by_a_script_of_the_package(monkeypatch, capfd):
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    assert main(["doctor", "--build-horovod"]) == 2
    assert "/nowhere/python: there is no such interpreter" in capfd.readouterr().err


README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("line", ["$ make demo", "$ make test"])
def test_the_readme_shows_what_a_newcomer_types(line):
    assert any(shown.startswith(line) for shown in README.splitlines())


def test_the_flags_of_fleetrun_for_gpus_of_several_hosts_are_planned_anywhere(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = "-c ppyoloe --backend fleet --ips 10.0.0.1,10.0.0.2 --selected_gpu 0,1"
    assert main(["plan", *words.split()]) == 0
    assert "GPU 0, 1 of each host" in capsys.readouterr().out
