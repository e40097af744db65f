"""Finish an ONNX file that an exporter wrote: suppression of boxes inside the graph, and mtrain's metadata."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import mtrain
from mtrain.deploy.export.request import ExportRequest
from mtrain.deploy.export.suppression import add_suppression, settings_of
from mtrain.deploy.exported.metadata import KEY, Input, Metadata
from mtrain.errors import SpecError
from mtrain.spec.disclosure import needed_to_evaluate, shared_options, shortened
from mtrain.spec.references import is_reference

if TYPE_CHECKING:
    from mtrain.spec.config import Loaded


def finish(
    path: Path, *, request: ExportRequest, facts: Mapping[str, Any], loaded: "Loaded", weights: Path
) -> Metadata:
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
    if is_reference(loaded.spec.model.name):
        _drop_unused_inputs(graph, name=shortened(loaded.spec.model.name))
        _name_batch_axis(graph, [given["name"] for given in facts["inputs"] if given["batched"]])
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
    request: ExportRequest,
    facts: Mapping[str, Any],
    loaded: "Loaded",
    weights: Path,
    suppression: Mapping[str, Any],
) -> Metadata:
    spec = loaded.spec
    task = loaded.job.task_named(facts["kind"])
    shapes = {given.name: _shape(given) for given in graph.graph.input}
    inputs = [
        Input(
            name=given.name or given.key,
            key=given.key,
            dtype=cast("Any", given.dtype),
            shape=_named(shapes[given.name or given.key], dynamic_size=request.dynamic_size and given.layout == "HWC"),
            layout=f"N{given.layout}" if given.layout else "",
        )
        for given in task.inputs(spec)
    ] or [
        Input(name=given["name"], key=given["name"], dtype=given["dtype"], shape=shapes[given["name"]], layout="")
        for given in facts["inputs"]
        if given["name"] in shapes
    ]
    dynamic = [*(["batch"] if request.batch is None else []), *(["size"] if request.dynamic_size else [])]
    return Metadata(
        mtrain=mtrain.__version__,
        kind=facts["kind"],
        model=shortened(spec.model.name),
        options=shared_options(facts["options"], spec.model.name),
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
        weights=weights.name,
        weights_sha256=facts["weights_sha256"],
        spec={} if is_reference(spec.model.name) else needed_to_evaluate(spec),
    )


def _drop_unused_inputs(model: Any, *, name: str) -> None:
    """Remove the inputs that no node reads: a batch of a user's own data holds targets too, which predictions do not use.

    Raises:
        SpecError: No input is left.
    """
    read = set(_names_read(model.graph)) | {output.name for output in model.graph.output}
    kept = [given for given in model.graph.input if given.name in read]
    if not kept:
        raise SpecError(f"{name}: its predictions depend on no array of a batch, so there is nothing to export")
    del model.graph.input[:]
    model.graph.input.extend(kept)


def _name_batch_axis(model: Any, batched: Sequence[str]) -> None:
    """Name the axis of samples ``batch`` where the exporter has given it a symbol of its own."""
    values = [*model.graph.input, *model.graph.output, *model.graph.value_info]
    symbols = {value.type.tensor_type.shape.dim[0].dim_param for value in model.graph.input if value.name in batched}
    for value in values:
        for axis in value.type.tensor_type.shape.dim:
            if axis.dim_param and axis.dim_param in symbols:
                axis.dim_param = "batch"


def _names_read(graph: Any) -> Iterator[str]:
    """Yield the names of the values that the nodes of a graph read, also inside its loops and branches."""
    for node in graph.node:
        yield from node.input
        for attribute in node.attribute:
            for inner in [attribute.g, *attribute.graphs]:
                yield from _names_read(inner)
                yield from (output.name for output in inner.output)


def _shape(value: Any) -> tuple[int | str, ...]:
    return tuple(axis.dim_param or axis.dim_value for axis in value.type.tensor_type.shape.dim)


def _named(shape: tuple[int | str, ...], *, dynamic_size: bool) -> tuple[int | str, ...]:
    """Return the shape with plain names for its free axes; the exporter writes such as ``32*height``."""
    names = ("batch", "height", "width") if dynamic_size else ("batch",)
    return tuple(names[i] if isinstance(size, str) and i < len(names) else size for i, size in enumerate(shape))
