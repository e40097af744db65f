"""Bring a job to the nodes of a Ray cluster: an actor on each of them starts the agent."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from mtrain.core.interfaces import Cluster, HostedJob
from mtrain_clusters._ray.options import RayOptions

if TYPE_CHECKING:
    from mtrain_clusters._ray.gathering import RayAgents


class Ray(Cluster):
    """Places each host of the job on another node of a running Ray cluster, which may first have to start nodes.

    The hosts have names such as ``ray-0`` until Ray has placed them. No port is opened for this, and nothing of a spec is
    in a command line: agents talk to their leader through calls of their actors.
    """

    class Options(RayOptions):
        """The keys of ``cluster.options``."""

    assigns: ClassVar[frozenset[str]] = frozenset(
        {"CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"}
    )

    submits: ClassVar[str] = "ray job submit -- mtrain -c SPEC --cluster ray --nnodes N"

    options: Options

    @property
    def python(self) -> str | None:
        """Return the option ``python``."""
        return self.options.python

    def places(self, count: int) -> Sequence[str]:
        """Return ``ray-0``, ``ray-1`` ...: Ray chooses the nodes when the job starts."""
        return [f"ray-{number}" for number in range(count)]

    def command(self, node: int, job: HostedJob) -> Sequence[str]:
        """Return the command that the actor of host number ``node`` runs there."""
        return job.agent

    def gathering(self, job: HostedJob, environ: Mapping[str, str]) -> "RayAgents":
        """Return agents that actors start."""
        from mtrain_clusters._ray.gathering import RayAgents

        address = self.options.address
        return RayAgents(
            job, self.options, address=environ.get("RAY_ADDRESS", address) if address == "auto" else address
        )
