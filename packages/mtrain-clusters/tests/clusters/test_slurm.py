"""The batch script for Slurm, its options, and what Slurm's commands print. Needs no Slurm."""

import os
import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from pydantic import ValidationError

from mtrain.core.interfaces import HostedJob
from mtrain.core.interfaces.queue import QueuedJob, Submission
from mtrain.errors import UsageError
from mtrain_clusters._slurm import batch, commands
from mtrain_clusters._slurm.queue import SlurmQueue
from mtrain_clusters.slurm import Slurm

pytestmark = pytest.mark.smoke

SUBMISSION = Submission(
    name="digits",
    spec="",
    spec_path=Path("/shared/runs/.submitted/digits/spec.yml"),
    hosts=3,
    ranks_per_host=2,
    backend="ddp",
    python="/opt/mtrain/bin/python",
    folder=Path("/shared"),
)
GOLDEN = """\
#!/bin/bash
#SBATCH --job-name=digits
#SBATCH --nodes=3
#SBATCH --ntasks-per-node=2
#SBATCH --cpus-per-task=8
#SBATCH --gres=gpu:2
#SBATCH --time=1:30:00
#SBATCH --partition=low
#SBATCH --signal=B:USR1@60
#SBATCH --chdir=/shared
#SBATCH --output=/shared/runs/.submitted/digits/slurm-%j.out
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --mail-type=END

trap : USR1
module load cuda

hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | paste -sd,)

# The end of this shell would end the job, so it must wait for mtrain. Slurm sends SIGTERM to mtrain as well.
trap : TERM
trap 'scontrol requeue "$SLURM_JOB_ID"' USR1
# Until mtrain takes SIGUSR1, as a request to save, that signal must not end it.
(trap '' USR1; exec /opt/mtrain/bin/python -m mtrain train -c /shared/runs/.submitted/digits/spec.yml --resume if-any \
--name digits --cluster slurm --ips "$hosts") &
mtrain=$!
while :; do
  wait "$mtrain"
  code=$?
  kill -0 "$mtrain" 2>/dev/null || break
done
wait "$mtrain"
last=$?
[ "$last" = 127 ] || code=$last
echo "mtrain ended with exit code $code"
# At the beginning of a preemption's grace time Slurm sends SIGTERM to steps alone. It would take the end of this shell
# for the end of the job, and not start it again.
if [ "$code" = 143 ]; then
  case $(scontrol --oneliner show job "$SLURM_JOB_ID") in
    *JobState=RUNNING*PreemptTime=[0-9]*) scontrol requeue "$SLURM_JOB_ID" ;;
  esac
fi
# mtrain mostly knows before Slurm that a host is lost. Slurm would put the job back into its queue for that. A host that was
# off and is back again answers, but its slurmd was started after this job.
if [ "$code" = 1 ]; then
  lost=
  timeout -k 5 20 srun --overlap --quiet --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 true || lost="does not answer"
  began=$(scontrol --oneliner show job "$SLURM_JOB_ID" | sed -n 's/.* StartTime=\\([0-9][^ ]*\\).*/\\1/p')
  for started in $(scontrol --oneliner show node "$SLURM_JOB_NODELIST" | sed -n 's/.* SlurmdStartTime=\\([0-9][^ ]*\\).*/\\1/p')
  do
    [[ -n $began && $started > $began ]] && lost="was off for a while"
  done
  if [ -n "$lost" ]; then
    echo "a host of this job $lost: the job goes back into the queue"
    scontrol requeue "$SLURM_JOB_ID"
  fi
fi
exit "$code"
"""


def options(**values: object) -> Slurm.Options:
    return Slurm.Options.model_validate(values)


def test_slurm_does_not_end_an_elastic_job_for_a_lost_host():
    options = Slurm.Options()
    assert "--no-kill" in batch.directives(replace(SUBMISSION, elastic=True), options, Path("/shared"))
    assert "--no-kill" not in batch.directives(SUBMISSION, options, Path("/shared"))


def test_a_batch_script_asks_for_the_hosts_and_runs_mtrain_once():
    actual = batch.script(
        SUBMISSION,
        options(
            time="1:30:00",
            partition="low",
            gres="gpu:2",
            cpus_per_task=8,
            requeue=True,
            setup=["module load cuda"],
            extra=["--mail-type=END"],
        ),
    )
    assert actual == GOLDEN


PREEMPTED = (
    "JobId=7 JobState=RUNNING Reason=None PreemptEligibleTime=2026-01-01T00:00:00 PreemptTime=2026-01-01T00:00:09"
)


