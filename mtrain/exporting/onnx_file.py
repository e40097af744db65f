"""Finish an ONNX file that an exporter wrote: suppression of boxes inside the graph, and mtrain's metadata."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mtrain
from mtrain.exported.metadata import KEY, Input, Metadata
from mtrain.exporting.request import Request
from mtrain.exporting.suppression import add_suppression, settings_of
from mtrain.rank.assembly import task_kind

if TYPE_CHECKING:
    from mtrain.spec.config import Loaded


def finish(path: Path, *, request: Request, facts: Mapping[str, Any], loaded: "Loaded", weights: Path) -> Metadata:
    """Complete the ONNX file at ``path`` in place; return its metadata.

    Args:
        path: The file as the framework's exporter wrote it.
        request: What was asked for.
        facts: What the rank wrote about it.
        loaded: The spec of the job.
        weights: The checkpoint or file that was exported.
    """
    import onnx

    graph = onnx.load(str(path))
    suppression: dict[str, Any] = {}
    if request.form == "nms":
        suppression = settings_of(facts, request.suppression)
        add_suppression(graph, suppression)
    metadata = _metadata(graph, request=request, facts=facts, loaded=loaded, weights=weights, suppression=suppression)
    write_metadata(graph, metadata)
    graph.producer_name, graph.producer_version = "mtrain", mtrain.__version__
    onnx.save(graph, str(path))
    return metadata


def write_metadata(graph: Any, metadata: Metadata) -> None:
    """Put the metadata into an ``onnx.ModelProto``, in place of what is there under its name."""
    kept = {entry.key: entry.value for entry in graph.metadata_props if entry.key != KEY}
    del graph.metadata_props[:]
    for key, value in {**kept, KEY: metadata.text()}.items():
        entry = graph.metadata_props.add()
        entry.key, entry.value = key, value


def _metadata(
    graph: Any,
    *,
    request: Request,
    facts: Mapping[str, Any],
    loaded: "Loaded",
    weights: Path,
    suppression: Mapping[str, Any],
) -> Metadata:
    spec = loaded.spec
    task = task_kind(spec, facts["kind"])
    shapes = {given.name: _shape(given) for given in graph.graph.input}
    inputs = [
        Input(
            name=given.name or given.key,
            key=given.key,
            dtype=given.dtype,
            shape=_named(shapes[given.name or given.key], dynamic_size=request.dynamic_size and given.layout == "HWC"),
            layout=f"N{given.layout}" if given.layout else "",
        )
        for given in task.inputs(spec)
    ]
    dynamic = [*(["batch"] if request.batch is None else []), *(["size"] if request.dynamic_size else [])]
    return Metadata(
        mtrain=mtrain.__version__,
        kind=facts["kind"],
        model=spec.model.name,
        options=facts["options"],
        class_names=tuple(facts["class_names"]),
        category_ids=tuple(facts["category_ids"]),
        image_size=facts["image_size"],
        details=facts["details"],
        inputs=tuple(inputs),
        preprocessing=task.preprocessing(spec),
        outputs={
            given.name: _shape(given) if request.form == "nms" else _named(_shape(given), dynamic_size=False)
            for given in graph.graph.output
        },
        form=request.form,
        suppression=suppression,
        dynamic=tuple(dynamic),
        size_step=facts["size_step"] or 1,
        precision=request.precision,
        ranges=facts["ranges"],
        opset=next(entry.version for entry in graph.opset_import if entry.domain in ("", "ai.onnx")),
        weights=str(weights),
        weights_sha256=facts["weights_sha256"],
        spec={**loaded.values, "plugins": None},
    )


def _shape(value: Any) -> tuple[int | str, ...]:
    return tuple(axis.dim_param or axis.dim_value for axis in value.type.tensor_type.shape.dim)


def _named(shape: tuple[int | str, ...], *, dynamic_size: bool) -> tuple[int | str, ...]:
    """Return the shape with plain names for its free axes; the exporter writes such as ``32*height``."""
    names = ("batch", "height", "width") if dynamic_size else ("batch",)
    return tuple(names[i] if isinstance(size, str) and i < len(names) else size for i, size in enumerate(shape))
