"""How far ONNX Runtime, torch and Paddle in float32 are from torch in float64, for every shipped model.

    python benchmarks/export_equality.py [MODEL ...] [--threads 1]

Prints a Markdown row for each output of each model: max |difference| / max |reference| over a batch of two random images.
Weights are drawn: the model's start values, but with BatchNorms and last layers that are neither the identity nor zero, so
that every array matters. The ONNX graph is what ``mtrain export`` writes, with the model's form for inference (PP-YOLOE's
parallel convolutions are one); torch and Paddle compute the form that is trained. Paddle runs in a process of its own.
"""

import argparse
import subprocess
import sys
import tempfile
import zlib
from pathlib import Path

import numpy as np

SIDES = {"yolov5": 320, "ppyoloe": 320, "vit": 224, "resnet": 224, "unet": 256, "liteseg": 256}
"""Side of the images in pixels, by the begin of a model's name."""
MODELS = (
    *(f"yolov5{size}" for size in "nsmlx"), *(f"ppyoloe_{size}" for size in "smlx"),
    "vit", "vit_tiny", "vit_small", "vit_base", "resnet18", "resnet34", "resnet50", "unet", "liteseg",
)  # fmt: skip
CLASSES = 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=MODELS, metavar="MODEL")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--part", choices=("torch", "paddle"), help="internal: compute in this process, for one model")
    parser.add_argument("--folder", type=Path, help="internal")
    arguments = parser.parse_args()
    if arguments.part:
        {"torch": with_torch, "paddle": with_paddle}[arguments.part](
            arguments.models[0], arguments.folder, arguments.threads
        )
        return
    print("| model | pixels | output | ONNX Runtime | torch float32 | Paddle float32 |\n|---|--:|---|--:|--:|--:|")
    for model in arguments.models:
        with tempfile.TemporaryDirectory() as folder:
            for part in ("torch", "paddle"):
                command = [
                    sys.executable,
                    __file__,
                    model,
                    "--part",
                    part,
                    "--folder",
                    folder,
                    "--threads",
                    str(arguments.threads),
                ]
                subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=None)
            print_rows(model, Path(folder))


def print_rows(model: str, folder: Path) -> None:
    reference, *others = (np.load(folder / f"{name}.npz") for name in ("float64", "onnx", "torch", "paddle"))
    for output in reference.files:
        largest = np.abs(reference[output].astype(np.float64)).max()
        parts = [np.abs(other[output].astype(np.float64) - reference[output]).max() / largest for other in others]
        print(
            f"| {model} | {side_of(model)} | {output} | " + " | ".join(f"{part:.1e}" for part in parts) + " |",
            flush=True,
        )


def side_of(model: str) -> int:
    return 32 if model == "vit" else next(side for begin, side in SIDES.items() if model.startswith(begin))


def plugin_and_task(model: str):
    from mtrain.core.interfaces import Task
    from mtrain.spec import plugins

    plugin_class = plugins.load("models", model)
    plugin = plugin_class(plugin_class.Options())
    names = [str(number) for number in range(CLASSES)]
    return plugin, Task(kind=plugin.kind, class_names=names, image_size=side_of(model), global_batch=1)


def drawn_pixels(model: str):
    rng = np.random.default_rng(1)
    side = side_of(model)
    # Smooth images rather than noise: their features are of a size that real ones have.
    coarse = rng.integers(0, 256, (2, side // 16, side // 16, 3)).astype(np.uint8)
    return coarse.repeat(16, axis=1).repeat(16, axis=2) // 2 + rng.integers(0, 128, (2, side, side, 3)).astype(np.uint8)


def drawn(plugin, task, shapes):
    """Return weights of which none is the identity or zero."""
    weights = {}
    for name, value in plugin.initial(shapes, task, seed=0).items():
        rng = np.random.default_rng(zlib.crc32(name.encode()))
        value = np.asarray(value)
        if value.dtype.kind == "f" and name.endswith(("running_var", "bn.weight", "norm.weight")):
            value = rng.uniform(0.7, 1.3, value.shape).astype(value.dtype)
        elif value.dtype.kind == "f" and value.ndim == 1 and "anchors" not in name:
            value = (value + 0.1 * rng.standard_normal(value.shape)).astype(value.dtype)
        elif value.dtype.kind == "f" and not value.any():
            value = (0.05 * rng.standard_normal(value.shape)).astype(value.dtype)
        weights[name] = value
    return weights


def outputs_of(network, batch, to_numpy):
    found = {**network.raw(batch), **network(batch)}
    return {name: to_numpy(value) for name, value in found.items()}


def with_torch(model: str, folder: Path, threads: int) -> None:
    import torch

    from mtrain.backends._torch import nn, ops, state
    from mtrain.core import binding
    from mtrain.core.collective import OneRank
    from mtrain.core.interfaces.program import Program, ProgramInput
    from mtrain_deploy.exporting import torch_program

    torch.set_num_threads(threads)
    binding.bind(nn, ops)
    plugin, task = plugin_and_task(model)
    network = plugin.build(task, OneRank()).eval()
    weights = drawn(plugin, task, {name: tuple(array.shape) for name, array in network.state_dict().items()})
    np.savez(folder / "weights.npz", **weights)
    images = drawn_pixels(model)
    state.fill(network.state_dict(), weights, what="weights")
    batch = {"images": torch.from_numpy(images), "pixels": torch.from_numpy(images)}
    with torch.no_grad():
        np.savez(folder / "torch.npz", **outputs_of(network, batch, state.to_numpy))
        np.savez(folder / "float64.npz", **outputs_of(network.double(), batch, state.to_numpy))
    del network
    found = {}
    fused = plugin.fused(weights)
    if fused is not None:
        plugin, weights = type(plugin)(plugin.options.model_copy(update={"deploy": True})), fused
    key = "pixels" if plugin.kind == "segmentation" else "images"
    for raw in (True, False):
        program = Program(
            format="onnx", path=folder / f"{raw}.onnx", inputs=[ProgramInput(key=key, shape=images.shape[1:])], raw=raw
        )
        names = torch_program.write(plugin.build(task, OneRank()), weights, program)
        found |= dict(zip(names, computed(program.path, images, key, threads), strict=True))
    np.savez(folder / "onnx.npz", **found)


def computed(path: Path, images, key: str, threads: int):
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return session.run(None, {key: images})


def with_paddle(model: str, folder: Path, threads: int) -> None:
    import paddle

    from mtrain.backends._paddle import nn, ops, state
    from mtrain.core import binding
    from mtrain.core.collective import OneRank

    binding.bind(nn, ops)
    plugin, task = plugin_and_task(model)
    network = plugin.build(task, OneRank())
    network.eval()
    state.fill(network.state_dict(), dict(np.load(folder / "weights.npz")), what="weights")
    images = paddle.to_tensor(drawn_pixels(model))
    with paddle.no_grad():
        np.savez(folder / "paddle.npz", **outputs_of(network, {"images": images, "pixels": images}, state.to_numpy))


if __name__ == "__main__":
    main()
