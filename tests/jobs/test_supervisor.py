"""The parts of launching that need no process: addresses, run folders, what is told of a failure."""

import json
import os
import shutil
import signal
import socket
import stat
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from mtrain.commands import main
from mtrain.errors import CheckpointError, DataError, Interrupted, UsageError
from mtrain.jobs.resume import find
from mtrain.jobs.run.outcome import Outcome
from mtrain.jobs.run.request_files import describe_environment
from mtrain.jobs.run.supervisor import explain
from mtrain.launchers.local import Local
from mtrain.launchers.torchrun import Torchrun
from mtrain.spec.model import CheckpointSpec
from mtrain.system import disk, placement, processes, runfolder
from mtrain.system.diagnosis import Verdict
from mtrain.system.environment import clean, redact
from mtrain.system.failures import read_failures, set_aside_failures, write_failure
from mtrain.system.processes import Requests
from mtrain.system.runfolder import RunFolder

MINE = [("lo", "127.0.0.1"), ("eth0", "10.0.0.2"), ("eth1", "fd00::2")]


def nothing_resolves(host: str) -> list[str]:
    return []


def test_a_host_finds_itself_by_address():
    assert placement.find_node_rank(["10.0.0.1", "10.0.0.2"], MINE, resolver=nothing_resolves) == 1
    assert placement.find_node_rank(["fd00::1", "fd00::2"], MINE, resolver=nothing_resolves) == 1


def test_a_host_finds_itself_by_name():
    names = {"a": ["10.0.0.1"], "b": ["10.0.0.2"]}
    assert placement.find_node_rank(["a", "b"], MINE, resolver=lambda host: names[host]) == 1


def test_a_machine_that_is_not_in_the_list_is_refused_with_its_addresses():
    with pytest.raises(UsageError, match=r"is not among them; its addresses are .*10\.0\.0\.2 \(eth0\)"):
        placement.find_node_rank(["10.0.0.8", "10.0.0.9"], MINE, resolver=nothing_resolves)


def test_a_machine_that_is_twice_in_the_list_is_refused():
    with pytest.raises(UsageError, match="is several of them"):
        placement.find_node_rank(["127.0.0.1", "10.0.0.2"], MINE, resolver=nothing_resolves)


def test_a_given_node_rank_is_taken_and_must_be_in_range():
    assert placement.find_node_rank(["x", "y"], MINE, node_rank=1) == 1
    with pytest.raises(UsageError, match="expected 0 to 1"):
        placement.find_node_rank(["x", "y"], MINE, node_rank=2)


@pytest.mark.parametrize(("visible", "expected"), [(None, 2), ("0", 1), ("", 0), ("-1", 0), ("0,1,2,3", 2)])
def test_devices_are_counted_without_a_framework(tmp_path, visible, expected):
    for name in ("nvidia0", "nvidia1", "nvidiactl", "null"):
        (tmp_path / name).touch()
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert placement.count_devices(environ, dev=tmp_path) == expected


def test_what_other_starters_leave_in_a_shell_is_removed_and_the_rest_kept():
    stale = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "GROUP_RANK", "PADDLE_PORT", "HOROVOD_SIZE", "OMPI_X"]
    stale += ["TORCHELASTIC_RUN_ID", "PET_NODE_RANK", "MTRAIN_TRAIN__BATCH_SIZE", "OMP_NUM_THREADS"]
    saved = {"PATH": "/bin", "LD_LIBRARY_PATH": "x", "RANKING": "1", "CUDA_VISIBLE_DEVICES": "0", "NCCL_DEBUG": "INFO"}
    assert clean(dict.fromkeys(stale, "1") | saved) == saved


