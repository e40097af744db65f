"""``mtrain plugins test``: what it says of good and of wrong backends, and how it ends."""

import json
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tests.testing.conftest import mtrain, wanted

from mtrain.commands import main
from mtrain_kit import kit, rank_records
from mtrain_kit.catalogue import CHECKS
from mtrain_kit.jobs import JobEnd

WRONG = Path(__file__).parent / "wrong"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["ddpp"], "no backend 'ddpp' (known: "),
        (["ddp", "--ranks", "5"], "--ranks 5: expected one of 1, 2, 3, 4, 6"),
        (["ddp", "--only", "learn.sgd"], "--only learn.sgd: no such check; did you mean 'learns.sgd'?"),
        (["ddp", "-o", "backend.options.bucket=1"], "backend.options.bucket=1: unknown key; did you mean"),
        (["solo", "--ranks", "2"], "this backend trains in one process"),
        (["no/such"], "no backend 'no/such'"),
        (["ddp", "--json", "no/such/folder.json"], "--json no/such/folder.json: cannot be written"),
        (["ddp", "--out", f"{__file__}/logs"], "cannot be made (Not a directory)"),
        (["broken", "-o", f"plugins={WRONG / 'plugins.toml'}"], "cannot be made from its options: ValueError: no use"),
        (["nameless", "-o", f"plugins={WRONG / 'plugins.toml'}"], "does not say its `rendezvous`: expected text"),
        (
            ["ddp", "-o", "backend.name=solo"],
            "-o backend.name=solo: cannot be given to the kit: name the backend after",
        ),
        (["ddp", "-o", "backend={name: solo}"], "holds backend.name, which cannot be given to the kit"),
        (["ddp", "-o", "cluster.nproc_per_node=3"], "cannot be given to the kit: use --ranks"),
    ],
)
def test_wrong_use_is_told_in_a_line(arguments: list[str], message: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["plugins", "test", *arguments]) == 2
    stderr = capfd.readouterr().err
    assert message in stderr
    assert "Traceback" not in stderr


def test_wrong_use_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert main(["plugins", "test", "ddp", "--ranks", "5"]) == 2
    assert list(tmp_path.iterdir()) == []


@pytest.mark.job
def test_a_backend_passes_and_says_so_for_people_and_for_programs(tmp_path: Path) -> None:
    process = mtrain(
        "plugins", "test", "solo", "--only", "collective", "--json", "found.json", "--out", "logs", cwd=tmp_path
    )
    assert process.returncode == 0, process.stdout + process.stderr
    assert "4 checks: 4 passed" in process.stdout
    actual = json.loads((tmp_path / "found.json").read_text())
    assert (actual["passed"], actual["backend"], actual["ranks"], actual["precision"]) == (True, "solo", 1, "fp64")
    place = actual["checks"][0]
    assert (place["id"], place["verdict"]) == ("collective.place", "passed")
    assert place["measures"][0] | {"rank": 0} == {
        "what": "wrong places",
        "value": 0.0,
        "bound": 0.0,
        "detail": "",
        "rank": 0,
        "ok": True,
    }


def report_on(name: str, folder: Path, *only: str, code: int = 1, **settings: Any) -> tuple[dict[str, Any], str]:
    """Checks by id, and the report, of a wrong backend."""
    chosen = [word for check in only for word in ("--only", check)]
    arguments = [word for key, value in settings.items() for word in (f"--{key}", str(value))]
    argv = ["plugins", "test", name, "-o", f"plugins={WRONG / 'plugins.toml'}", "--json", "found.json"]
    process = mtrain(*argv, *chosen, *arguments, "--out", "logs", cwd=folder)
    assert process.returncode == code, process.stdout + process.stderr
    actual = json.loads((folder / "found.json").read_text())
    return {check["id"]: check for check in actual["checks"]}, process.stdout


