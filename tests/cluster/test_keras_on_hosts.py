"""Scripts of Horovod with TensorFlow and Keras on several hosts: over ssh, by hand, elastic, in pods, and in the queue of a Slurm."""

import re
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from tests.keras.jobs import PORTS, QUIET, difference, needs_tensorflow, weights

from mtrain.core.checkpoint import store
from tests.cluster.jobs import Job, Jobs
from tests.cluster.lab import Lab, wait_for
from tests.cluster.slurm_lab import SlurmLab
from tests.cluster.test_elastic import strike
from tests.cluster.test_slurm_jobs import ENDED, output, record, updates

pytestmark = [needs_tensorflow, pytest.mark.slow, pytest.mark.timeout(1200)]
UPDATES = 45
NODES = ("node1", "node2", "node3")
WORKER = "mtrain.rank.worker"
SLOWLY = {
    "port": (
        "    model.fit(",
        "    callbacks.append(tf.keras.callbacks.LambdaCallback(on_train_batch_end=lambda *_: __import__('time').sleep(0.4)))\n"
        "    model.fit(",
    ),
    "session": (
        '            done = final.pop("step")\n',
        '            done = final.pop("step")\n            __import__("time").sleep(0.4)\n',
    ),
}
"""What makes the updates of a script long enough for a fault to come in between; nothing of its training is changed."""


def folder_of(share: Path, port: str, *, script: str = "peer.py", slowly: str = "") -> Path:
    """Copy a port to a new folder that all hosts see, in which its ranks run."""
    here = share / f"{port}-{time.monotonic_ns()}"
    shutil.copytree(PORTS / port, here, ignore=shutil.ignore_patterns("__pycache__"))
    if slowly:
        old, new = SLOWLY[slowly]
        text = (here / script).read_text()
        assert text.count(old) == 1
        (here / script).write_text(text.replace(old, new))
    return here


def argv(here: Path, *words: str, script: str = "peer.py") -> list[str]:
    """Return the command of a job in a folder; what is typed on a host begins in the lab's own one."""
    mtrain = [sys.executable, "-m", "mtrain", "run", "-o", *QUIET, "--backend", "horovod"]
    return ["sh", "-c", 'cd "$0" && exec "$@"', str(here), *mtrain, *words, str(here / script), "--fp64"]


def placed(lab: Lab, hosts: int) -> list[str]:
    return ["--nproc-per-node", "1", "--ips", lab.ips(hosts)]


def started(jobs: Jobs, here: Path, typed: Mapping[str, Sequence[str]], *, name: str, script: str = "peer.py") -> Job:
    """Type a command on some hosts, each with words of its own."""
    job = Job(jobs.lab, name, [], here / "runs")
    for node, words in typed.items():
        job.outputs.append(jobs._start(node, argv(here, "--name", name, *words, script=script)))
    return job


def ended_well(job: Job) -> None:
    job.finish(timeout_s=600)
    assert [output.code for output in job.outputs] == [0] * len(job.outputs), job.leader.text


@pytest.mark.parametrize("port", ["horovod_keras", "horovod_session"])
def test_unmodified_scripts_train_on_two_hosts_as_in_one_process(jobs: Jobs, lab: Lab, port: str):
    alone = folder_of(lab.share, port)
    ended_well(started(jobs, alone, {"node1": ["--nproc-per-node", "1"]}, name="one"))
    over_ssh, by_hand = folder_of(lab.share, port), folder_of(lab.share, port)
    words = placed(lab, 2)
    ended_well(started(jobs, over_ssh, {"node1": [*words, "--cluster", "ssh"]}, name="ssh"))
    assert (over_ssh / "runs/ssh/logs/rank-1.log").exists()
    ended_well(started(jobs, by_hand, {"node1": words, "node2": words}, name="hand"))
    one, ssh, hand = weights(alone), weights(over_ssh), weights(by_hand)
    print(f"{port}: over ssh {difference(one, ssh):.1e}, by hand {difference(one, hand):.1e}")
    assert max(difference(one, ssh), difference(one, hand)) <= 1e-12


@pytest.mark.parametrize(("port", "script", "slowly"), [("horovod_keras", "port.py", "port")])
def test_an_elastic_job_that_loses_a_host_and_gets_it_back_ends_with_the_weights_of_one_process(
    jobs: Jobs, lab: Lab, port: str, script: str, slowly: str
):
    alone = folder_of(lab.share, port)
    ended_well(started(jobs, alone, {"node1": ["--nproc-per-node", "1"]}, name="one"))
    here = folder_of(lab.share, port, script=script, slowly=slowly)
    elastic = ["--cluster", "ssh", "--nnodes", "1:3", "--failure-timeout-s", "12", "-o", "cluster.rejoin_s=1"]
    more = ["-o", "checkpoint.every_updates=2"]
    job = started(jobs, here, {"node1": [*placed(lab, 3), *elastic, *more]}, name="elastic", script=script).reach(4)
    strike(lab, job, lambda: lab.power("node3", "halt"), hosts=2)
    strike(lab, job, lambda: lab.up(4), hosts=3)
    ended_well(job)
    assert sorted(set(job.updates())) == list(range(UPDATES))
    print(f"elastic: {difference(weights(alone), weights(here)):.1e}")
    assert difference(weights(alone), weights(here)) <= 1e-12