STALE = [
    *("PADDLE_TRAINER_ID", "PADDLE_MASTER", "PET_NNODES", "PET_RDZV_ENDPOINT", "HOROVOD_RANK"),
    *("HOROVOD_GLOO_IFACE", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "TORCHELASTIC_USE_AGENT_STORE"),
    *("DEEPSPEED_TIMEOUT", "DS_ACCELERATOR", "FLAGS_selected_gpus", "FLAGS_selected_xpus", "GROUP_RANK"),
    *("GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT"),
    *("GLOO_SOCKET_IFNAME", "MTRAIN_TRAIN__SEED", "RANK", "LOCAL_RANK", "WORLD_SIZE"),
    *("LOCAL_WORLD_SIZE", "NODE_RANK", "CROSS_RANK", "CROSS_SIZE", "TRAINER_ENDPOINTS"),
    *("DISTRIBUTED_TRAINER_ENDPOINTS", "POD_IP", "POD_NAME", "PORT_RANGE", "COLLECTIVE_MASTER_IP"),
    *("FLAGS_START_PORT", "FLAGS_FIXED_PORT", "FLAGS_stop_check_timeout", "MTRAIN_JOB_SECRET", "MTRAIN_CLUSTER_SECRET"),
    "MTRAIN_JOB_ATTEMPT",
    *("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "OMP_WAIT_POLICY"),
]
"""Of each rule at least one."""


@pytest.mark.parametrize("name", STALE)
def test_no_rank_inherits_what_only_the_plan_may_say(name):
    assert clean({name: "1", "HOME": "/root"}) == {"HOME": "/root"}
    assert clean({f"MY_{name}": "1"}) == {f"MY_{name}": "1"}


def test_secrets_are_masked():
    shown = redact(
        {"HF_TOKEN": "abc", "AWS_SECRET_ACCESS_KEY": "x", "CONDA_CHANNEL": "http://me:pw@host", "HOME": "/root"}
    )
    assert shown == {
        "AWS_SECRET_ACCESS_KEY": "***",
        "CONDA_CHANNEL": "http://***@host",
        "HF_TOKEN": "***",
        "HOME": "/root",
    }


# --------------------------------------------------------------------------------------------------------- run folders
def test_run_folders_are_numbered_private_and_the_newest_is_linked(tmp_path):
    made = [runfolder.create(tmp_path, "digits") for _ in range(3)]
    assert [path.name for path in made] == ["digits", "digits-2", "digits-3"]
    assert (tmp_path / "latest").resolve() == made[-1]
    assert stat.S_IMODE(made[0].stat().st_mode) == 0o700
    assert runfolder.next_name(tmp_path, "digits").name == "digits-4"


def test_a_run_folder_that_cannot_be_made_is_a_clear_error(tmp_path):
    (tmp_path / "runs").write_text("a file")
    with pytest.raises(UsageError, match=r"report\.dir: no run folder could be made"):
        runfolder.create(tmp_path / "runs", "digits")


def save(folder, update: int) -> None:
    from mtrain.core.checkpoint.store import Checkpoints
    from mtrain.core.interfaces import Progress, State

    store = Checkpoints(folder / "checkpoints", keep_last=9, keep_best=0, asynchronous=False)
    store.save(State(), Progress(update=update), score=None, spec={}, extra={})


def test_resume_takes_a_checkpoint_a_run_folder_or_the_newest_run_of_the_name(tmp_path):
    first, second = runfolder.create(tmp_path, "a"), runfolder.create(tmp_path, "a")
    runfolder.create(tmp_path, "a")
    runfolder.create(tmp_path, "a-b")
    save(first, 1)
    save(second, 2)
    save(second, 3)
    newest = second / "checkpoints" / "step-00000003"
    older = second / "checkpoints" / "step-00000002"
    assert find.find_resume(None, base=tmp_path, name="a") == find.Where(second, newest)
    assert find.find_resume(str(second), base=tmp_path, name="x") == find.Where(second, newest)
    assert find.find_resume(str(older), base=tmp_path, name="x") == find.Where(second, older)


def test_resume_from_a_damaged_checkpoint_is_refused_and_from_its_run_takes_the_one_before(tmp_path):
    run = runfolder.create(tmp_path, "a")
    save(run, 1)
    save(run, 2)
    damaged = run / "checkpoints" / "step-00000002"
    (damaged / "MANIFEST.json").unlink()
    with pytest.raises(CheckpointError, match=r"half-written.*give the run folder"):
        find.find_resume(str(damaged), base=tmp_path, name="a")
    assert find.find_resume(str(run), base=tmp_path, name="a").checkpoint.name == "step-00000001"


# ------------------------------------------------------------------------------------------------------------ verdicts
def fail(run: RunFolder, rank: int, error: BaseException, *, now: float) -> None:
    try:
        raise error
    except BaseException as raised:
        write_failure(run, rank, raised, now=now)


class OneHost:
    """A launcher, and the only host of a job, that report what a test has planned."""

    agent, size, node, label = True, 2, None, ""
    knows_mtrain, saves = True, True
    hosts = (SimpleNamespace(slots=2),)

    def __init__(self, run: RunFolder, deaths: list[tuple[int, int]]) -> None:
        self.run_dir, self.log_dir = run.path, run.log_dir
        self.launcher = self
        self.deaths = lambda log, status: deaths

    def first_rank(self, node: int) -> int:
        return 0


def outcome_of(run: RunFolder, deaths=(), *, failures=(), log: str = "", status: int = 1, last=None) -> Outcome:
    """Return the outcome of an attempt on one host."""
    job = OneHost(run, list(deaths))
    ended = {"status": status, "log": log, "when": 0.0, "told": False, "full": disk.is_full(run.path)}
    ago = time.monotonic() - time.time()
    timed = [{**failure, "when": failure["time"] + ago} for failure in failures]
    return Outcome(plan=job, members={0: job}, failures=timed, ended={0: ended}, last=last or {})


def judge(run: RunFolder, deaths: list[tuple[int, int]], *, log: str = "") -> Verdict:
    """Return the verdict on an attempt on one host, whose command ended with 1."""
    return outcome_of(run, deaths, failures=read_failures(run), log=log).judge()


def test_of_a_ranks_failures_in_earlier_attempts_the_newest_are_kept(tmp_path):
    run = RunFolder(tmp_path)
    for attempt in range(30):
        fail(run, 0, ValueError(f"of attempt {attempt}"), now=float(attempt))
        set_aside_failures(run)
    fail(run, 3, ValueError("of another rank"), now=0.0)
    set_aside_failures(run, ranks=range(2))
    kept = {path.name: json.loads(path.read_text())["message"] for path in run.failures.iterdir()}
    earlier = {f"earlier-{number}-rank-0.json": f"of attempt {30 - number}" for number in range(1, 11)}
    assert kept == {**earlier, "rank-3.json": "of another rank"}


def test_of_two_failures_the_earlier_is_the_cause(tmp_path):
    run = RunFolder(tmp_path)
    fail(run, 0, ConnectionError("peer is gone"), now=20.0)
    fail(run, 1, ZeroDivisionError("one over nothing"), now=10.0)
    message = judge(run, [(0, 1), (1, 1)])
    assert message.text.endswith("ZeroDivisionError: one over nothing")
    assert message.code == 1


def test_a_run_folder_takes_one_starter_at_a_time(tmp_path):
    run = RunFolder(tmp_path)
    refused = pytest.raises(UsageError, match=rf"process {os.getpid()} is running")
    with runfolder.take_folder(run), runfolder.take_folder(run, node=1), refused, runfolder.take_folder(run):
        pytest.fail("it was taken twice")
    with runfolder.take_folder(run):
        pass


@pytest.mark.parametrize("node", [0, 3])
def test_a_second_start_in_a_run_folder_is_refused_before_a_checkpoint_is_chosen(tmp_path, monkeypatch, capsys, node):
    monkeypatch.chdir(tmp_path)
    run = RunFolder(tmp_path / "runs" / "one")
    (run.path / "checkpoints" / "step-00000004").mkdir(parents=True)  # the living job is writing it
    os.mkfifo(run.path / ".lock-9")
    before = sorted(run.path.rglob("*"))
    with runfolder.take_folder(run, node=node):
        words = ["-b", "solo", "--name", "one", "--resume", "if-any", "-o", "train.updates=1", "evaluate.at_end=false"]
        assert main(["train", "-c", "digits", *words]) == 2
    message = capsys.readouterr().err
    assert f"process {os.getpid()} is running a job in this folder" in message
    assert sorted(run.path.rglob("*")) == sorted([*before, run.path / f".lock-{node}"])
    runfolder.refuse_running(run.path)


def test_a_port_that_something_listens_on_is_refused_and_one_of_another_machine_is_not_looked_at():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        with pytest.raises(UsageError, match=f"cluster.master_port: {port} is in use"):
            placement.check_port("127.0.0.1", port)
        placement.check_port("192.0.2.1", port)
    placement.check_port("127.0.0.1", port)


def test_versions_of_what_the_distribution_requires_are_recorded():
    environment = describe_environment({})
    assert {"mtrain", "numpy", "pydantic"} <= set(environment["versions"])


def test_a_rank_that_was_asked_to_end_is_no_cause(tmp_path):
    run = RunFolder(tmp_path)
    fail(run, 0, Interrupted("asked"), now=1.0)
    fail(run, 1, DataError("image a.jpg is missing"), now=2.0)
    message = judge(run, [])
    assert (message.code, message.text.splitlines()[-1]) == (2, "error: image a.jpg is missing")


def test_an_abort_after_another_failure_is_its_consequence(tmp_path):
    run = RunFolder(tmp_path)
    fail(run, 0, ValueError("cause"), now=1.0)
    assert "ValueError: cause" in judge(run, [(1, -signal.SIGABRT)]).text
    assert "signal 6" in judge(RunFolder(tmp_path / "empty"), [(1, -signal.SIGABRT)]).text


def test_a_rank_that_ends_without_a_word_is_the_cause_and_not_the_one_whose_connection_it_has_torn(tmp_path):
    run = RunFolder(tmp_path)
    fail(run, 0, RuntimeError("connection closed by peer"), now=1.0)
    assert judge(run, [(1, 3), (0, 1)]).reason == "rank 1 ended with exit code 3"
    assert "closed by peer" in judge(run, [(0, 1)]).headline, "the rank that wrote is no rank without a word"
    # A rank that has saved because it was asked to end is no cause either.
    assert "closed by peer" in judge(run, [(1, Interrupted.exit_code), (0, 1)]).headline


def test_a_rank_that_left_nothing_is_explained_by_its_log(tmp_path):
    run = RunFolder(tmp_path)
    assert "No module named mtrain.rank.worker" in judge(run, [(0, 1)], log="No module named mtrain.rank.worker\n").text


def test_failure_files_are_json_and_a_broken_one_is_passed_over(tmp_path):
    run = RunFolder(tmp_path)
    fail(run, 3, ValueError("x"), now=1.0)
    assert json.loads((run.failures / "rank-3.json").read_text())["error"] == "ValueError: x"
    (run.failures / "rank-4.json").write_text("{")
    assert [failure["rank"] for failure in read_failures(run)] == [3]


REPORT = """
/x.py FAILED
------------------------------------------------------------
Failures:
[1]:
  time      : 2026-01-01_00:00:00
  host      : h
  rank      : 3 (local_rank: 1)
  exitcode  : -9 (pid: 71)
  error_file: <N/A>
  traceback : Signal 9 (SIGKILL) received by PID 71
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-01-01_00:00:00
  host      : h
  rank      : 2 (local_rank: 0)
  exitcode  : 1 (pid: 70)
  error_file: <N/A>
  traceback : To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html
============================================================
"""


def test_deaths_are_read_from_torchruns_report():
    options = Torchrun.Options(python="python")
    assert list(Torchrun(options).deaths(REPORT, 1)) == [(2, 1), (3, -9)]
    assert list(Torchrun(options).deaths("nothing", 1)) == []


def test_what_a_rank_could_not_import_is_told_once_and_not_what_its_starter_says_of_it(tmp_path):
    run = RunFolder(tmp_path)
    trace = ["Traceback (most recent call last):", '  File "worker.py", line 1, in <module>', "    import absent"]
    trace += ["ModuleNotFoundError: No module named 'absent'"]
    noise = [f"E0000 line {i} of the starter" for i in range(40)]
    lines = [*(f"[rank1]: {line}" for line in trace), *(f"[rank0]: {line}" for line in trace), *noise]
    message = judge(run, [(0, -signal.SIGTERM), (1, 1)], log="\n".join(lines))
    assert message.headline == "rank 1 ended with exit code 1", "not the one that was ended for it"
    assert message.text.splitlines()[1:-1] == [f"  {line}" for line in trace]


def test_a_directly_started_rank_dies_with_the_status_of_its_command():
    local = Local(Local.Options(python="python"))
    assert list(local.deaths("", -9)) == [(0, -9)]
    assert list(local.deaths("", 0)) == []


# ------------------------------------------------------------------------------- requests to end, failures, and both
class Asked:
    def __init__(self, count: int = 0, *, at: float = 100.0):
        self.count, self.first = count, signal.SIGINT if count else None
        self.first_at = at if count else None


def failure(*, at: float, expected: bool = False) -> dict:
    words = {"error": "why", "message": "why", "traceback": "why", "exit_code": 2 if expected else 1}
    return {"rank": 0, "time": at, "expected": expected, **words}


def explained(
    request: Asked, *failures: dict, saved: bool = False, status: int = 1, end: dict | None = None
) -> Verdict:
    last = {"kind": "end", "reason": "interrupted"} if saved else end
    outcome = outcome_of(RunFolder(Path("runs/x")), failures=failures, status=status, last=last)
    return explain(outcome, request, newest=lambda: None)


def test_a_refusal_is_told_though_somebody_has_pressed_ctrl_c_meanwhile():
    refused = failure(at=101.0, expected=True)
    assert explained(Asked(1), refused).text.endswith("error: why")
    assert explained(Asked(1), refused).code == 2
    assert explained(Asked(2), refused).code == 130, "who insists wants the end"


@pytest.mark.parametrize("count", [1, 2])
def test_a_failure_is_told_whatever_was_asked_after_it(count):
    assert explained(Asked(count), failure(at=99.0)).text.endswith("why")
    assert explained(Asked(count), failure(at=101.0)).code == 130


def test_a_rank_that_failed_is_told_though_the_others_have_saved_and_ended():
    message = explained(Asked(), failure(at=99.0), saved=True)
    assert (message.code, message.headline) == (1, "rank 0 on ? failed first: why")


def test_a_killed_starter_is_a_failure_though_the_ranks_have_saved_unless_somebody_had_asked_for_the_end():
    killed = explained(Asked(), saved=True, status=-signal.SIGKILL)
    assert killed.code == 1
    assert killed.text.startswith("the ranks have saved their state; go on with --resume runs/x\n")
    assert "error: the starter of the ranks was ended by signal 9 (SIGKILL)" in killed.text
    assert explained(Asked(1), saved=True, status=-signal.SIGKILL).code == 130
    assert explained(Asked(), saved=True).code == 143, "ranks that were signalled themselves"


def test_a_request_after_the_last_update_is_told_that_all_is_saved():
    record = {"kind": "end", "updates": 40, "total_updates": 40}
    interrupted = explained(Asked(1), end={**record, "reason": "interrupted", "left_out": ["evaluation"]})
    assert interrupted.code == 130
    for words in ("after the last update", "all 40 updates", "saved", "--resume runs/x makes", "evaluation"):
        assert words in interrupted.text, interrupted.text
    complete = explained(Asked(1), end={**record, "reason": "interrupted", "left_out": []})
    assert "nothing is left to do" in complete.text
    # The ranks were done and their launcher was ended by the signal: nothing was lost.
    done = explained(Asked(1), end={**record, "reason": "done"}, status=-signal.SIGTERM)
    assert (done.code, "all is saved" in done.text, "before the state" in done.text) == (130, True, False)
    before = explained(Asked(1), end={**record, "updates": 39, "reason": "interrupted"})
    assert "go on with --resume runs/x" in before.text


def test_an_expected_error_ends_a_job_with_its_own_exit_code():
    assert explained(Asked(), failure(at=1.0, expected=True)).code == 2
    assert explained(Asked(), failure(at=1.0)).code == 1


def test_only_a_job_that_saves_is_told_that_nothing_is_saved(monkeypatch):
    assert explained(Asked(1), failure(at=101.0)).text == "ended before the state was saved; there is no checkpoint"
    monkeypatch.setattr(OneHost, "saves", False)
    ended = "ended by SIGINT; there is no result: start it again"
    assert explained(Asked(1), failure(at=101.0)).text == ended
    monkeypatch.setattr(OneHost, "knows_mtrain", False)
    assert explained(Asked(1), failure(at=101.0)).text == "ended by SIGINT"
    assert explained(Asked(1), status=0).code == 130, "a script that has heard Ctrl-C and ends with 0"
    assert explained(Asked(), status=0).code == 0
    assert explained(Asked(1), failure(at=99.0)).text.endswith("why"), "what had failed before"


def test_requests_count_by_place():
    requests = Requests()
    for place in ("here", "host 1", "host 2"):
        requests.take(signal.SIGTERM, place=place)
    assert (requests.count, requests.first) == (1, signal.SIGTERM)
    requests.take(signal.SIGINT, place="host 1", times=1)
    assert requests.count == 1, "the same request, told again"
    requests.take(signal.SIGINT, place="host 1", times=2)
    assert (requests.count, requests.first) == (2, signal.SIGTERM)


def test_two_sigterms_within_a_moment_are_one_request_and_two_ctrl_c_are_two():
    """A scheduler's SIGTERM may reach a process twice: sent to it, and passed on by the process that started it."""
    with Requests() as requests:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGTERM)
        assert (requests.count, requests.first) == (1, signal.SIGTERM)
        requests._terminated_at -= processes.SAME_REQUEST_S
        os.kill(os.getpid(), signal.SIGTERM)
        assert requests.count == 2
    with Requests() as requests:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
        assert requests.count == 2


