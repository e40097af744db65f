"""Locks that killed builds of extensions have left are found before a script waits for them."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from mtrain.jobs.preflight import job_checks
from mtrain.jobs.preflight.libraries import this_host
from mtrain.system import build_locks

pytestmark = pytest.mark.smoke


def make_lock(root: Path, name: str) -> Path:
    path = root / name / "lock"
    path.parent.mkdir(parents=True)
    path.touch()
    return path


def test_a_lock_is_stale_once_no_process_has_it_open(tmp_path: Path) -> None:
    environ = {"TORCH_EXTENSIONS_DIR": str(tmp_path / "link")}
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    assert build_locks.find_stale(environ) == []
    held, stale = make_lock(tmp_path / "link", "cpu_adam"), make_lock(tmp_path / "link", "deepspeed_shm_comm")
    (tmp_path / "real/built").mkdir()
    with held.open():
        assert build_locks.find_locks(environ) == [held, stale]
        assert build_locks.find_stale(environ) == [stale]
    assert build_locks.find_stale(environ) == [held, stale]


def test_locks_lie_where_torch_puts_them(tmp_path: Path) -> None:
    in_home = make_lock(tmp_path, "home/.cache/torch_extensions/py311_cpu/cpu_adam")
    in_cache = make_lock(tmp_path, "cache/torch_extensions/py312_cu126/fused_adam")
    home = {"HOME": str(tmp_path / "home")}
    assert build_locks.find_locks(home) == [in_home]
    assert build_locks.find_locks({**home, "XDG_CACHE_HOME": str(tmp_path / "cache")}) == [in_cache]
    assert build_locks.find_locks({**home, "TORCH_EXTENSIONS_DIR": str(tmp_path / "none")}) == []


def test_no_more_locks_are_looked_at_than_a_few(tmp_path: Path) -> None:
    for number in range(12):
        make_lock(tmp_path, f"op{number}")
    assert len(build_locks.find_locks({"TORCH_EXTENSIONS_DIR": str(tmp_path)})) == build_locks.MOST_LOCKS


def test_doctor_says_it_and_how_to_remove_it(tmp_path: Path) -> None:
    environ = {"TORCH_EXTENSIONS_DIR": str(tmp_path)}
    assert "build lock" not in [finding.check for finding in this_host(environ)]
    lock = make_lock(tmp_path, "my op")
    (finding,) = [finding for finding in this_host(environ) if finding.check == "build lock"]
    assert finding.state == "warning"
    assert str(lock) in finding.text
    assert finding.remedy.endswith(f"rm '{lock}'")


@pytest.mark.parametrize(("framework", "count"), [("torch", 1), ("paddle", 0)])
def test_a_script_is_told_before_its_ranks_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, framework: str, count: int
) -> None:
    lock = make_lock(tmp_path, "cpu_adam")
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    for name in ("interpreter.check", "plugin_packages.check", "_check_port", "metrics.check", "_check_copies"):
        monkeypatch.setattr(f"{job_checks.__name__}.{name}", lambda *_, **__: None)
    monkeypatch.setattr(job_checks.plugin_packages, "left_out", lambda job: [])
    job = SimpleNamespace(backend=SimpleNamespace(framework=framework), spec=None)
    notes = job_checks.check_script(job)  # type: ignore[arg-type]
    assert len(notes) == count
    assert all(str(lock) in note and "rm " in note for note in notes)
