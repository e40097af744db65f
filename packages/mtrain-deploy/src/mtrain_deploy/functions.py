"""Other forms of a trained model, from Python: what ``mtrain export``, ``mtrain quantise`` and ``mtrain prune`` do.

Weights are named as for ``mtrain.predict``: a run with its best checkpoint, a checkpoint, or a file.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from mtrain.commands import functions as api
from mtrain.commands import python_calls
from mtrain.spec.calls import explain_calls


@explain_calls
def export(  # noqa: PLR0913  # what the command takes
    run: python_calls.File = None,
    *,
    out: python_calls.File = None,
    checkpoint: python_calls.File = None,
    weights: python_calls.File = None,
    spec: python_calls.SpecSource = None,
    overrides: Mapping[str, Any] | None = None,
    format: Literal["onnx", "torch", "paddle", "safetensors"] = "onnx",
    form: Literal["raw", "decoded", "nms", "nms-fixed"] = "decoded",
    layout: Literal["nhwc", "nchw"] = "nhwc",
    input: Literal["uint8", "float"] = "uint8",
    batch: int | None = None,
    dynamic_size: bool = False,
    precision: Literal["fp32", "fp16"] = "fp32",
    force: bool = False,
) -> list[Path]:
    """Write trained weights as a program for inference; return the files.

    Args:
        run: a run folder: its spec and its best checkpoint; None: ``runs/latest``.
        out: the file to write; None: the name of the run, in the current folder.
        checkpoint: a checkpoint in place of the run's best.
        weights: a file of weights in place of a checkpoint; it needs ``spec`` or ``run``, and ``data.names``.
        spec: see ``mtrain.commands.functions``; None: the run's own.
        overrides: further values of the spec.
        format: an ONNX graph, a program of ``torch.export``, one of Paddle, or the weights alone.
        form: outputs as the last layers give them, as evaluation reads them, or detections after suppression.
        layout: axes of the images that the program takes, channels last or first.
        input: their pixels, 0 to 255 as uint8 or 0 to 1 as float32.
        batch: samples in a batch; None: any number.
        dynamic_size: whether images of any size are taken that the model can take.
        precision: of weights and arithmetic.
        force: whether files that exist are replaced.

    Raises:
        UsageError: there are no weights, they do not fit the spec, or the model cannot be written in this form.
        JobFailed: the rank that writes the program failed.
    """
    from mtrain_deploy.exporting.job import export_weights
    from mtrain_deploy.exporting.request import ExportRequest

    python_calls.need_main_thread("export")
    result = export_weights(python_calls.request_of(ExportRequest, locals()))
    if result.code != 0:
        raise api.JobFailed("export", exit_code=result.code, run_dir=None)
    return list(result.files)


@explain_calls
def quantise(  # noqa: PLR0913  # what the command takes
    run: python_calls.File = None,
    *,
    out: python_calls.File = None,
    weights: python_calls.File = None,
    spec: python_calls.SpecSource = None,
    overrides: Mapping[str, Any] | None = None,
    samples: int = 64,
    seed: int = 0,
    method: Literal["minmax", "percentile"] = "minmax",
    force: bool = False,
) -> Path:
    """Write a model with 8-bit weights and activations as an ONNX file; return its path.

    Args:
        run: a run folder, whose best checkpoint is exported first; None: ``runs/latest`` if there are no ``weights``.
        out: the file to write; None: the name of the run or of the file, with ``-int8`` added, in the current folder.
        weights: an ONNX file that ``export`` wrote.
        spec: the spec whose training images calibrate; None: that of the model.
        overrides: further values of the spec.
        samples: number of images from which ranges are measured.
        seed: seed of their draw.
        method: how a range follows from values: the extremes, or without the largest 0.001 %.
        force: whether a file that exists is replaced.

    Raises:
        UsageError: there is no such model, it is quantised already, or its data cannot be read.
        JobFailed: the run could not be exported.
    """
    from mtrain_deploy.commands.quantise import QuantiseRequest, quantise_model

    python_calls.need_main_thread("quantise")
    result = quantise_model(python_calls.request_of(QuantiseRequest, locals()))
    if result.code != 0 or result.path is None:
        raise api.JobFailed("quantise", exit_code=result.code, run_dir=None)
    return result.path


@explain_calls
def prune(  # noqa: PLR0913  # what the command takes
    run: python_calls.File = None,
    *,
    target: float,
    out: str | Path,
    checkpoint: python_calls.File = None,
    weights: python_calls.File = None,
    spec: python_calls.SpecSource = None,
    overrides: Mapping[str, Any] | None = None,
    by: Literal["l1", "bn", "taylor"] = "l1",
) -> dict[str, Any]:
    """Write a smaller network: a folder with its spec, its weights and a report; return the report.

    Args:
        run: a run folder: its spec and its best checkpoint; this, ``checkpoint`` or ``weights`` must be given.
        target: share of the FLOPs that is to be left at most, above 0 and up to 1.
        out: the folder to write.
        checkpoint: a checkpoint in place of the run's best.
        weights: a file of weights in place of a checkpoint.
        spec: see ``mtrain.commands.functions``; None: the run's own.
        overrides: further values of the spec.
        by: what channels are chosen by: the L1 norm of their weights, the scale of their BatchNorm, or a Taylor estimate.

    Raises:
        UsageError: there are no weights, the target cannot be reached, or the folder cannot be written.
        JobFailed: the rank that prunes failed.
    """
    from mtrain_deploy.commands.prune import PruneRequest, prune_network

    python_calls.need_main_thread("prune")
    result = prune_network(python_calls.request_of(PruneRequest, locals()))
    if result.code != 0:
        raise api.JobFailed("prune", exit_code=result.code, run_dir=None)
    return dict(result.report)