def test_a_request_to_save_is_no_request_to_end_and_is_heard_where_it_was_blocked():
    former = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    try:
        signal.raise_signal(signal.SIGUSR1)  # to this thread, the only one that blocks it
        with Requests() as requests:
            assert (requests.saves, requests.any(), requests.count) == (1, False, 0)
        assert signal.SIGUSR1 in signal.pthread_sigmask(signal.SIG_BLOCK, ())
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, former)


def test_a_disk_that_is_full_is_named_where_a_rank_could_leave_no_reason(tmp_path, monkeypatch):
    assert "is full" not in judge(RunFolder(tmp_path), [(0, 1)]).text
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(100, 100, 0))
    message = judge(RunFolder(tmp_path), [(0, 1)]).text
    assert message.endswith(
        f"rank 0 ended with exit code 1; the disk of {tmp_path} is full: make room, then go on with --resume"
    )


def test_a_full_disk_comes_before_what_follows_from_it_on_other_hosts(tmp_path, monkeypatch):
    run = RunFolder(tmp_path)
    fail(run, 1, RuntimeError("Connection closed by peer"), now=1.0)
    assert "is full" not in judge(run, [(1, 1)]).headline
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(100, 100, 0))
    verdict = judge(run, [(1, 1)])
    assert verdict.headline.startswith(
        f"the disk of {tmp_path} is full: make room, then go on with --resume; rank 1 on"
    )
    assert "Connection closed by peer" in verdict.text


def test_checkpoints_that_do_not_fit_on_the_disk_are_refused_with_what_would(tmp_path, monkeypatch):
    rule = CheckpointSpec(keep_last=2, keep_best=1)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1 << 30, 0, 100 << 20))
    disk.check_room(tmp_path / "not" / "there", rule, each_bytes=21 << 20, existing_bytes=0)
    disk.check_room(tmp_path, rule, each_bytes=30 << 20, existing_bytes=60 << 20)
    with pytest.raises(
        UsageError, match=r"100\.0 MiB free .* need 104\.0 MiB: 4 of 22\.0 MiB \(checkpoint.keep_last 2"
    ):
        disk.check_room(tmp_path, rule, each_bytes=22 << 20, existing_bytes=0)
