"""A queue as an outsider's plugin: a job is a process of this machine that was started in the background."""

import os
import shlex
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from mtrain.core.interfaces import Cluster, HostedJob
from mtrain.core.interfaces.queue import Queue, QueuedJob, QueueState, Submission
from mtrain.errors import UsageError


class Background(Cluster):
    """Starts jobs of one host in the background."""

    class Options(BaseModel):
        """The keys of ``cluster.options``."""

        model_config = ConfigDict(extra="forbid")
        partition: str = "main"

    def __init__(self, options: Options) -> None:
        self.options = options

    def command(self, node: int, job: HostedJob) -> Sequence[str]:
        """Nothing reaches a host."""
        raise UsageError("this cluster has a queue only")

    def queue(self) -> Queue:
        """Return the queue."""
        return Processes(self.options.partition)


class Processes(Queue):
    """Starts the requested command with a shell, which writes the exit code."""

    def __init__(self, partition: str) -> None:
        self._partition = partition

    def request(self, submission: Submission) -> str:
        words = submission.command(more=["--cluster", "auto"])
        # The shell outlives the signal that ends its command, so that it can write the exit code.
        return f"# {self._partition}\ntrap : TERM\necho $$ > $0.pid\n{shlex.join(words)} > $0.log 2>&1\necho $? > $0.code\n"

    def submit(self, submission: Submission, request: Path) -> str:
        if self._partition == "closed":
            raise UsageError("the partition closed takes no jobs")
        quiet = subprocess.DEVNULL  # A job that kept the pipes of this command open would keep its caller waiting.
        command = ["setsid", "--fork", "sh", str(request)]
        subprocess.run(command, cwd=submission.folder, check=True, stdin=quiet, stdout=quiet, stderr=quiet)
        pid = Path(f"{request}.pid")
        while not pid.exists() or not pid.read_text():
            time.sleep(0.05)
        return pid.read_text().strip()

    def state(self, job: QueuedJob) -> QueueState:
        code = Path(f"{job.request}.code")
        if not code.exists() or not code.read_text():
            return QueueState(phase="running", text="a process", hosts=["here"])
        number = int(code.read_text())
        return QueueState(phase="failed" if number else "done", text="ended", code=number)

    def logs(self, job: QueuedJob, *, follow: bool) -> Iterator[str]:
        while follow and not self.state(job).ended:
            time.sleep(0.1)
        yield from Path(f"{job.request}.log").read_text().splitlines()

    def cancel(self, job: QueuedJob) -> None:
        os.killpg(int(job.id), signal.SIGTERM)
