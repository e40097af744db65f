"""Clusters that give hosts: Slurm, Kubernetes, Ray, and the allocations of other schedulers."""

from typing import TYPE_CHECKING

from mtrain.spec import faces

if TYPE_CHECKING:
    from mtrain_clusters.commands.submit import submit
    from mtrain_clusters.queued_job import SubmittedJob, open_job

__all__ = ["SubmittedJob", "__version__", "open_job", "submit"]
__version__ = "0.1.0"

if not TYPE_CHECKING:
    __getattr__ = faces.attributes(
        __name__, {"queued_job": ("SubmittedJob", "open_job"), "commands.submit": ("submit",)}
    )
