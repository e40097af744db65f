"""``mtrain submit``, ``status``, ``logs`` and ``cancel``, with the queue of an outside cluster."""

import json

import pytest
import yaml
from tests.clusters.conftest import run, says

import mtrain
from mtrain.errors import UsageError
from mtrain.jobs.hosts.host_log import HostLog
from mtrain.jobs.watch.hang_log import HangLog
from tests.cluster.lab import wait_for

pytestmark = pytest.mark.job

SUBMIT = ("submit", "-c", "spec.yml", "-b", "solo", "--cluster", "background")
SCRIPT = """
import sys

import mtrain

with mtrain.session() as session:
    print("started with", sys.argv[1:], session.size)
"""


@pytest.mark.smoke
def test_a_job_is_submitted_watched_and_found_by_its_id(here):
    request = says(*SUBMIT, "--partition", "long", "--dry-run")
    assert request.startswith("# long\n")
    assert not (here / "runs").exists()
    submitted = says(*SUBMIT, "--partition", "long")
    number = submitted.split()[2]
    assert f"submitted job {number} to background: run spec\n" in submitted
    (here / "spec.yml").write_text("a later version, which the waiting job must not see")
    assert "update 3/3" in says("logs", "-f", number)
    state = json.loads(says("status", "--json"))
    assert (state["id"], state["phase"], state["code"]) == (number, "done", 0)
    assert (state["update"], state["total_updates"], state["run_dir"]) == (3, 3, "runs/spec")
    assert "newest copy" not in says("status")
    copy = {"kind": "copy", "name": "step-00000003", "to": "s3://bucket/spec", "time": 1.0}
    with (here / "runs" / "spec" / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(copy) + "\n")
    assert "\nnewest copy: step-00000003 at s3://bucket/spec\n" in says("status")
    assert json.loads(says("status", "--json"))["copied"] == copy
    assert number in says("status", "--all")
    assert "has ended already" in says("cancel", number)


def test_what_the_queue_refuses_leaves_no_record(here):
    process = run(*SUBMIT, "--partition", "closed")
    assert (process.returncode, process.stderr) == (2, "error: the partition closed takes no jobs\n")
    assert list((here / "runs" / ".submitted").iterdir()) == []


def test_two_submissions_of_one_spec_have_runs_of_their_own_and_each_can_be_cancelled(here):
    words = (*SUBMIT, "-o", "train.updates=1000000")
    names = [says(*words).splitlines()[0].rpartition(" ")[2] for _ in range(2)]
    assert names == ["spec", "spec-2"]
    refused = run(*SUBMIT, "--name", "spec")
    assert refused.returncode == 2
    assert "has this name and is running" in refused.stderr
    for name in names:
        wait_for((here / "runs" / name).is_dir)
        log = HostLog(here / "runs" / name)
        log.began(["node1", "node2"], restarts=1)
        log.lost("node2", "silent for 26 s")
        HangLog(here / "runs" / name).add({"hang": "stopped", "text": "rank 1 has been stopped", "ranks": [1]})
    shown = says("status", "spec-2")
    assert "\ntakes part: node1, started again 1 time\nlost " in shown
    assert ": rank 1 has been stopped\n" in shown
    assert json.loads(says("status", "--json", "spec"))["participants"]["hosts"] == ["node1"]
    for name in names:
        assert "asked to end" in says("cancel", name)
    for name in names:
        assert mtrain.open_job(name).wait(timeout_s=60, every_s=0.2).phase == "failed"
    first = mtrain.open_job("spec").id
    assert "run spec\n" in says(*SUBMIT, "--name", "spec")
    assert mtrain.open_job("spec").id != first, "the newest job of that name"
    assert mtrain.open_job("spec").wait(timeout_s=60, every_s=0.2).phase == "done"
    # The job that was cancelled may have made more updates than the three that this one was to make.
    assert len(mtrain.open_run("runs/spec").records.updates) >= 3


