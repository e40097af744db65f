"""The section ``parallel`` of a spec: how the ranks of a job are laid out as a mesh."""

from typing import Annotated

from pydantic import AfterValidator, Field

from mtrain.spec.section import Positive, Section

SPLITS = ("colwise", "rowwise", "colwise_gather_output", "rowwise_split_input", "embedding_rowwise", "grad_allreduce")
"""Ways in which the ranks of a tensor group share a layer."""


def _is_split(text: str) -> str:
    if text not in SPLITS:
        raise ValueError(f"given {text!r}, expected {', '.join(SPLITS[:-1])} or {SPLITS[-1]}")
    return text


Split = Annotated[str, AfterValidator(_is_split)]


class ParallelSpec(Section):
    """The mesh of ranks: replicate x shard x tensor x pipeline. Ranks with consecutive numbers are of one tensor group."""

    replicate: Positive = Field(default=1, description="groups of ranks that each hold the whole model (HSDP)")
    shard: Positive | None = Field(
        default=None, description="ranks among which a group splits every array; null: all ranks that remain"
    )
    tensor: Positive = Field(default=1, description="ranks that share every layer (tensor parallelism)")
    sequence: bool = Field(
        default=False, description="a tensor group shares the texts between those layers (sequence parallelism)"
    )
    pipeline: Positive = Field(default=1, description="stages, each with a part of the layers")
    plan: dict[str, Split] = Field(
        default_factory=dict,
        description="how layers are shared, such as {'layers.*.mlp.up_proj': colwise}; empty: the model's own plan",
    )

    @property
    def is_given(self) -> bool:
        """Whether anything is asked for that the ranks' backend does not do anyway."""
        return self != ParallelSpec()
