"""``mtrain predict``: pictures in; what is found in them, as JSON and drawn, out."""

import dataclasses
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mtrain.cli.options import JobCommand, load_job, spec_options

if TYPE_CHECKING:
    from mtrain.spec.config import Loaded

RUN = ".run"
"""In the folder of results: what the rank writes while it works."""


@click.command("predict", cls=JobCommand)
@spec_options
@click.argument("sources", nargs=-1, required=True, metavar="PICTURE|FOLDER ...")
@click.option("--run", metavar="FOLDER", help="A run folder: its spec and its best checkpoint. Default: runs/latest.")
@click.option("--checkpoint", metavar="PATH", help="A checkpoint instead of the run's best.")
@click.option("--weights", "file", metavar="FILE", help="A file of weights; needs -c or --run, and data.names.")
@click.option(
    "--out",
    "--output",
    "out",
    metavar="FOLDER",
    default="predictions",
    show_default=True,
    help="Where results are written.",
)
@click.option(
    "--confidence",
    type=click.FloatRange(0, 1, max_open=True),
    default=0.25,
    show_default=True,
    help="Lowest score kept.",
)
@click.option("--draw/--no-draw", default=True, help="Also write the pictures with what was found.")
@click.option("--strict", is_flag=True, help="Stop at a picture that cannot be read. Default: skip it with a warning.")
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", help="Where the model runs.")
@click.pass_context
def predict(context: click.Context, /, **params: Any) -> None:
    """Find objects in pictures, or their classes, with the averaged weights of a checkpoint."""
    from mtrain.cluster import start
    from mtrain.errors import CheckpointError, MtrainError
    from mtrain.rank.predict import SKIPPED
    from mtrain.report.reporter import write_json

    files = pictures(params["sources"])
    run = Path(params["run"] or "runs/latest")
    weights = Path(params["file"] or params["checkpoint"] or start.best_of(run) or run)
    if not weights.exists() or weights == run:
        absent = "no intact checkpoint in" if run.is_dir() else "no such run folder:"
        raise CheckpointError(f"predict: {absent} {run}; give --run FOLDER, --checkpoint PATH or --weights FILE")
    if params["config"] is None:
        params["config"] = start.resumed_config(None, params["run"] if params["file"] else str(weights))
    alone = _on_one_rank(params, framework=_framework(load_job(params)))
    loaded = _selecting(load_job(alone), alone)
    if not weights.is_dir() and not loaded.spec.data.names:
        raise click.UsageError(
            "--weights FILE does not say its classes; give them in label order: -o data.names=cat,dog"
        )
    out = Path(params["out"])
    folder = _fresh(out / RUN)
    (out / SKIPPED).unlink(missing_ok=True)  # an earlier prediction's
    names = loaded.spec.data.names or []
    request = {
        "pictures": {str(file): name for file, name in files.items()},
        "out": str(out.absolute()),
        "confidence": params["confidence"],
        "draw": params["draw"],
        "class_names": names,
        "strict": params["strict"],
    }
    write_json(folder / "predict.json", request)
    where = start.Where(run_dir=folder, checkpoint=weights)
    try:
        code = start.run_job(dataclasses.replace(loaded), where, mode="predict", quiet=True)
    except MtrainError:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    if code == 0:
        shutil.rmtree(folder)  # after a failure the message names its logs; the next prediction clears it
        skipped = _tell_skipped(out / SKIPPED)
        left_out = f" ({skipped} of {len(files)} skipped)" if skipped else ""
        shown = f"{_found(out)} predictions with a score >= {params['confidence']:g}"
        click.echo(f"{len(files) - skipped} pictures{left_out}: {shown}")
        click.echo(f"found:     {out / 'predictions.json'}")
        if skipped:
            click.echo(f"skipped:   {out / SKIPPED}")
        if params["draw"]:
            click.echo(f"pictures:  {out}")
    context.exit(code)


def _fresh(folder: Path) -> Path:
    """``folder``, empty.

    Raises:
        UsageError: it cannot be made, or another prediction is running there.
    """
    from mtrain.errors import UsageError
    from mtrain.system import runfolder

    try:
        if folder.is_dir():
            with runfolder.taken(runfolder.RunFolder(folder)):
                shutil.rmtree(folder)
        folder.mkdir(mode=0o700, parents=True)
    except OSError as error:
        raise UsageError(f"--out {folder.parent}: cannot be written: {error.strerror or error}") from error
    return folder


def pictures(sources: Sequence[str]) -> dict[Path, str]:
    """The picture files that were named, those of folders included, each once, and what each is called in the results.

    A file is called as it was given. A picture of a folder is called by its path in it where that folder is all that was
    given, so that results do not depend on where the folder lies; of several sources the source stands in front.

    Raises:
        DataError: a name is neither a file nor a folder, or there is no picture; all of them are named.
    """
    from mtrain.data.reading import listed, pictures_in
    from mtrain.errors import DataError

    found: dict[Path, str] = {}
    problems = []
    for source in map(Path, sources):
        inside = pictures_in(source) if source.is_dir() else [source] if source.is_file() else []
        alone = source.is_dir() and len(sources) == 1
        for file in inside:
            found.setdefault(file.absolute(), (file.relative_to(source) if alone else file).as_posix())
        if not inside:
            problems.append(f"{source}: " + ("holds no picture" if source.is_dir() else "no such file or folder"))
    if problems:
        raise DataError(f"predict: {len(problems)} of {len(sources)} sources give no picture:\n{listed(problems)}")
    return found


def _framework(loaded: "Loaded") -> str:
    """What the spec trains on, which is installed where its run was made; the other one need not be."""
    from mtrain.spec import plugins

    backend, policy = loaded.spec.backend, loaded.policy
    options = plugins.options("backends", backend.name, backend.options, path="backend.options", policy=policy)
    framework: str = plugins.made("backends", backend.name, options, policy=policy).framework
    return framework


def _on_one_rank(params: dict[str, Any], *, framework: str) -> dict[str, Any]:
    """The spec of a run, on one process without hosts, whatever it was trained on."""
    own = (
        "backend.name=solo",
        f"backend.options={{device: {params['device']}, framework: {framework}}}",
        "cluster.ips=[]",
        "cluster.slots=null",
        "cluster.devices=null",
        "cluster.launcher=auto",
        "model.weights=null",
    )
    single = ("cluster.nproc_per_node=1", "train.batch_size=1", "train.accumulate=1", "cluster.log_dir=null")
    return {**params, "overrides": (*(params["overrides"] or ()), *own, *single)}


def _selecting(loaded: "Loaded", params: dict[str, Any]) -> "Loaded":
    """``loaded``, its model told the lowest score where it selects predictions itself."""
    from mtrain.spec import plugins

    if "confidence" not in plugins.load("models", loaded.spec.model.name, policy=loaded.policy).Options.model_fields:
        return loaded
    return load_job({**params, "overrides": (*params["overrides"], f"model.options.confidence={params['confidence']}")})


def _tell_skipped(file: Path) -> int:
    """Warn of every picture that could not be read; returns how many there were."""
    import json

    from mtrain.data.reading import listed

    if not file.exists():
        return 0
    skipped = json.loads(file.read_text(encoding="utf-8"))
    problems = listed([f"{entry['file_name']}: {entry['reason']}" for entry in skipped])
    click.echo(
        f"warning: skipped {len(skipped)} pictures that cannot be read (--strict stops there):\n{problems}", err=True
    )
    return len(skipped)


def _found(out: Path) -> int:
    import json

    return len(json.loads((out / "predictions.json").read_text(encoding="utf-8")))
