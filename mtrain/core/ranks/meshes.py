"""Derive the mesh of a job from its spec, and refuse one that its ranks or its backend cannot be."""

from collections.abc import Sequence

from mtrain.core.interfaces.recipe import Mesh, Recipe
from mtrain.errors import SpecError
from mtrain.spec.model import Spec


def mesh_of(spec: Spec, *, size: int) -> Mesh | None:
    """Return the mesh of ``size`` ranks; None: the spec asks for none.

    Raises:
        SpecError: The product of its lengths is not the number of ranks, or the job is elastic.
    """
    parallel = spec.parallel
    if not parallel.is_given:
        return None
    if spec.cluster.min_nodes is not None:
        raise SpecError(
            "cluster.min_nodes: given with parallel, but the ranks of a mesh stay the same; leave one of them out: after a lost "
            "host, --resume goes on with a smaller mesh"
        )
    if parallel.tensor == 1 and (parallel.sequence or parallel.plan):
        key = "sequence" if parallel.sequence else "plan"
        raise SpecError(
            f"parallel.{key}: given with parallel.tensor 1, where no layer is shared; give parallel.tensor=2, or leave it out"
        )
    others = parallel.replicate * parallel.tensor * parallel.pipeline
    # What the other lengths leave, so that one spec fits any number of ranks that they divide.
    shard = parallel.shard if parallel.shard is not None else size // others
    if others * shard != size:
        raise SpecError(_does_not_fit(spec, size=size))
    return Mesh(
        replicate=parallel.replicate,
        shard=shard,
        tensor=parallel.tensor,
        sequence=parallel.sequence,
        plan=dict(parallel.plan),
        pipeline=parallel.pipeline,
    )


def _does_not_fit(spec: Spec, *, size: int) -> str:
    parallel = spec.parallel
    lengths = {"replicate": parallel.replicate, "shard": parallel.shard, "tensor": parallel.tensor}
    lengths |= {"pipeline": parallel.pipeline} if parallel.pipeline > 1 else {}
    shown = " x ".join(f"{name} {length}" for name, length in lengths.items() if length is not None)
    least = parallel.replicate * parallel.tensor * parallel.pipeline
    if parallel.shard is None:
        below = size // least * least
        counts = f"{below} or {below + least}" if below else f"{least}"
        expected = f"expected a multiple of {least}: start {counts} ranks"
    else:
        expected = f"expected {least * parallel.shard}: start that many ranks (--nproc-per-node on each host)"
    return f"parallel: {shown} given for {size} rank{'s' if size > 1 else ''}, {expected}, or change the mesh"


def check_backend(spec: Spec, *, takes_meshes: bool) -> None:
    """Refuse a mesh on a backend that has none.

    Raises:
        SpecError: It is so; the message says which keys ask for a mesh, and how to leave them out of a run's spec.
    """
    if not spec.parallel.is_given or takes_meshes:
        return
    none = {"replicate": "1", "shard": "null", "tensor": "1", "sequence": "false", "pipeline": "1", "plan": "{}"}
    usual = type(spec.parallel)()
    asked = [key for key in none if getattr(spec.parallel, key) != getattr(usual, key)]
    raise SpecError(
        f"parallel: given with backend {spec.backend.name}, which lays its ranks out in one way; use --backend fsdp, or leave it out: "
        f"{' '.join(f'-o parallel.{key}={none[key]}' for key in asked)}"
    )


def check_hosts(recipe: Recipe, slots: Sequence[int]) -> None:
    """Refuse tensor groups that would lie on two hosts; ``slots``: the ranks of each host.

    Raises:
        SpecError: It is so; the message names a host's number of ranks.
    """
    tensor = 1 if recipe.mesh is None else recipe.mesh.tensor
    uneven = next((count for count in slots if count % tensor), None)
    if uneven is not None:
        raise SpecError(
            f"parallel.tensor: {tensor} given for a host of {uneven} ranks, so a tensor group would lie on two hosts, between which every "
            f"layer would wait; give each host a multiple of {tensor} ranks, or a smaller parallel.tensor"
        )
