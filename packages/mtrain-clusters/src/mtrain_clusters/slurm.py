"""Bring a job to the hosts of an allocation of Slurm, and put jobs into Slurm's queue."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from mtrain.core.interfaces import Cluster, HostedJob
from mtrain.errors import UsageError
from mtrain.spec.hostnames import checked_host
from mtrain_clusters._slurm.options import SlurmOptions

if TYPE_CHECKING:
    from mtrain.jobs.hosts.agent_processes import AgentProcesses
    from mtrain_clusters._slurm.queue import SlurmQueue

SRUN = (
    "srun",
    "--overlap",  # The batch script and other steps keep the same cores, memory and GPUs.
    *("--quiet", "--nodes=1", "--ntasks=1", "--ntasks-per-node=1"),
    *("--cpu-bind=none", "--mpi=none"),  # An agent starts many ranks; they may use all cores of the job.
    *("--kill-on-bad-exit=0", "--unbuffered"),
)
# Slurm sends it to all tasks.
UNTIL_TAKEN = ("sh", "-c", """trap '' USR1; exec "$@\"""", "sh")
"""Starts an agent that no SIGUSR1 ends before it takes that signal as a request to save."""
FAILED = 205
"""Exit status by which srun reports an error of its own, see ``SLURM_EXIT_ERROR``; others are those of the agent."""
CAUSES: Sequence[tuple[str, str]] = (
    (
        "Invalid node name|configuration is not available|nodes? .* not in this|not in (the )?job",
        "it is none of the hosts of this job: give the names that `scontrol show hostnames` prints to --ips",
    ),
    ("Invalid job id|complet|finished|Expired|revoked", "the job of Slurm has ended, or is ending: submit it again"),
    (
        "unrecognized option|invalid option|Invalid .* specification",
        "mtrain needs Slurm 20.11 or newer; correct cluster.options.srun",
    ),
)
"""(regular expression for the output of srun, remedy)."""


class Slurm(Cluster):
    """Starts an agent on every host with srun, inside an allocation that Slurm has granted.

    Every agent is the task of a step, also the one on the first host: Slurm sends the signals of a preemption to steps
    only. An agent passes them on to the leader, which lets all ranks save.
    """

    class Options(SlurmOptions):
        """The keys of ``cluster.options``."""

    options: Options

    @property
    def python(self) -> str | None:
        """Return the option ``python``."""
        return self.options.python

    def command(self, node: int, job: HostedJob) -> Sequence[str]:
        """Return the srun command that starts the agent on host number ``node``.

        Raises:
            UsageError: the host is no name of a host.
        """
        host = checked_host(job.hosts[node])
        return (*SRUN, *self.options.srun, f"--nodelist={host}", "--", *UNTIL_TAKEN, *job.agent)

    def gathering(self, job: HostedJob, environ: Mapping[str, str]) -> "AgentProcesses":
        """Return agents that srun starts.

        Raises:
            UsageError: this process is in no allocation of Slurm.
        """
        from mtrain.jobs.hosts.agent_processes import AgentProcesses
        from mtrain.jobs.hosts.start_failures import Means

        if "SLURM_JOB_ID" not in environ:
            raise UsageError(
                "--cluster slurm: this process is in no allocation of Slurm (SLURM_JOB_ID is not set); submit the job "
                "with `mtrain submit`, or start it in the shell that `salloc` opens"
            )
        means = Means(
            name="srun",
            failed=FAILED,
            causes=CAUSES,
            trial="try in the job: srun --overlap --nodes=1 --ntasks=1 --nodelist={host} true",
            python_key="cluster.options.python",
        )
        commands = [self.command(node, job) for node in range(len(job.hosts))]
        own = {"SLURM_EXIT_ERROR": str(FAILED), "SLURM_EXIT_IMMEDIATE": str(FAILED)}
        return AgentProcesses(job, commands, environ={**environ, **own}, means=means)

    def queue(self) -> "SlurmQueue":
        """Return the queue of the Slurm that this machine belongs to."""
        from mtrain_clusters._slurm.queue import SlurmQueue

        return SlurmQueue(self.options)
