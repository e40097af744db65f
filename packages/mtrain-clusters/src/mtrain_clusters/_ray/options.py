"""The options of the cluster ``ray``."""

from typing import Annotated

from pydantic import Field

from mtrain.spec.section import PluginOptions

Amount = Annotated[float, Field(gt=0)]


class RayOptions(PluginOptions):
    """The keys of ``cluster.options`` for the cluster ``ray``."""

    address: str = Field(
        default="auto", description="HOST:PORT of the cluster, or ray://HOST:PORT; auto: RAY_ADDRESS, or the one here"
    )
    cpus: float = Field(default=1, ge=0, description="CPUs to reserve on each node, as Ray counts them")
    gpus: Annotated[int, Field(ge=0)] | None = Field(
        default=None, description="GPUs to reserve on each node; null: as many as the nodes have"
    )
    resources: dict[str, Amount] = Field(
        default_factory=dict, description="further resources of each node, by the names that Ray has for them"
    )
    python: str | None = Field(
        default=None,
        description="interpreter on the nodes that has mtrain; null: the path of the one that runs mtrain here",
    )
