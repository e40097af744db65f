"""``mtrain predict``: apply trained weights to images or texts, on one rank; write the results as JSON and as drawings."""

import json
import shlex
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mtrain.commands.options import JobCommand, spec_options, take_request
from mtrain.errors import DataError, MtrainError, UsageError
from mtrain.spec import terminal
from mtrain.spec.request import SpecRequest

if TYPE_CHECKING:
    from mtrain.spec.config import Loaded, Source

SHOWN = 3
"""Number of continued texts that are printed."""
WORK_FOLDER = ".run"
"""Subfolder of the results in which the rank works; removed when it has succeeded."""
PREDICTIONS = "predictions.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class PredictRequest:
    """A request for predictions: the images, the weights and the form of the results."""

    sources: Sequence[str]
    """Image files and folders of images."""
    spec: SpecRequest = field(default_factory=SpecRequest)
    """The spec; none named: that of the run."""
    run: str | None = None
    """A run folder: its spec and its best checkpoint; None: ``runs/latest``."""
    checkpoint: str | None = None
    weights: str | None = None
    """A file of weights in place of a checkpoint."""
    out: str = "predictions"
    confidence: float = 0.25
    """Lowest score that is kept, from 0 to 1."""
    draw: bool = True
    strict: bool = False
    """Whether an image that cannot be read is an error; otherwise it is skipped."""
    device: str = "auto"


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """The results of a request."""

    code: int
    """Exit code of the rank; nothing was written where it is not 0."""
    out: Path
    predictions: Sequence[Mapping[str, Any]] = ()
    """Content of ``predictions.json``; its form depends on the task."""
    images: int = 0
    """Number of images that were predicted on."""
    skipped: Sequence[Mapping[str, str]] = ()
    """``file_name`` and ``reason`` of each image that could not be read."""

    @property
    def texts(self) -> list[str]:
        """Return the texts that a language model has continued, each with its continuation; none for images."""
        return [f"{entry['prompt']}{entry['text']}" for entry in self.predictions if "text" in entry]


@click.command(
    "predict",
    cls=JobCommand,
    examples=(
        ("mtrain predict runs/digits photos/", "the best checkpoint of a run on a folder of images"),
        ("mtrain predict a.jpg --weights digits.onnx", "an exported model; no framework is needed"),
    ),
)
@spec_options
@click.argument("sources", nargs=-1, required=True, metavar="[RUN] FILE|FOLDER ...")
@click.option("--run", metavar="FOLDER", help="A run folder: its spec and its best checkpoint. Default: runs/latest.")
@click.option("--checkpoint", metavar="PATH", help="A checkpoint instead of the run's best.")
@click.option(
    "--weights", metavar="FILE", help="An exported .onnx; or a file of weights, which needs -c or --run, and data.names.",
)  # fmt: skip
@click.option(
    "--out", "--output", "out", metavar="FOLDER", default="predictions", show_default=True,
    help="Where results are written.",
)  # fmt: skip
@click.option(
    "--confidence", type=click.FloatRange(0, 1, max_open=True), default=0.25, show_default=True, help="Lowest score kept.",
)  # fmt: skip
@click.option("--draw/--no-draw", default=True, help="Also write the images with what was found.")
@click.option("--strict", is_flag=True, help="Stop at an image that cannot be read. Default: skip it with a warning.")
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", help="Where the model runs.")
@click.pass_context
def predict(context: click.Context, /, **params: Any) -> None:
    """Find objects in images, or their classes, or continue texts, with the averaged weights of a checkpoint."""
    first, *others = params["sources"]
    if others and params["run"] is None and _is_run(first):
        params |= {"run": first, "sources": others}
    request = take_request(PredictRequest, params)
    result = predict_on(request)
    # Imported after what may refuse the command line: they bring the data's libraries.
    from mtrain.data.reading import listed
    from mtrain.rank.spec.predict import SKIPPED

    if result.skipped:
        names = listed([f"{entry['file_name']}: {entry['reason']}" for entry in result.skipped])
        head = f"warning: skipped {len(result.skipped)} images that cannot be read (--strict stops there)"
        terminal.say(f"{head}:\n{names}", err=True)
    if result.code == 0:
        total = result.images + len(result.skipped)
        left_out = f" ({len(result.skipped)} of {total} skipped)" if result.skipped else ""
        if result.texts:
            terminal.say(f"{len(result.texts)} texts{left_out} continued")
            for text in result.texts[:SHOWN]:
                terminal.say(text)
        else:
            count = f"{len(result.predictions)} predictions with a score >= {request.confidence:g}"
            terminal.say(f"{result.images} images{left_out}: {count}")
        terminal.say(f"found:     {result.out / PREDICTIONS}")
        if result.skipped:
            terminal.say(f"skipped:   {result.out / SKIPPED}")
        if request.draw and not result.texts:
            terminal.say(f"images:    {result.out}")
    context.exit(result.code)