@pytest.mark.slow
class TestWrongBackends:
    def test_summed_gradients(self, tmp_path: Path) -> None:
        actual, message = report_on("summing", tmp_path, "learns.sgd", "clip", "job.trains", "start")
        assert {name: check["verdict"] for name, check in actual.items()} == {
            "start.equal": "passed",
            "learns.sgd": "failed",
            "clip.norm": "failed",
            "job.trains": "failed",
        }
        assert "the first is 2 times that of solo, which is the number of ranks: summed, not averaged" in message
        assert "look at   Optimizer.backward and step" in message

    def test_a_framework_on_top(self, tmp_path: Path) -> None:
        actual, _ = report_on("heavy", tmp_path, "plugin.light", "collective.place")
        assert actual["plugin.light"]["verdict"] == "failed"
        assert actual["plugin.light"]["measures"][0]["detail"] == "torch"
        assert actual["collective.place"]["verdict"] == "passed"

    def test_ranks_that_end_early_as_if_all_were_well(self, tmp_path: Path) -> None:
        actual, _ = report_on("quitting", tmp_path, "plugin.enters", "collective.place")
        assert actual["plugin.enters"]["error"] == "the ranks ended early, with exit code 0"
        assert actual["collective.place"]["verdict"] == "not run"

    def test_a_closed_door(self, tmp_path: Path) -> None:
        actual, message = report_on("closed", tmp_path, "plugin", "collective.place")
        assert "RuntimeError: the door is closed" in actual["plugin.enters"]["error"]
        assert actual["plugin.light"]["verdict"] == "passed"
        assert actual["collective.place"]["verdict"] == "not run"
        assert "plugin.enters failed" in message

    def test_missing_methods(self, tmp_path: Path) -> None:
        actual, _ = report_on("incomplete", tmp_path, "plugin.enters")
        error = actual["plugin.enters"]["error"]
        assert (
            "backend 'incomplete': `__enter__` returned a DdpEngine without infer, state; return the session" in error
        )

    def test_a_backend_of_the_former_seam(self, tmp_path: Path) -> None:
        actual, _ = report_on("former", tmp_path, "plugin.enters")
        error = actual["plugin.enters"]["error"]
        assert "backend 'former': `__enter__` returned a Former without collective, device, prepare, batches" in error
        assert "return the session, such as the engine that it makes, and not the backend; see RankSession" in error

    def test_no_rank_gets_in(self, tmp_path: Path) -> None:
        actual, _ = report_on("silent", tmp_path, "collective.place", limit=40)
        assert actual["plugin.enters"]["error"].startswith("not done in time: rank")
        assert actual["collective.place"]["reason"] == "plugin.enters failed"

    def test_no_rank_gets_out(self, tmp_path: Path) -> None:
        actual, _ = report_on("stuck", tmp_path, "collective.place", limit=40)
        assert actual["collective.place"]["verdict"] == "passed"
        assert actual["plugin.leaves"]["error"].startswith("not done in time: rank")

    def test_ranks_that_fail_after_the_last_check(self, tmp_path: Path) -> None:
        actual, _ = report_on("aborting", tmp_path, "collective.place")
        assert actual["collective.place"]["verdict"] == "passed"
        assert actual["plugin.leaves"]["verdict"] == "failed"

    def test_one_request_to_end_is_enough_while_ranks_hang(self, tmp_path: Path) -> None:
        argv = [sys.executable, "-m", "mtrain", "plugins", "test", "silent", "-o", f"plugins={WRONG / 'plugins.toml'}"]
        argv += ["--only", "plugin.enters", "--limit", "500", "--out", "logs"]
        kit_process = subprocess.Popen(argv, cwd=tmp_path, env=wanted("silent").environ, stderr=subprocess.DEVNULL)
        try:
            diaries = [tmp_path / "logs" / "checks-1" / "conformance" / f"rank-{rank}.jsonl" for rank in range(2)]
            deadline = time.monotonic() + 240
            while not all(file.is_file() and file.stat().st_size for file in diaries) and time.monotonic() < deadline:
                time.sleep(0.1)
            kit_process.send_signal(signal.SIGTERM)
            assert kit_process.wait(timeout=240) == 130
        finally:
            kit_process.kill()
            kit_process.wait()

    def test_no_job_of_one_rank(self, tmp_path: Path) -> None:
        actual, _ = report_on("alone", tmp_path, "size.one", "collective.place")
        assert actual["collective.place"]["verdict"] == "passed"
        assert "two ranks at least" in actual["size.one"]["error"]

    def test_a_check_that_hangs_fails_and_the_others_go_on(self, tmp_path: Path) -> None:
        actual, _ = report_on("hanging", tmp_path, "collective", limit=40)
        verdicts = {name.partition(".")[2]: check["verdict"] for name, check in actual.items()}
        assert verdicts == {"place": "passed", "reduces": "failed", "gathers": "passed", "agrees": "passed"}

    def test_a_rank_that_raises_fails_the_check_and_the_others_go_on(self, tmp_path: Path) -> None:
        actual, _ = report_on("raising", tmp_path, "collective")
        verdicts = {name.partition(".")[2]: check["verdict"] for name, check in actual.items()}
        assert verdicts == {"place": "passed", "reduces": "passed", "gathers": "failed", "agrees": "passed"}
        assert "KeyError" in actual["collective.gathers"]["error"]

    def test_a_thread_and_a_process_that_stay_are_reported(self, tmp_path: Path) -> None:
        actual, _ = report_on("staying", tmp_path, "plugin.leaves")
        values = {m["what"]: m["value"] for m in actual["plugin.leaves"]["measures"]}
        assert values["processes"] >= 1
        assert values["threads"] >= 1

    def test_a_job_that_does_not_end_in_time(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(kit, "END_S", 5.0)
        overrides = [f"plugins={WRONG / 'plugins.toml'}"]
        actual = kit.run(wanted("lingering", overrides=overrides, only=["job.ends"]), tmp_path)
        (finding,) = actual.findings
        assert finding.verdict == "failed"
        assert finding.measures[0].value > 5
        assert all(measure.ok for measure in finding.measures[1:])


def test_a_port_that_stays_in_use_after_a_job(tmp_path: Path) -> None:
    ended = JobEnd(code=0, text="", run_dir=tmp_path, job="", at=0.0)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        rank_records.write_facts(tmp_path, ports=[port])
        assert kit._ports_taken(ended).detail == str(port)
    assert kit._ports_taken(ended).ok


@pytest.mark.slow
def test_pytest_runs_the_kit_of_a_named_backend(tmp_path: Path) -> None:
    argv = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "mtrain_kit.options",
        "--pyargs",
        "mtrain_kit",
        "--backend",
        "solo",
    ]
    argv += ["-p", "no:cacheprovider", "--rootdir", str(tmp_path), "-q"]
    process = subprocess.run(
        argv, cwd=tmp_path, env=wanted("solo").environ, capture_output=True, text=True, timeout=540
    )
    assert process.returncode == 0, process.stdout + process.stderr
    assert f"{len(CHECKS)} passed" in process.stdout


@pytest.mark.job
def test_pytest_without_a_name_skips_and_says_how_to_give_one(tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "pytest", "-p", "mtrain_kit.options", "--pyargs", "mtrain_kit", "-rs", "-q"]
    argv += ["-p", "no:cacheprovider", "--rootdir", str(tmp_path)]
    process = subprocess.run(argv, cwd=tmp_path, env=wanted("solo").environ, capture_output=True, text=True, timeout=60)
    assert "name a backend: pytest --pyargs mtrain_kit --backend NAME" in process.stdout
