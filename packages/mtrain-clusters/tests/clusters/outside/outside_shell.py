"""A cluster as an outsider's plugin: every "host" is reached by a shell on this machine, which notes that it was used."""

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict

from mtrain.core.interfaces import Cluster, HostedJob


class Shell(Cluster):
    """Starts an agent for every host with ``sh``."""

    class Options(BaseModel):
        """The keys of ``cluster.options``."""

        model_config = ConfigDict(extra="forbid")
        journal: str = "reached.txt"

    def __init__(self, options: Options) -> None:
        self.options = options

    def command(self, node: int, job: HostedJob) -> Sequence[str]:
        """Return a command that writes the host's address into a file and then becomes the agent."""
        return ("sh", "-c", f'echo "$0" >> {self.options.journal}; exec "$@"', job.hosts[node], *job.agent)

    def gathering(self, job: HostedJob, environ: Mapping[str, str]) -> Any:
        """Return agents that are started by the commands."""
        from mtrain.jobs.hosts.agent_processes import AgentProcesses

        return AgentProcesses(job, [self.command(node, job) for node in range(len(job.hosts))], environ=environ)
