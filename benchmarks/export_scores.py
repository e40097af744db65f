"""The score of one trained model in each form that `mtrain export` writes, computed by the program that the form is for.

    python benchmarks/export_scores.py runs/digits --python openvino=OTHER/bin/python

The evaluation split is prepared once, as for the ONNX file. Each program runs in a process of its own and computes the outputs of all
batches; mtrain reads predictions from them and scores them. Rows: the checkpoint's best evaluation as its run noted it, then each
form with its score and the largest difference of its outputs from those of ONNX Runtime, relative to the largest one.
``--python NAME=PATH`` is the interpreter of a program, for those that lie in another environment. ``--root``: folder of the data.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mtrain.core.interfaces import Array, HostBatch
from mtrain.spec.resolved import Resolved
from mtrain_deploy.exported.data import evaluation_data, micro_batches
from mtrain_deploy.exported.model import ExportedModel

BATCH = 10
LOOP = """
import sys, numpy as np
given, made, path = np.load(sys.argv[1]), sys.argv[2], sys.argv[3]
{open}
found = {{}}
for name in given.files:
    for i, value in enumerate(compute(given[name])):
        found[f"{{name}}.{{i}}"] = np.asarray(value)
np.savez(made, **found)
"""
OPENVINO = """
import openvino
compiled = openvino.Core().compile_model(path, "CPU", {hint})
compute = lambda x: list(compiled(x).values())
"""
TORCH = """
import torch
program = torch.export.load(path).module()
compute = lambda x: [value.numpy() for value in program(torch.from_numpy(x))]
"""
PADDLE = """
import paddle.inference as inference
config = inference.Config(path + ".json", path + ".pdiparams"); config.disable_glog_info()
predictor = inference.create_predictor(config)
def compute(x):
    predictor.get_input_handle(predictor.get_input_names()[0]).copy_from_cpu(x); predictor.run()
    return [predictor.get_output_handle(name).copy_to_cpu() for name in predictor.get_output_names()]
"""
ONNX = """
import onnxruntime
session = onnxruntime.InferenceSession(path)
compute = lambda x: session.run(None, {session.get_inputs()[0].name: x})
"""
PROGRAMS = {
    "ONNX Runtime": ("onnx", "m.onnx", "onnx", ONNX),
    "OpenVINO, f32": ("openvino", "m.xml", "openvino", OPENVINO.format(hint='{"INFERENCE_PRECISION_HINT": "f32"}')),
    "OpenVINO, default": ("openvino", "m.xml", "openvino", OPENVINO.format(hint="{}")),
    "torch.export": ("torch", "m.pt2", "torch", TORCH),
    "paddle.inference": ("paddle", "made-by-paddle", "paddle", PADDLE),
}
"""Format, file, name of the interpreter, and code of each program."""
REFERENCE = "ONNX Runtime"
"""The program that comes first, and with which the others are compared."""


def ran(*command: str) -> None:
    """Run one command.

    Raises:
        SystemExit: It failed.
    """
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr or done.stdout)


def score(
    model: ExportedModel, job: Resolved, batches: Sequence[HostBatch], outputs: Sequence[Sequence[Array]]
) -> float:
    """Return the score of the outputs of all batches."""
    evaluator = evaluation_data(job, model.metadata).evaluator()
    for batch, values in zip(batches, outputs, strict=True):
        evaluator.add(batch, model.read(dict(zip(model.metadata.outputs, values, strict=True)), batch))
    return float(evaluator.result([evaluator.partial()])["score"])


def main(argv: Sequence[str] | None = None) -> None:
    """Print one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--python", action="append", default=[], metavar="NAME=PATH")
    parser.add_argument("--root")
    parser.add_argument("--only", help="of the other programs, only this one")
    options = parser.parse_args(argv)
    pythons = dict(given.split("=", 1) for given in options.python)
    best = json.loads((options.run / "summary.json").read_text())["best"]
    print(f"| form | score | largest difference |\n|---|---|---|\n| checkpoint | {best['score']:.7f} | |", flush=True)
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        first: list[list[Array]] = []
        for program, (form, file, name, code) in PROGRAMS.items():
            if options.only not in (None, program) and program != REFERENCE:
                continue
            if not (folder / file).exists() and not list(folder.glob(f"{file}.*")):
                words = ("export", "--run", str(options.run), "--format", form, "--out", str(folder / file))
                ran(pythons.get(form, sys.executable) if form == "openvino" else sys.executable, "-m", "mtrain", *words)
            if program == REFERENCE:
                model = ExportedModel.open(folder / file, threads=1)
                spec = model.spec()
                data = spec.data if options.root is None else spec.data.model_copy(update={"root": options.root})
                job = Resolved.of(spec.model_copy(update={"data": data}))
                batches = list(micro_batches(evaluation_data(job, model.metadata), size=BATCH))
                key = model.metadata.inputs[0].key
                given: dict[str, Any] = {f"b{i}": batch[key] for i, batch in enumerate(batches)}
                np.savez(folder / "given.npz", **given)
            found = folder / "found.npz"
            python = pythons.get(name, sys.executable)
            ran(python, "-c", LOOP.format(open=code), str(folder / "given.npz"), str(found), str(folder / file))
            with np.load(found) as arrays:
                count = len(arrays.files) // len(batches)
                outputs = [[arrays[f"b{i}.{j}"] for j in range(count)] for i in range(len(batches))]
            first = first or outputs
            pairs = [pair for mine, other in zip(outputs, first, strict=True) for pair in zip(mine, other, strict=True)]
            difference = max(np.abs(a - b).max() for a, b in pairs) / max(np.abs(b).max() for _, b in pairs)
            print(f"| {program} | {score(model, job, batches, outputs):.7f} | {difference:.1e} |", flush=True)


if __name__ == "__main__":
    main()
