"""``mtrain quantise``: write an exported model whose layers compute with 8-bit integers."""

import logging
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mtrain.commands.options import JobCommand, named_run, run_argument, take_request, values_and_output
from mtrain.errors import CheckpointError, UsageError
from mtrain.spec import remedies, terminal
from mtrain.spec.request import SpecRequest
from mtrain_deploy.quantising import Method

if TYPE_CHECKING:
    from mtrain_deploy.exported.metadata import Metadata
    from mtrain_deploy.exporting.job import Exported

MIB = 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class QuantiseRequest:
    """A request: the model to quantise, and the way."""

    weights: str | None = None
    """An exported model; None: the run is exported first."""
    run: str | None = None
    """A run folder, whose best checkpoint is exported; None: ``runs/latest`` if there are no ``weights``."""
    spec: SpecRequest = field(default_factory=SpecRequest)
    """The spec whose data calibrate; none named: that of the run, or the one in the exported model, which has no paths."""
    out: Path | None = None
    """File to write; None: the name of the exported model, or of the run, with ``-int8`` added, in the current folder."""
    samples: int = 64
    """Number of images of the training split from which ranges are measured."""
    seed: int = 0
    """Seed of their draw."""
    method: Method = "minmax"
    """How a range follows from values: the extremes, or without the largest 0.001 %."""
    force: bool = False
    """Replace a file that exists."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Quantised:
    """The result."""

    code: int
    """Exit code; nothing was written where it is not 0."""
    path: Path | None = None
    layers: int = 0
    """Layers that compute with 8 bits."""
    float_layers: int = 0
    """Last layers, which stay in float."""
    trained: int = 0
    """Tensors whose range comes from ``train.quantise``."""
    measured: int = 0
    """Images from which the other ranges were measured."""


@click.command("quantise", cls=JobCommand, examples=(("mtrain quantise runs/digits", "digits-int8.onnx"),))
@click.option("--weights", metavar="FILE", help="An ONNX file that `mtrain export` wrote.")
@run_argument
@click.option("--run", metavar="FOLDER", help="As RUN.")
@click.option(
    "-c",
    "--config",
    metavar="SPEC",
    help="The spec whose training split calibrates. Default: that of the model.",
)
@click.option(
    "--opt", "--override", "-o", "overrides", multiple=True, metavar="PATH=VALUE ...", help="Set values of it."
)
@click.option("--out", "--output", "out", metavar="FILE", help="File to write; `-o FILE` too. Default: NAME-int8.onnx.")
@click.option("--force", is_flag=True, help="Replace FILE.")
@click.option(
    "--samples", type=click.IntRange(1, 100_000), default=64, show_default=True, help="Images that calibrate."
)
@click.option("--seed", type=click.IntRange(0, 2**31 - 1), default=0, show_default=True, help="Of their draw.")
@click.option(
    "--method",
    type=click.Choice(["minmax", "percentile"]),
    default="minmax",
    show_default=True,
    help="Ranges: the extremes of all values, or without the largest 0.001 % of them.",
)
@click.pass_context
def quantise(context: click.Context, /, **params: Any) -> None:
    """Quantise weights and activations to 8 bits, with ranges that training found or that images calibrate.

    RUN is a run folder, whose best checkpoint is exported. Default: runs/latest.
    """
    params["overrides"], out = values_and_output(params["overrides"], params["out"])
    request = take_request(QuantiseRequest, params, run=named_run(params), out=None if out is None else Path(out))
    result = quantise_model(request)
    if result.path is not None:
        terminal.say(f"written: {result.path} ({result.path.stat().st_size / MIB:.1f} MiB)")
        terminal.say(f"layers: {result.layers} with 8 bits, {result.float_layers} last ones in float")
        terminal.say(f"ranges: {result.trained} trained, the others measured on {result.measured} images")
    context.exit(result.code)


def quantise_model(request: QuantiseRequest) -> Quantised:
    """Write an exported model with 8-bit weights and activations.

    Raises:
        UsageError: There is no such model, it is quantised already or of half precision, its data cannot be read, or a
            package is missing.
    """
    from mtrain.core.checkpoint import store

    with store.holding():
        return _quantise(request)


def _quantise(request: QuantiseRequest) -> Quantised:
    from mtrain.jobs.exported import carried_spec
    from mtrain.jobs.resume import compare
    from mtrain.system import plugin_packages
    from mtrain_deploy.exported.model import read_metadata
    from mtrain_deploy.exporting.job import config_of
    from mtrain_deploy.quantising import calibration
    from mtrain_deploy.quantising.writing import write_quantised

    remedies.require(("onnx", "onnxruntime"), what="quantise", extra="mtrain-deploy")
    if request.weights is not None and request.run is not None:
        raise UsageError(f"--weights {request.weights} and --run {request.run} are both given; keep one")
    out = _target(request)
    with _scratch() as folder:
        source, config = None if request.weights is None else Path(request.weights), request.spec.config
        if source is None:
            if config is not None:
                compare.say(request.spec.read(config), Path(request.run or "runs/latest"))
            exported = _export_first(request, folder)
            if exported.code != 0:
                return Quantised(code=exported.code)
            source = exported.files[0]
            config = config or config_of(request.run)
        metadata = read_metadata(source)
        _check_model(request.weights or str(request.run), metadata)
        config = carried_spec(metadata.spec, name=str(source)) if config is None else config
        job = request.spec.read(config).job
        plugin_packages.check(job)
        batches = calibration.samples(job, metadata, count=request.samples, seed=request.seed)
        feeds = list(calibration.feeds(batches, metadata))
        try:
            counts = write_quantised(source, metadata, feeds, method=request.method, out=out, folder=folder)
        except OSError as error:
            raise UsageError(f"-o {out}: cannot be written: {error.strerror or error}") from error
    return Quantised(code=0, path=out, measured=len(feeds), **counts)


def _target(request: QuantiseRequest) -> Path:
    """Return the file to write.

    Raises:
        UsageError: It cannot or should not be written.
    """
    from mtrain.jobs.exported import SUFFIX
    from mtrain_deploy.exporting.request import refuse_target

    name = Path(request.weights).stem if request.weights else Path(request.run or "runs/latest").resolve().name
    out = request.out or Path(f"{name}-int8{SUFFIX}")
    refuse_target(out, [out], suffix=SUFFIX, writer="quantise", force=request.force)
    return out


@contextmanager
def _scratch() -> Iterator[Path]:
    """Make a folder for intermediate files, silence the quantiser's advice meanwhile, and remove the folder."""
    root = logging.getLogger()
    level = root.level
    # ONNX Runtime's quantiser logs advice to the root logger, which is not for the user of this command.
    root.setLevel(logging.ERROR)
    try:
        with tempfile.TemporaryDirectory(prefix="mtrain-quantise-") as folder:
            yield Path(folder)
    finally:
        root.setLevel(level)


def _export_first(request: QuantiseRequest, folder: Path) -> "Exported":
    from mtrain_deploy.exporting.job import export_weights
    from mtrain_deploy.exporting.request import ExportRequest

    return export_weights(
        ExportRequest(spec=replace(request.spec, config=None), run=request.run, out=folder / "float.onnx")
    )


def _check_model(name: str, metadata: "Metadata") -> None:
    """Refuse a model that cannot be quantised.

    Raises:
        CheckpointError: It has 8 bits already, or half precision.
    """
    if metadata.precision == "int8":
        raise CheckpointError(f"{name}: is quantised already; give the file that it was made of")
    if metadata.precision != "fp32":
        raise CheckpointError(f"{name}: has precision {metadata.precision}; export it again with --precision fp32")
