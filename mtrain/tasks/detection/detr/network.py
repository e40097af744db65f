"""Let a detector of transformers be called as the trainer calls every model: with a batch of the detection task."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mtrain.core import ops
from mtrain.core.interfaces import Published

SHOWN = ("vfl", "bbox", "giou", "fgl", "ddf")
"""Losses of the last decoder layer that are reported, as transformers names them after ``loss_``."""


def adapt(module: Any) -> Any:
    """Replace the ``forward`` of a module, in place, by one that takes the batches of ``DetectionSource``.

    In training mode it returns transformers' loss and its parts, in evaluation mode ``boxes`` (B, Q, 4), corners as shares
    of the image, and ``scores`` (B, Q, C). Called in any other way it does what it did before. Names of parameters stay.
    """
    own_forward = module.forward

    def forward(*arguments: Any, **keywords: Any) -> Any:
        batch = arguments[0] if len(arguments) == 1 and not keywords else None
        if not isinstance(batch, Mapping):
            return own_forward(*arguments, **keywords)
        dtype = ops.dtype(next(module.parameters()))
        # Detectors of this family take colours from 0 to 1, without a mean and a deviation.
        pixels = ops.permute_dims(ops.astype(batch["images"], dtype) / 255, (0, 3, 1, 2))
        if not module.training:
            output = own_forward(pixel_values=pixels)
            return {"boxes": corners(output.pred_boxes), "scores": ops.sigmoid(output.logits)}
        output = own_forward(pixel_values=pixels, labels=labels_of(batch["targets"], pixels))
        # Backends that exchange gradients wait for one of every parameter on every rank.
        return {"total": output.loss + zero_gradients(module, batch), **parts(output.loss_dict)}

    module.forward = forward
    return module


def labels_of(targets_T6: Any, pixels: Any) -> list[dict[str, Any]]:
    """Return the objects of each image as transformers takes them: ``class_labels`` (N,), and ``boxes`` (N, 4) as
    centre and sides in shares of the image."""
    labels = []
    for image in range(pixels.shape[0]):
        rows_N6 = targets_T6[targets_T6[:, 0] == image]
        boxes_N4 = ops.astype(rows_N6[:, 2:6], ops.dtype(pixels))
        labels.append({"class_labels": ops.astype(rows_N6[:, 1], "int64"), "boxes": boxes_N4})
    return labels


def zero_gradients(module: Any, batch: Mapping[str, Any]) -> Any:
    """Return 0 with a gradient of zeros for what a micro batch without objects leaves out, so that every parameter has one."""
    table = getattr(module.model, "denoising_class_embed", None)
    return 0 if table is None or ops.shape(batch["targets"])[0] else ops.sum(table.weight) * 0


def parts(losses: Mapping[str, Any]) -> dict[str, Any]:
    """Return the losses of the last decoder layer, without gradients."""
    return {name: ops.detach(losses[f"loss_{name}"]) for name in SHOWN if f"loss_{name}" in losses}


def corners(boxes: Any) -> Any:
    """Return boxes (..., 4) as left, top, right and bottom in place of centre and sides."""
    half = boxes[..., 2:] / 2
    return ops.concat((boxes[..., :2] - half, boxes[..., :2] + half), axis=-1)


def entries(module: Any) -> dict[str, tuple[tuple[int, ...], str]]:
    """Return shape and type of each entry of a module's state; a parameter with several names has all of them."""
    state = module.state_dict().items()
    return {name: (tuple(tensor.shape), str(tensor.dtype).rpartition(".")[2]) for name, tensor in state}


def with_layers(published: Published, names: tuple[str, str]) -> Published:
    """Return ``published`` with the names that the two layers of a feed-forward block have now.

    Files call them ``fc1`` and ``fc2``; ``names`` are those of this type of model.
    """
    renamed = [(rf"(\.layers\.\d+)\.fc{number}\.", rf"\1.{name}.") for number, name in enumerate(names, 1)]
    return replace(published, renamed=(*published.renamed, *renamed))