def _is_run(source: str) -> bool:
    from mtrain.system.runfolder import RunFolder

    return RunFolder(Path(source)).metrics.is_file()


def _refuse_run_alone(request: PredictRequest) -> None:
    """Refuse a run folder as the only source: the run was meant to be ``run``, and the images are missing."""
    run, *others = request.sources
    if not others and _is_run(run):
        raise UsageError(
            f"{run} is a run folder, and images are missing; give both: mtrain predict {shlex.quote(run)} IMAGES..."
        )


def predict_on(request: PredictRequest) -> Prediction:
    """Predict on images with the averaged weights of a checkpoint, or with a file of weights.

    Raises:
        CheckpointError: there are no weights to use.
        DataError: no image was given, or none can be read.
        UsageError: the spec or the output folder is wrong, or a run folder is given instead of images.
    """
    from mtrain.core.checkpoint import store

    _refuse_run_alone(request)
    with store.holding():
        return _predict(request)


def _predict(request: PredictRequest) -> Prediction:
    from mtrain.core.record_files import write_json
    from mtrain.jobs import exported
    from mtrain.jobs.hosts.this_host import run_job
    from mtrain.jobs.resume import compare, find, load
    from mtrain.jobs.resume.fetch import TrainedWeights
    from mtrain.weights.own import refuse_own
    from mtrain.weights.reading import asked_or_said

    files = list_images(request.sources)
    named = TrainedWeights(run=request.run, checkpoint=request.checkpoint, weights=request.weights).fetch()
    request = replace(request, run=named.run, checkpoint=named.checkpoint, weights=named.weights)
    weights = find.find_weights("predict", run=named.run, checkpoint=named.checkpoint, weights=named.weights)
    refuse_own(weights, "predict: draws on images with the networks of model plugins")
    if exported.is_exported(weights):
        return _with_exported(request, files, weights)
    config = request.spec.config
    if config is None:
        config = load.find_spec(None, request.run if request.weights else str(weights))
    config = exported.config_of(config, request.weights)
    loaded = _on_one_rank(config, request)
    if request.spec.config is not None:
        compare.say(request.spec.read(config), weights)
    class_names = [] if weights.is_dir() else asked_or_said(weights, loaded.spec.data.names)
    content = {
        "images": {str(file): name for file, name in files.items()},
        "out": str(Path(request.out).absolute()),
        "confidence": request.confidence,
        "draw": request.draw,
        "class_names": class_names,
        "strict": request.strict,
    }

    def run_rank(folder: Path) -> int:
        write_json(folder / "predict.json", content)
        return run_job(loaded, folder, weights, mode="predict", quiet=True).code

    return _write(run_rank, out=Path(request.out), count=len(files))


