"""Start nothing, but print the command for each host, for a person or a scheduler to run there."""

from collections.abc import Sequence
from typing import ClassVar

from mtrain.core.interfaces import Cluster, HostedJob, PluginOptions
from mtrain.system.placement import line_for


class Manual(Cluster):
    """Plans the command that was typed here for every host, each with its own ``--node-rank``."""

    class Options(PluginOptions):
        """No options."""

    starts: ClassVar[bool] = False

    options: Options

    def command(self, node: int, job: HostedJob) -> Sequence[str]:
        """Return the line to type on host number ``node``.

        It states that number, although the host could find it by its address.
        """
        return line_for(job.line, node, cluster=job.cluster)
