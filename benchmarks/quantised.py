"""Compare float32, float16 and 8-bit forms of trained models: average precision, size, and time of one image.

    python benchmarks/quantised.py --pair runs/float0 runs/trained0 --pair runs/float1 runs/trained1

A pair is a run without and one with ``train.quantise``; the second may be left out. Rows: ``fp32``, ``fp16`` and ``int8
static`` are of the first run, ``fp32 trained`` and ``int8 trained`` of the second. With ``--peers`` there are two more of the first
run: ``naive static`` and ``dynamic`` are what ONNX Runtime's own quantisers make of the float file with their defaults, the static
one with the same images. Times are of ONNX Runtime with one thread and one image, the forms taking turns: processor time,
medians, as shares of that of fp32 of the same pair. ``--root`` is the folder of the data, for formats that need one.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mtrain.spec.resolved import Resolved
from mtrain_deploy.exported.data import evaluation_data, micro_batches
from mtrain_deploy.exported.model import ExportedModel
from mtrain_deploy.exporting.onnx_file import write_metadata
from mtrain_deploy.quantising import calibration


def mtrain(*arguments: str) -> None:
    """Run one command of mtrain.

    Raises:
        SystemExit: It failed.
    """
    done = subprocess.run([sys.executable, "-m", "mtrain", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr or done.stdout)


def files_of(
    float_run: str, trained_run: str | None, folder: Path, *, samples: int, root: str | None
) -> dict[str, Path]:
    """Export the runs in all forms; return the file of each."""
    files = {form: folder / f"{form.replace(' ', '-')}.onnx" for form in ("fp32", "fp16", "int8 static")}
    mtrain("export", "--run", float_run, "--out", str(files["fp32"]))
    mtrain("export", "--run", float_run, "--out", str(files["fp16"]), "--precision", "fp16")
    sources = [("fp32", "int8 static")]
    if trained_run is not None:
        files |= {form: folder / f"{form.replace(' ', '-')}.onnx" for form in ("fp32 trained", "int8 trained")}
        mtrain("export", "--run", trained_run, "--out", str(files["fp32 trained"]))
        sources.append(("fp32 trained", "int8 trained"))
    where = () if root is None else ("-o", f"data.root={root}")
    for source, target in sources:
        mtrain(
            "quantise", "--weights", str(files[source]), "--out", str(files[target]), "--samples", str(samples), *where
        )
    return files


def job_of(model: ExportedModel, root: str | None) -> Resolved:
    """Return the job whose data are used."""
    spec = model.spec()
    if root is not None:
        spec = spec.model_copy(update={"data": spec.data.model_copy(update={"root": root})})
    return Resolved.of(spec)


def peers_of(source: Path, folder: Path, *, samples: int, root: str | None) -> dict[str, Path]:
    """Quantise a float file by ONNX Runtime's own functions with their defaults; return the file of each form."""
    import onnx
    from onnxruntime.quantization import CalibrationDataReader, QuantType, quantize_dynamic, quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    model = ExportedModel.open(source, threads=1)
    batches = calibration.samples(job_of(model, root), model.metadata, count=samples, seed=0)
    feeds = iter(list(calibration.feeds(batches, model.metadata)))

    class Reader(CalibrationDataReader):  # type: ignore[misc]
        """Hands over one feed after the other, then None."""

        def get_next(self) -> dict[str, Any] | None:
            return next(feeds, None)

    prepared, files = folder / "prepared.onnx", {form: folder / f"{form}.onnx" for form in ("naive static", "dynamic")}
    quant_pre_process(str(source), str(prepared), skip_symbolic_shape=True)
    quantize_static(str(prepared), str(files["naive static"]), Reader())
    # Signed weights are the default, but ONNX Runtime has no integer convolution for them on a CPU.
    quantize_dynamic(str(prepared), str(files["dynamic"]), weight_type=QuantType.QUInt8)
    for path in files.values():
        made = onnx.load(str(path))
        write_metadata(made, model.metadata.model_copy(update={"precision": "int8"}))
        onnx.save(made, str(path))
    return files


def score(path: Path, root: str | None) -> float:
    """Return the score of a file on the evaluation split of its spec."""
    model = ExportedModel.open(path, threads=1)
    data = evaluation_data(job_of(model, root), model.metadata)
    evaluator = data.evaluator()
    for batch in micro_batches(data, size=8):
        evaluator.add(batch, model.predictions(batch))
    return float(evaluator.result([evaluator.partial()])["score"])


def times_s(files: dict[str, Path], *, repeats: int) -> dict[str, float]:
    """Return the median processor time of one image, in seconds; the files take turns."""
    models = {form: ExportedModel.open(path, threads=1) for form, path in files.items()}
    given = next(iter(models.values())).metadata.inputs[0]
    shape = [side if isinstance(side, int) else 1 for side in given.shape]
    batch = {given.key: np.random.default_rng(0).integers(0, 255, shape).astype(given.dtype)}
    measured: dict[str, list[float]] = {form: [] for form in files}
    for turn in range(repeats + 5):
        for form, model in models.items():
            before = time.process_time()
            model.outputs(batch)
            if turn >= 5:  # the first calls allocate memory
                measured[form].append(time.process_time() - before)
    return {form: statistics.median(values) for form, values in measured.items()}


def main(argv: Sequence[str] | None = None) -> None:
    """Print one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pair", nargs="+", action="append", required=True, metavar="RUN", help="FLOAT [TRAINED]")
    parser.add_argument("--samples", type=int, default=64, help="images that calibrate")
    parser.add_argument("--peers", action="store_true", help="also ONNX Runtime's own quantisers with their defaults")
    parser.add_argument("--root", help="folder of the data")
    parser.add_argument("--repeats", type=int, default=100, help="turns that are timed")
    arguments = parser.parse_args(argv)
    print("| pair | form | score | size, MiB | time |\n|---|---|---|---|---|")
    for pair in arguments.pair:
        with tempfile.TemporaryDirectory() as folder:
            trained = pair[1] if len(pair) > 1 else None
            files = files_of(pair[0], trained, Path(folder), samples=arguments.samples, root=arguments.root)
            if arguments.peers:
                files |= peers_of(files["fp32"], Path(folder), samples=arguments.samples, root=arguments.root)
            times = times_s(files, repeats=arguments.repeats)
            for form, path in files.items():
                size, share = path.stat().st_size / 2**20, times[form] / times["fp32"]
                print(
                    f"| {Path(pair[0]).name} | {form} | {score(path, arguments.root):.4f} | {size:.1f} | {share:.2f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
