"""Give a job to Kubernetes: as an indexed Job, or as a TrainJob of Kubeflow Trainer."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mtrain.core.interfaces import Cluster, HostedJob
from mtrain.errors import UsageError
from mtrain_clusters._kubernetes.options import KubernetesOptions

if TYPE_CHECKING:
    from mtrain.core.interfaces.queue import Queue


class Kubernetes(Cluster):
    """Runs each host of a job as a pod. Its pods are started by Kubernetes, and find each other by their names."""

    class Options(KubernetesOptions):
        """The keys of ``cluster.options``."""

    options: Options

    def command(self, node: int, job: HostedJob) -> Sequence[str]:
        """Refuse a job whose hosts are named: pods have no address before they run.

        Raises:
            UsageError: always.
        """
        raise UsageError(
            "cluster.name: kubernetes starts pods, which have no address before they run; leave out --ips, and give "
            "the job to the cluster with `mtrain submit --cluster kubernetes --nnodes N`"
        )

    def queue(self) -> "Queue":
        """Return the queue of this cluster: the API server that kubeconfig names."""
        from mtrain_clusters._kubernetes.queue import KubernetesQueue

        return KubernetesQueue(self.options)