def _with_exported(request: PredictRequest, files: Mapping[Path, str], weights: Path) -> Prediction:
    """Predict with an exported model in this process."""
    from mtrain.jobs import exported

    reader = exported.reader_of(weights)
    config = exported.config_of(request.spec.config, str(weights))
    loaded = request.spec.read(config, {"model.weights": None})
    out = Path(request.out)

    def run_here(folder: Path) -> int:
        try:
            reader.predict(loaded, weights, files=files, out=out, request=request)
        finally:
            shutil.rmtree(folder, ignore_errors=True)  # no rank has left a log there
        return 0

    return _write(run_here, out=out, count=len(files))


def _write(run: Callable[[Path], int], *, out: Path, count: int) -> Prediction:
    """Let ``run`` predict on ``count`` images, and read its results from ``out``.

    ``run`` receives an empty folder to work in and returns an exit code. The folder stays if that is not 0: the message
    names the logs in it, and the next prediction clears it.
    """
    from mtrain.rank.spec.predict import SKIPPED

    folder = _empty_folder(out / WORK_FOLDER)
    (out / SKIPPED).unlink(missing_ok=True)  # an earlier prediction's
    try:
        code = run(folder)
    except MtrainError:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    if code != 0:
        return Prediction(code=code, out=out)
    shutil.rmtree(folder, ignore_errors=True)
    skipped = _read(out / SKIPPED)
    return Prediction(
        code=code, out=out, predictions=_read(out / PREDICTIONS), images=count - len(skipped), skipped=skipped
    )


def list_images(sources: Sequence[str]) -> dict[Path, str]:
    """List the image files that were named, those of folders included, each once, with its name in the results.

    A file keeps the name by which it was given. An image of a folder is named by its path in that folder where it is
    the only source, so that results do not depend on where the folder lies; with several sources the source stands in
    front.

    Raises:
        DataError: a name is neither a file nor a folder, or a folder holds no image; all of them are named.
    """
    from mtrain.data.reading import images_in, listed

    names: dict[Path, str] = {}
    problems = []
    for source in map(Path, sources):
        files = images_in(source) if source.is_dir() else [source] if source.is_file() else []
        is_only_source = source.is_dir() and len(sources) == 1
        for file in files:
            names.setdefault(file.absolute(), (file.relative_to(source) if is_only_source else file).as_posix())
        if not files:
            problems.append(f"{source}: " + ("holds no image" if source.is_dir() else "no such file or folder"))
    if problems:
        raise DataError(f"predict: {len(problems)} of {len(sources)} sources give no image:\n{listed(problems)}")
    return names


def _on_one_rank(config: "Source", request: PredictRequest) -> "Loaded":
    """Load the spec of a run for one process without hosts, on the framework that the run was trained with.

    That framework is installed where the run was made; the other one need not be.
    """
    from mtrain.jobs.plan.solo import one_process

    read = request.spec.read
    framework = read(config).job.backend.framework
    # One image at a time, and no gradients that would be added up.
    overrides = one_process(framework, device=request.device) | {"train.batch_size": 1, "train.accumulate": 1}
    loaded = read(config, overrides)
    if "confidence" not in loaded.job.model_class.Options.model_fields:
        return loaded
    # A model that selects predictions itself must know the lowest score.
    return read(config, {**overrides, "model.options.confidence": request.confidence})


def _empty_folder(folder: Path) -> Path:
    """Create ``folder``, or empty it; return it.

    Raises:
        UsageError: it cannot be created, or another prediction is running there.
    """
    from mtrain.system import runfolder

    try:
        # Taken first: another prediction into the same folder would lose the request that its rank is about to read.
        if folder.is_dir():
            with runfolder.take_folder(runfolder.RunFolder(folder)):
                shutil.rmtree(folder)
        folder.mkdir(mode=0o700, parents=True)
    except OSError as error:
        raise UsageError(f"--out {folder.parent}: cannot be written: {error.strerror or error}") from error
    return folder


def _read(file: Path) -> list[Any]:
    """Read the list in a JSON file; return an empty one where there is no file."""
    entries: list[Any] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else []
    return entries
