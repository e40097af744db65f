"""What a plan says of a mesh: who is who among the ranks, and, where mtrain-language is installed, the memory of each."""

from mtrain.core.interfaces import Mesh
from mtrain.core.ranks.meshes import mesh_of
from mtrain.spec import package_parts
from mtrain.spec.config import Loaded


def rows(loaded: Loaded, *, size: int) -> dict[str, str]:
    """Return the rows of a plan that are about its mesh; none where there is none.

    Raises:
        SpecError: The model's layers cannot be shared as the spec says.
    """
    mesh = mesh_of(loaded.spec, size=size)
    if mesh is None:
        return {}
    found: dict[str, str] = {}
    if loaded.script is None and package_parts.is_installed("meshes", "plan"):
        found = package_parts.load("meshes", "plan", "parallel")(loaded, mesh, size=size)
    return {"mesh": layout_words(mesh), **(found or {"memory per rank": UNKNOWN})}


UNKNOWN = "shown for language models (model.name: hf); others tell when they start"


def layout_words(mesh: Mesh) -> str:
    """Return which ranks belong together, in words."""
    lengths = f"replicate {mesh.replicate} x shard {mesh.shard} x tensor {mesh.tensor}"
    if mesh.pipeline > 1:
        each = mesh.data_size * mesh.tensor
        stages = [f"{first}-{first + each - 1}" if each > 1 else f"{first}" for first in range(0, mesh.size, each)]
        lengths += f" x pipeline {mesh.pipeline}; stages: ranks {_list_groups(stages)}"
        if each == 1:
            return lengths
    if mesh.tensor > 1:
        groups = [f"{first}-{first + mesh.tensor - 1}" for first in range(0, mesh.size, mesh.tensor)]
        sequence = ", with texts divided too" if mesh.sequence else ""
        return f"{lengths}; tensor groups: ranks {_list_groups(groups)}{sequence}"
    groups = [f"{first}-{first + mesh.shard - 1}" for first in range(0, mesh.size, mesh.shard)]
    whole = "stages" if mesh.pipeline > 1 else "models"
    return f"{lengths}; whole {whole}: ranks {_list_groups(groups)}"


def _list_groups(groups: list[str]) -> str:
    return ", ".join(groups if len(groups) <= 4 else [*groups[:2], "...", groups[-1]])
