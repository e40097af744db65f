"""Finish an ONNX file that an exporter wrote: suppression of boxes inside the graph, and mtrain's metadata."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mtrain
from mtrain.errors import SpecError
from mtrain.spec.disclosure import needed_to_evaluate, shared_options, shorten
from mtrain.spec.references import is_reference
from mtrain_deploy.exported.metadata import KEY, SUPPRESSED, Input, Metadata
from mtrain_deploy.exporting.request import ExportRequest
from mtrain_deploy.exporting.suppression import add_suppression, settings_of

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
        _drop_unused_inputs(graph, name=shorten(loaded.spec.model.name))
    _name_axes(graph, facts["inputs"])
    suppression: dict[str, Any] = {}
    if request.form in SUPPRESSED:
        suppression = settings_of(facts, request.suppression)
        add_suppression(graph, suppression, fixed=request.form == "nms-fixed")
    metadata = _metadata(graph, request=request, facts=facts, loaded=loaded, weights=weights, suppression=suppression)
    write_metadata(graph, metadata)
    _write_entries(graph, metadata.yolo_entries(size_step=loaded.job.model.size_step))
    graph.producer_name, graph.producer_version = "mtrain", mtrain.__version__
    onnx.save(graph, str(path))
    return metadata


def write_metadata(graph: Any, metadata: Metadata) -> None:
    """Put the metadata into an ``onnx.ModelProto``, in place of what is there under its name."""
    _write_entries(graph, {KEY: metadata.text()})


def _write_entries(graph: Any, entries: Mapping[str, str]) -> None:
    """Add entries to the metadata of an ``onnx.ModelProto``; one with the same name is replaced."""
    kept = {entry.key: entry.value for entry in graph.metadata_props if entry.key not in entries}
    del graph.metadata_props[:]
    for key, value in {**kept, **entries}.items():
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
            name=given["name"],
            key=given["key"] if given["layout"] else given["name"],
            dtype=given["dtype"],
            shape=shapes[given["name"]],
            layout=f"N{given['layout']}" if given["layout"] else "",
        )
        for given in facts["inputs"]
        if given["name"] in shapes
    ]
    dynamic = [*(["batch"] if request.batch is None else []), *(["size"] if request.dynamic_size else [])]
    return Metadata(
        mtrain=mtrain.__version__,
        kind=facts["kind"],
        model=shorten(spec.model.name),
        options=shared_options(facts["options"], spec.model.name),
        class_names=tuple(facts["class_names"]),
        category_ids=tuple(facts["category_ids"]),
        image_size=facts["image_size"],
        details=facts["details"],
        inputs=tuple(inputs),
        preprocessing=task.preprocessing(spec),
        outputs={given.name: _shape(given) for given in graph.graph.output},
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
    # Fields of protobuf cannot be assigned, only emptied and filled.
    del model.graph.input[:]
    model.graph.input.extend(kept)


def _name_axes(model: Any, inputs: Sequence[Mapping[str, Any]]) -> None:
    """Name the axes of any size ``batch``, ``height`` and ``width``, in place of the exporter's symbols.

    A size that follows from these, such as the number of boxes, is called by its output and its axis: ``decoded_1``.
    """
    plain: dict[str, str] = {}
    axes_of = {given["name"]: given["axes"] for given in inputs}
    for value in model.graph.input:
        for number, name in axes_of.get(value.name, {}).items():
            if symbol := value.type.tensor_type.shape.dim[int(number)].dim_param:
                plain[symbol] = name
    for value in [*model.graph.input, *model.graph.output]:
        for number, axis in enumerate(value.type.tensor_type.shape.dim):
            if axis.dim_param:
                axis.dim_param = plain.get(axis.dim_param, f"{value.name}_{number}")
    # What is known of values inside the graph is in the exporter's symbols; whoever reads the file derives it again.
    fixed = [value for value in model.graph.value_info if not _symbols(value)]
    del model.graph.value_info[:]
    model.graph.value_info.extend(fixed)


def _symbols(value: Any) -> list[str]:
    return [axis.dim_param for axis in value.type.tensor_type.shape.dim if axis.dim_param]


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