AT = """JobId=7 SubmitTime=2026-01-01T13:00:00 StartTime=2026-01-01T{began} EndTime=2026-01-02T12:00:00
NodeName=node1 BootTime=2026-01-01T13:00:00 SlurmdStartTime=2026-01-01T{first} LastBusyTime=2026-01-01T13:00:00
NodeName=node2 BootTime=2025-01-01T13:00:00 SlurmdStartTime=2026-01-01T{second} LastBusyTime=2026-01-01T13:00:00"""
"""What the controller says about a job, and the times at which the daemons of its hosts have started."""
LOOKS = ["show job 7", "show node node[1-2]"]


@pytest.mark.job
@pytest.mark.parametrize(
    ("code", "shown", "values", "asked"),
    [
        (143, PREEMPTED, {"requeue": True}, ["show job 7", "requeue 7"]),
        (143, PREEMPTED, {"requeue": False}, []),
        (143, PREEMPTED.replace("RUNNING", "COMPLETING"), {"requeue": True}, ["show job 7"]),  # scancel
        (143, "JobId=7 JobState=RUNNING PreemptTime=None", {"requeue": True}, ["show job 7"]),  # scancel --signal=TERM
        (1, "no answer", {"requeue": True}, [*LOOKS, "requeue 7"]),  # a host is lost
        (1, "all hosts answer", {"requeue": True}, LOOKS),
        (1, AT.format(began="12:00:05", first="12:00:06", second="11:00:00"), {"requeue": True}, [*LOOKS, "requeue 7"]),
        (1, AT.format(began="12:00:05", first="11:00:00", second="12:00:05"), {"requeue": True}, LOOKS),
        (1, AT.format(began="12:00:05", first="11:00:00", second="11:59:59"), {}, []),
        (
            1,
            AT.replace("2026-01-01T{second}", "None").format(began="12:00:05", first="11:00:00"),
            {"requeue": True},
            LOOKS,
        ),
        (1, "no answer", {}, []),
    ],
)
def test_a_job_goes_back_into_the_queue_where_slurm_would_have_put_it(tmp_path, code, shown, values, asked):
    """After a preemption's grace time, and after the loss of a host, mtrain has ended before Slurm does anything."""
    log = tmp_path / "asked.txt"
    log.touch()
    stubs = {
        "python": f"exit {code}",
        "scontrol": f"[ \"$2\" = hostnames ] && exit\necho \"$*\" | sed 's/^--oneliner //' >>{log}\necho '{shown}'",
        "srun": "exit " + ("124" if shown == "no answer" else "0"),
    }
    for name, lines in stubs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{lines}\n")
        (tmp_path / name).chmod(0o755)
    script = tmp_path / "job.sbatch"
    script.write_text(batch.script(replace(SUBMISSION, python=str(tmp_path / "python")), options(**values)))
    numbers = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "3"}
    numbers["SLURM_JOB_NODELIST"] = "node[1-2]"
    environ = {"PATH": f"{tmp_path}:{os.environ['PATH']}", **numbers}
    result = subprocess.run(["bash", str(script)], env=environ, capture_output=True, text=True, timeout=60)
    assert (result.returncode, log.read_text().splitlines()) == (code, asked)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, ""),
        ({"requeue": False}, ""),
        ({"requeue": True}, "trap 'scontrol requeue \"$SLURM_JOB_ID\"' USR1"),
        ({"requeue": True, "signal": "B:USR2@300"}, "trap 'scontrol requeue \"$SLURM_JOB_ID\"' USR2"),
        ({"signal": "B:SIGUSR1@300"}, "trap 'kill -USR1 \"$mtrain\"' USR1"),
        ({"signal": "USR1@300"}, ""),  # goes to the steps, in which the agents receive it
    ],
)
def test_the_signal_before_the_time_limit_requeues_or_is_passed_on(values, expected):
    traps = [line for line in batch.script(SUBMISSION, options(**values)).splitlines() if line.startswith("trap ")]
    assert traps == ["trap : USR1", "trap : TERM", *([expected] if expected else [])]


def ran(script: str, folder: Path, *, python: str) -> "subprocess.CompletedProcess[str]":
    """Run a batch script where ``/bin/python`` of the folder stands for mtrain, and Slurm has one host."""
    (folder / "bin").mkdir()
    for name, text in (("python", python), ("scontrol", "echo node1")):
        path = folder / "bin" / name
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
    environ = {"PATH": f"{folder}/bin:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node1"}
    return subprocess.run(
        ["bash", "-c", script], cwd=folder, env=environ, capture_output=True, text=True, timeout=60, check=False
    )