def test_a_submitted_job_goes_on_with_what_was_chosen_for_its_run(here):
    says(
        "train", "-c", "spec.yml", "-b", "solo", "--seed", "42", "-o", "optimizer.learning_rate=0.02", "--name", "first"
    )
    process = run("submit", "--cluster", "background", "--resume", "runs/first", "--seed", "7", "-o", "train.updates=5")
    assert process.returncode == 0, process.stderr
    assert "train.seed 42 there, 7 here (--seed 7)" in process.stderr
    assert mtrain.open_job("first").wait(timeout_s=120, every_s=0.2).code == 0
    spec = json.loads((here / "runs/first/spec.json").read_text())
    chosen = (
        spec["backend"]["name"],
        spec["train"]["seed"],
        spec["optimizer"]["learning_rate"],
        spec["train"]["updates"],
    )
    assert chosen == ("solo", 7, 0.02, 5)
    assert mtrain.open_run("runs/first").records.updates[-1]["update"] == 4, "it went on in the folder of its run"
    # The name alone means the same run, and the job of a further submission keeps what was chosen.
    request = says("submit", "-c", "spec.yml", "--cluster", "background", "--name", "first", "--dry-run")
    assert "-o train.seed" not in request, "nothing is typed anew"
    refused = run("submit", "--cluster", "background", "--resume", "runs/first", "--name", "second")
    assert refused.returncode == 2
    assert "--name second" in refused.stderr


def test_a_script_is_submitted_with_what_was_chosen_for_its_run(here):
    (here / "mine.py").write_text(SCRIPT)
    says("run", "-b", "solo", "--seed", "42", "--name", "first", "mine.py")
    process = run("submit", "--cluster", "background", "--name", "first", "--dry-run", "--batch-size", "8", "mine.py")
    assert process.returncode == 0, process.stderr
    says("submit", "--cluster", "background", "--name", "first", "--batch-size", "8", "mine.py")
    says("logs", "-f")
    kept = yaml.safe_load((here / "runs/.submitted/first/spec.yml").read_text())
    assert (kept["backend"]["name"], kept["train"]) == ("solo", {"batch_size": 8, "seed": 42})


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--gres", "gpu:2"), "--gres gpu:2: cluster.options.gres: unknown key"),
        (("--ips", "a,b"), "--ips a,b: the scheduler chooses the hosts"),
        (("--resume", "runs/x"), "--resume runs/x: no intact checkpoint"),
        (("--resume", "s3://bucket/x"), "--resume s3://bucket/x: is no folder here"),
        (
            ("--cluster", "ssh"),
            "cluster.name: 'ssh' given, which has no queue; `mtrain submit` needs one of background",
        ),
        (("--nnodes", "3", "--batch-size", "7"), "train.batch_size"),
        (("--cluster", "auto"), "no scheduler is named; choose one with --cluster: background"),
    ],
)
def test_a_submission_that_cannot_work_is_refused_before_it_waits(here, words, message):
    process = run(*SUBMIT, "-b", "ddp", *words)
    assert process.returncode == 2
    assert message in process.stderr
    assert "Traceback" not in process.stderr
    assert not (here / "runs").exists()


def test_options_may_be_given_under_the_name_of_the_cluster(here):
    assert says(*SUBMIT, "-o", "background.partition=short", "--dry-run").startswith("# short\n")


def test_a_plan_for_a_queue_is_its_request(here):
    request = says(*SUBMIT, "--dry-run")
    assert says("plan", *SUBMIT[1:]) == request
    (here / "queued.yml").write_text("_BASE_: spec.yml\ncluster: {name: background}\n")
    assert says("plan", "-c", "queued.yml", "-b", "solo", "--name", "spec").startswith("# main\n")


def test_a_script_is_submitted_with_its_arguments_and_the_values_that_were_set(here):
    (here / "mine.py").write_text(SCRIPT)
    words = ("--cluster", "background", "-b", "solo", "--batch-size", "8", "mine.py", "--depth", "3")
    (here / "mine.yml").write_text("train: {seed: 7}\n")
    says("submit", "-c", "mine.yml", *words)
    (here / "mine.yml").write_text("a later version, which the waiting job must not see")
    says("logs", "-f")
    kept = yaml.safe_load((here / "runs" / ".submitted" / "mine" / "spec.yml").read_text())
    assert kept["train"] == {"batch_size": 8, "seed": 7}
    assert "started with ['--depth', '3'] 1" in (here / "runs" / "mine" / "logs" / "rank-0.log").read_text()


def test_without_a_submitted_job_the_message_says_so(here):
    for command in ("status", "logs", "cancel"):
        process = run(command)
        assert process.returncode == 2
        assert "no job was submitted from here" in process.stderr


def test_python_submits_and_finds_jobs_as_the_command_line_does(here):
    job = mtrain.submit("spec.yml", cluster="background", backend="solo", options={"partition": "short"})
    assert job.request.startswith("# short\n")
    assert job.wait(timeout_s=120, every_s=0.2).phase == "done"
    assert job.result().summary["updates"] == 3
    assert mtrain.open_job(job.id) == mtrain.open_job() == job
    with pytest.raises(UsageError, match="has no queue"):
        mtrain.submit("spec.yml", cluster="ssh")