def test_a_host_that_is_lost_starts_an_unmodified_session_again_from_its_own_checkpoint(jobs: Jobs, lab: Lab):
    alone = folder_of(lab.share, "horovod_session")
    ended_well(started(jobs, alone, {"node1": ["--nproc-per-node", "1"]}, name="one"))
    here = folder_of(lab.share, "horovod_session", slowly="session")
    elastic = ["--cluster", "ssh", "--nnodes", "1:3", "--failure-timeout-s", "12", "-o", "cluster.rejoin_s=1"]
    job = started(jobs, here, {"node1": [*placed(lab, 3), *elastic]}, name="elastic")
    wait_for(lambda: list(here.glob("checkpoints-of-session/model.ckpt-1*.index")), what="its own checkpoint")
    lab.power("node3", "halt")
    ended_well(job)
    assert "on 2 of its hosts" in job.leader.text
    print(f"session: {difference(weights(alone), weights(here)):.1e}")
    assert difference(weights(alone), weights(here)) <= 1e-12


def test_pods_train_a_script_with_the_callback_as_one_process(jobs: Jobs, lab: Lab):
    """The script is the port, but for the folder of its weights: the image's own folder is read-only."""
    pytest.importorskip("kubernetes_validate", reason="the extra kube is not installed")
    from tests.cluster import test_lab_kubernetes as pods

    alone = folder_of(lab.share, "horovod_keras")
    ended_well(started(jobs, alone, {"node1": ["--nproc-per-node", "1"]}, name="one"))
    here = folder_of(lab.share, "horovod_keras")
    text = (here / "port.py").read_text().replace('"weights.npz"', f'"{pods.RUNS}/weights.npz"')
    (here / "port.py").write_text(f"import sys\n\nsys.argv.append('--fp64')\n{text}")
    shared = lab.share / "runs" / "weights.npz"
    words = [word for pair in QUIET for word in ("-o", pair)]
    script = str((here / "port.py").relative_to(lab.share))
    with pods._played(lab, "pods-keras", "horovod", kind="job", script=script, more=words) as played:
        played.start(jobs)
        assert played.codes(timeout_s=400) == [0, 0], played.text()
    made = weights(shared.parent)
    shared.unlink()
    print(f"pods: {difference(weights(alone), made):.1e}")
    assert difference(weights(alone), made) <= 1e-12


def submitted(slurm: SlurmLab, here: Path, *words: str, name: str, hosts: int, script: str = "port.py") -> str:
    """Submit a script from its folder; return the job's id."""
    mtrain = [sys.executable, "-m", "mtrain", "submit", "--cluster", "slurm", "--backend", "horovod"]
    typed = [*mtrain, "-o", *QUIET, "-o", f"report.dir={slurm.share / 'runs'}", "--name", name]
    typed += ["-N", str(hosts), "--nproc-per-node", "1", *words]
    printed = slurm.run("node1", ["sh", "-c", 'cd "$0" && exec "$@"', str(here), *typed, str(here / script), "--fp64"])
    return re.search(r"submitted job (\d+)", printed)[1]


def kill_all(slurm: SlurmLab) -> None:
    """Send SIGKILL to mtrain, its agents and its ranks on all hosts at about the same time, on each host the rank first.

    Without the first rank that is killed no update is made, and nothing can be saved.
    """
    there = {node: [each for each in slurm.processes(node) if each.module.startswith("mtrain")] for node in NODES}
    ranks = {node: [each.module for each in found].count(WORKER) for node, found in there.items()}
    assert set(ranks.values()) == {1}
    kills = []
    for node, found in there.items():
        ordered = sorted(found, key=lambda each: each.module != WORKER)
        kills.append(slurm.start(node, ["kill", "-KILL", *(str(each.pid) for each in ordered)]))
    for kill in kills:
        kill.communicate(timeout=60)


def test_a_job_of_slurm_that_is_killed_and_requeued_ends_with_the_weights_of_one_process(slurm: SlurmLab):
    """SIGKILL to every process of mtrain and of the script on all hosts, so that nothing more can be saved."""
    alone = folder_of(slurm.share, "horovod_keras")
    one = submitted(slurm, alone, name="keras-one", hosts=1, script="peer.py")
    assert slurm.wait(one, ENDED, timeout_s=300)["JobState"] == "COMPLETED", output(slurm, one, "keras-one")

    here = folder_of(slurm.share, "horovod_keras", script="port.py", slowly="port")
    number = submitted(slurm, here, "--requeue", "-o", "checkpoint.every_updates=4", name="keras", hosts=3)
    wait_for(lambda: 21 in updates(slurm, "keras"), timeout_s=240, what="update 21")
    kill_all(slurm)
    assert slurm.wait(number, ENDED, timeout_s=120)["JobState"] == "FAILED", output(slurm, number, "keras")
    assert not (here / "weights.npz").exists()
    saved = store.load(store.newest(slurm.share / "runs/keras/checkpoints")).progress
    assert (saved.update % 4, saved.update >= 20, saved.position > 0) == (0, True, True)

    slurm.run("node1", ["scontrol", "requeue", number])
    wait_for(lambda: int(slurm.job(number)["Restarts"]) > 0, what="a start again")
    assert slurm.wait(number, ENDED, timeout_s=300)["JobState"] == "COMPLETED", output(slurm, number, "keras")
    made = updates(slurm, "keras")
    assert sorted(set(made)) == list(range(UPDATES))
    again = list(range(saved.update, UPDATES))
    assert made[-len(again) :] == again
    print(f"killed on Slurm after update {saved.update}, requeued: {difference(weights(alone), weights(here)):.1e}")
    assert difference(weights(alone), weights(here)) <= 1e-12
    assert record(slurm, "keras").is_dir()