def placed(folder: Path, **more: object) -> Submission:
    spec_path = folder / "my runs" / ".submitted" / "digits" / "spec.yml"
    return replace(SUBMISSION, folder=folder, python=str(folder / "bin/python"), spec_path=spec_path, **more)


@pytest.mark.job
def test_what_dry_run_prints_runs_without_the_files_of_submit(tmp_path):
    spec = "a: '$HOME `id` \\\\'\nb: |\n  END_OF_SPEC\nEND_OF_SPEC\nc: \"it's\"\n"
    text = SlurmQueue(options()).standalone_request(placed(tmp_path, spec=spec))
    (output,) = re.findall(r"--output=(\S+)", text)
    assert Path(output).parent == tmp_path, "Slurm starts no job whose output has no folder"
    done = ran(text, tmp_path, python='printf "%s\\n" "$@"; while [ "$1" != -c ]; do shift; done; cat "$2"')
    assert done.returncode == 0, done.stderr
    assert done.stdout.partition("\nnode1\n")[2].partition("mtrain ended with")[0].endswith(spec)
    assert done.stderr == ""


@pytest.mark.job
def test_a_request_to_save_in_the_first_moments_ends_neither_the_script_nor_mtrain_nor_an_agent(tmp_path):
    lives = "kill -USR1 $$; echo lives"
    for values in ({}, {"requeue": False, "signal": "B:USR1@60"}):
        text = batch.script(placed(folder := tmp_path / str(len(values))), options(setup=["kill -USR1 $$"], **values))
        folder.mkdir()
        done = ran(text, folder, python=lives)
        assert (done.returncode, done.stdout, done.stderr) == (0, "lives\nmtrain ended with exit code 0\n", "")
    job = HostedJob(cluster="slurm", hosts=["node1"], agent=("sh", "-c", lives, "two words"))
    command = Slurm(options()).command(0, job)
    agent = subprocess.run(command[command.index("--") + 1 :], capture_output=True, text=True, timeout=60, check=False)
    assert (agent.returncode, agent.stdout) == (0, "lives\n")


NASTY = "x\n#SBATCH --uid=0"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *[(key, NASTY) for key in ("partition", "account", "qos", "gres", "mem", "constraint", "gpus_per_node")],
        *[(key, NASTY) for key in ("time", "signal", "python")],
        *[(key, [NASTY]) for key in ("extra", "setup", "srun")],
        ("partition", "low --uid=0"),
        ("account", "a#b"),
        ("account", ""),
        ("mem", "$(id)"),
        ("qos", '"a'),
        ("time", "soon"),
        ("signal", "USR1@-1"),
        ("extra", ["mail"]),
        ("setup", [""]),
        ("cpus_per_task", 0),
        ("partiton", "low"),
    ],
)
def test_a_value_that_could_add_an_option_or_a_command_is_refused(key, value):
    with pytest.raises(ValidationError):
        options(**{key: value})


def test_numbers_of_a_yaml_file_are_accepted_as_text():
    assert batch.directives(SUBMISSION, options(time=30, mem=0, gpus_per_node=2), Path("/shared"))[3:6] == [
        "--gpus-per-node=2", "--mem=0", "--time=30"
    ]  # fmt: skip


NAMES = "a b;touch stolen $(touch stolen) `touch stolen` 'x' \"y\""


@pytest.mark.job
def test_names_and_paths_reach_mtrain_as_they_are(tmp_path):
    """The script is run by bash, with stand-ins for the two commands that need a Slurm or mtrain."""
    folder = tmp_path / NAMES.replace("/", "")
    folder.mkdir()
    spec = folder / "spec.yml"
    stub = tmp_path / "python stub"
    stub.write_text('#!/bin/bash\nprintf "%s\\n" "$@" >words.txt\nexit 3\n')
    (tmp_path / "scontrol").write_text("#!/bin/bash\nprintf 'node1\\nnode2\\n'\n")
    for path in (stub, tmp_path / "scontrol"):
        path.chmod(0o755)
    submission = replace(SUBMISSION, name=NAMES, spec_path=spec, folder=folder, python=str(stub))
    script = tmp_path / "job.sbatch"
    script.write_text(batch.script(submission, options()))
    environ = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_NODELIST": "node[1-2]"}
    result = subprocess.run(["bash", str(script)], cwd=folder, env=environ, capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stderr) == (3, "")
    assert result.stdout == "mtrain ended with exit code 3\n"
    words = (folder / "words.txt").read_text().splitlines()
    assert words[2:] == [
        *("train", "-c", str(spec), "--resume", "if-any", "--name", NAMES),
        *("--cluster", "slurm", "--ips", "node1,node2"),
    ]
    assert not list(tmp_path.rglob("stolen"))


@pytest.mark.job
def test_the_script_outlives_a_request_to_end_until_mtrain_has_saved(tmp_path):
    """Slurm sends SIGTERM to the script and to mtrain; the exit code is mtrain's."""
    stub = tmp_path / "python"
    stub.write_text(
        "#!/usr/bin/env python3\nimport os, signal, sys, time\n"
        "def ended(number, frame):\n    time.sleep(0.5)\n    sys.exit(143)\n"
        "signal.signal(signal.SIGTERM, ended)\nos.kill(os.getppid(), signal.SIGTERM)\n"
        "os.kill(os.getpid(), signal.SIGTERM)\n"
    )
    (tmp_path / "scontrol").write_text("#!/bin/sh\n")
    for path in (stub, tmp_path / "scontrol"):
        path.chmod(0o755)
    script = tmp_path / "job.sbatch"
    script.write_text(batch.script(replace(SUBMISSION, python=str(stub)), options()))
    environ = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    result = subprocess.run(["bash", str(script)], env=environ, capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stdout) == (143, "mtrain ended with exit code 143\n")


@pytest.mark.parametrize(
    ("path", "written"), [("/a b/50%", '"/a b/50%%/'), ('/a"\\b', '"/a\\"\\\\b/'), ("/plain", "/plain/")]
)
def test_paths_are_quoted_as_sbatch_reads_them(path, written):
    script = batch.script(replace(SUBMISSION, spec_path=Path(path, "spec.yml")), options())
    assert f"#SBATCH --output={written}slurm-%j.out" in script


def test_a_path_with_a_line_end_is_refused():
    with pytest.raises(UsageError, match="line end"):
        batch.script(replace(SUBMISSION, folder=Path("/a\nb")), options())


def test_an_agent_is_started_by_srun_in_the_allocation_alone():
    job = HostedJob(hosts=["node1", "node2"], agent=["python", "-m", "mtrain.jobs.hosts.agent"], cluster="slurm")
    cluster = Slurm(options(srun=["--container=a b"]))
    words = list(cluster.command(1, job))
    assert words[0] == "srun"
    assert words[-10:-7] == ["--container=a b", "--nodelist=node2", "--"]
    assert words[-3:] == ["python", "-m", "mtrain.jobs.hosts.agent"]
    with pytest.raises(UsageError, match="SLURM_JOB_ID is not set"):
        cluster.gathering(job, {})
    with pytest.raises(UsageError):
        cluster.command(0, replace(job, hosts=["--uid=0"]))


SHOWN = (
    "JobId=7 JobName=x UserId=root(0) GroupId=root(0) JobState={state} Reason={reason} Dependency=(null) Requeue=1 "
    "Restarts=0 ExitCode={code} RunTime=00:00:05 Partition=low NodeList={nodes} BatchHost=node1 NumNodes=2\n"
)


class Answers:
    """Stands for Slurm's commands: what each prints."""

    def __init__(self, **answers: str) -> None:
        self.answers = answers
        self.asked: list[list[str]] = []

    def __call__(self, argv: list[str], *, folder: Path | None = None, refusal: str = "") -> str:
        self.asked.append(argv)
        answer = self.answers.get(argv[0], "")
        if "hostnames" in argv:
            return "node1\nnode2\n"
        if answer.startswith("error:") and (not refusal or refusal not in answer):
            raise UsageError(answer)
        return "" if answer.startswith("error:") else answer


@pytest.fixture
def job(tmp_path) -> QueuedJob:
    return QueuedJob(cluster="slurm", id="7", name="x", folder=tmp_path, request=tmp_path / "job.sbatch")


@pytest.mark.parametrize(
    ("state", "reason", "code", "expected"),
    [
        ("PENDING", "Resources", "0:0", ("waiting", "PENDING (Resources)", None)),
        ("EXPEDITING", "None", "0:0", ("waiting", "EXPEDITING", None)),
        ("RUNNING", "None", "0:0", ("running", "RUNNING", None)),
        ("COMPLETING", "None", "0:0", ("running", "COMPLETING", None)),
        ("COMPLETED", "None", "0:0", ("done", "COMPLETED", 0)),
        ("FAILED", "NonZeroExitCode", "143:0", ("failed", "FAILED (NonZeroExitCode)", 143)),
        ("CANCELLED", "None", "0:15", ("cancelled", "CANCELLED", 143)),
        ("TIMEOUT", "TimeLimit", "0:15", ("failed", "TIMEOUT (TimeLimit)", 143)),
        ("SOMETHING_NEW", "None", "0:0", ("unknown", "SOMETHING_NEW", None)),
    ],
)
def test_the_state_of_a_job_is_what_the_controller_says(monkeypatch, job, state, reason, code, expected):
    shown = SHOWN.format(state=state, reason=reason, code=code, nodes="node[1-2]")
    monkeypatch.setattr(commands, "run", Answers(scontrol=shown))
    actual = SlurmQueue(options()).state(job)
    assert (actual.phase, actual.text, actual.code) == expected
    assert actual.hosts == (["node1", "node2"] if expected[0] == "running" else [])


def test_a_job_that_the_controller_has_forgotten_is_looked_up_in_the_accounting(monkeypatch, job):
    gone = "error: slurm_load_jobs error: Invalid job id specified"
    answers = Answers(scontrol=gone, sacct="CANCELLED by 1000|None assigned|0:15\n")
    monkeypatch.setattr(commands, "run", answers)
    state = SlurmQueue(options()).state(job)
    assert (state.phase, state.text, state.code) == ("cancelled", "CANCELLED", 143)


def test_without_accounting_the_output_of_the_job_tells_its_exit_code(monkeypatch, job):
    gone = "error: slurm_load_jobs error: Invalid job id specified"
    monkeypatch.setattr(commands, "run", Answers(scontrol=gone, sacct="error: Slurm accounting storage is disabled"))
    assert SlurmQueue(options()).state(job).phase == "unknown"
    job.request.with_name("slurm-7.out").write_text(
        "a\nmtrain ended with exit code 143\nb\nmtrain ended with exit code 0\n"
    )
    state = SlurmQueue(options()).state(job)
    assert (state.phase, state.code) == ("done", 0)


def test_a_controller_that_does_not_answer_is_no_job_that_is_gone(monkeypatch, job):
    monkeypatch.setattr(commands, "run", Answers(scontrol="error: Unable to contact slurm controller"))
    with pytest.raises(UsageError, match="Unable to contact"):
        SlurmQueue(options()).state(job)


def test_an_id_that_is_an_option_is_given_to_no_command(monkeypatch, job):
    monkeypatch.setattr(commands, "run", lambda argv, **more: pytest.fail(f"{argv} was run"))
    with pytest.raises(UsageError, match="--user=root"):  # no such job can be made
        replace(job, id="--user=root")
    object.__setattr__(job, "id", "--user=root")
    for ask in (SlurmQueue(options()).cancel, SlurmQueue(options()).state):
        with pytest.raises(UsageError, match="--user=root"):
            ask(job)


@pytest.mark.parametrize("first", [["PENDING"], ["EXPEDITING"], ["SOMETHING_NEW"] * 2])
def test_followed_logs_end_with_the_last_line_of_a_job_that_has_ended(monkeypatch, job, first):
    path = job.request.with_name("slurm-7.out")
    states = iter([*first, "RUNNING", "COMPLETED"])
    monkeypatch.setattr("mtrain_clusters._slurm.queue.ASK_S", 0.0)
    monkeypatch.setattr("mtrain_clusters._slurm.queue.POLL_S", 0.0)

    def answer(argv: list[str], **more: object) -> str:
        if "hostnames" in argv:
            return "node1\n"
        state = next(states)
        if state not in first:
            path.write_text("one\ntw" if state == "RUNNING" else "one\ntwo\nthree")
        return SHOWN.format(state=state, reason="None", code="0:0", nodes="node1")

    monkeypatch.setattr(commands, "run", answer)
    assert list(SlurmQueue(options()).logs(job, follow=True)) == ["one", "two", "three"]


def test_a_command_that_is_not_installed_says_where_to_go(monkeypatch, job):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(UsageError, match="scontrol is not installed here"):
        SlurmQueue(options()).state(job)


def test_a_submission_returns_the_number_and_shows_what_sbatch_says(monkeypatch, tmp_path):
    queue = SlurmQueue(options())
    submission = replace(SUBMISSION, folder=tmp_path)
    monkeypatch.setattr(commands, "run", Answers(sbatch="42;main\n"))
    assert queue.submit(submission, tmp_path / "job.sbatch") == "42"
    monkeypatch.setattr(commands, "run", Answers(sbatch="error: invalid partition specified: lo"))
    with pytest.raises(UsageError, match=re.escape("invalid partition specified: lo")):
        queue.submit(submission, tmp_path / "job.sbatch")
