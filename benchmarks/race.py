"""CPU seconds per update of mtrain against the originals' own training scripts, on the same images, in turns.

    python benchmarks/race.py --yolov5 CHECKOUT [--paddledetection CHECKOUT] [--rounds 3] [--json FILE]

Nothing of the originals is part of mtrain: each is the checkout that is named, run by an interpreter that has what it
needs (``--python``); what is missing is said before anything trains. Both sides read the same files, at the same size
and batch, with one thread and one loader process, without evaluation in between. A round trains a short and a long job of
each side, in an order that changes from round to round; the CPU seconds of all their processes, divided by the updates
that the long job has more, leave start and end out. A ratio above 1 means that mtrain needs less.

mtrain sets a variable for Paddle's matrix products on processors that are not Intel's (``mtrain/system/vectors.py``). The
original is raced as its users start it and, where mtrain would set the variable, with it too, so that a reader can tell
mtrain's kernels from its environment.
"""

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import yaml

sys.path.insert(0, str(Path(__file__).parents[1]))

from mtrain.system import processes, vectors

IMAGES, VAL = 64, 8
THREADS = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
QUIET = {
    "WANDB_MODE": "disabled",
    "YOLO_OFFLINE": "true",
    "MPLBACKEND": "Agg",
    "GIT_PYTHON_REFRESH": "quiet",
    "YOLOv5_AUTOINSTALL": "false",
    "YOLO_AUTOINSTALL": "false",
}
"""Keeps the originals from asking services, drawing on a screen, or installing packages in the middle of a race."""
NEEDS = {
    "yolov5": {
        # Its val.py suppresses boxes after the last epoch. torchvision of another torch may be imported without operators.
        "torchvision.ops.nms for the installed torch": (
            "import torch, torchvision; torchvision.ops.nms(torch.zeros(1, 4), torch.zeros(1), 0.5)",
            "install the torchvision that belongs to that torch, both from the same index",
        ),
        # Without it, the original starts pip by itself.
        "ultralytics": ("import ultralytics", "install the checkout's requirements.txt"),
    },
    "paddledetection": {
        "imgaug, which needs numpy 1": ("import imgaug", "install imgaug and 'numpy<2'"),
        "paddle": ("import paddle", "install paddlepaddle, in mtrain's version"),
    },
}
"""Of each original: what its interpreter must have, a program that fails without it, and what to do."""
PADDLE = """_BASE_: [{checkout}/configs/ppyoloe/ppyoloe_crn_s_300e_coco.yml]
use_gpu: false
weights: ''
pretrain_weights: ''
worker_num: 1
epoch: {epochs}
snapshot_epoch: 10000
save_dir: {folder}
log_iter: 1000
num_classes: 10
TrainDataset: !COCODataSet
  {{image_dir: images, anno_path: annotations/instances_train.json, dataset_dir: {data}, data_fields: [image, gt_bbox, gt_class, is_crowd]}}
EvalDataset: !COCODataSet
  {{image_dir: images, anno_path: annotations/instances_val.json, dataset_dir: {data}}}
TrainReader:
  batch_size: {batch}
  batch_transforms:
    - BatchRandomResize: {{target_size: [{side}], random_size: true, random_interp: true, keep_ratio: false}}
    - NormalizeImage: {{mean: [0.485, 0.456, 0.406], std: [0.229, 0.224, 0.225], is_scale: true}}
    - Permute: {{}}
    - PadGT: {{}}
"""
"""The original's own recipe; the batch transforms are its own with one size in place of many."""


@dataclass(frozen=True, slots=True)
class Side:
    """What makes the command of a number of epochs, with results in a folder, and how it is started."""

    command: Callable[[int, Path], list[str]]
    cwd: Path
    variables: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Race:
    """One job on both sides."""

    name: str
    batch: int
    original: Callable[[int, Path], list[str]]
    """Returns the command that trains a number of epochs, with results in a folder."""
    ours: Callable[[int, Path], list[str]]
    cwd: Path
    """Working directory of the original."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Of mtrain's environment: where there are some, the original is raced with them too."""

    def sides(self, folder: Path) -> dict[str, Side]:
        """Return the sides by name, the first of which is the original as its users start it."""
        sides = {"original": Side(self.original, self.cwd)}
        if self.variables:
            sides["original with variables"] = Side(self.original, self.cwd, self.variables)
        return {**sides, "ours": Side(self.ours, folder)}


def main() -> int:
    """Run all races, print their rows, and write them."""
    arguments = parsed()
    if missing := [line for flag in NEEDS if getattr(arguments, flag) for line in unmet(flag, arguments)]:
        print(*missing, sep="\n", file=sys.stderr)
        return 2
    rows = []
    with tempfile.TemporaryDirectory() as name, processes.adopting_orphans():
        folder = Path(name)
        made_data(folder)
        races = []
        if arguments.yolov5:
            races.append(yolov5(arguments, folder))
        if arguments.paddledetection:
            races.append(paddledetection(arguments, folder))
        for race in races:
            rows.append(row(race, arguments, folder))
            print(worded(rows[-1]), flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


def parsed() -> argparse.Namespace:
    """Return the arguments of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--yolov5", type=Path, help="checkout of ultralytics/yolov5")
    parser.add_argument("--paddledetection", type=Path, help="checkout of PaddlePaddle/PaddleDetection")
    parser.add_argument("--python", default=sys.executable, help="interpreter of the originals")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--epochs", type=int, nargs=2, default=(1, 3), metavar=("SHORT", "LONG"))
    parser.add_argument("--side", type=int, default=320, help="of the images, in pixels")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if (python := shutil.which(arguments.python)) is None:
        parser.error(f"--python {arguments.python}: expected an interpreter")
    arguments.python = os.path.abspath(python)  # the originals run in their own folders
    for flag, file in (("yolov5", "train.py"), ("paddledetection", "tools/train.py")):
        checkout = getattr(arguments, flag)
        if checkout is not None and not (checkout / file).is_file():
            parser.error(f"--{flag} {checkout}: expected a checkout that has {file}")
    if not (arguments.yolov5 or arguments.paddledetection):
        parser.error("name a checkout: --yolov5 FOLDER, --paddledetection FOLDER")
    if IMAGES % arguments.batch:
        parser.error(f"--batch {arguments.batch}: expected a divisor of {IMAGES}, so that no side drops a batch")
    return arguments


def unmet(flag: str, arguments: argparse.Namespace) -> list[str]:
    """Return a sentence for each of the original's ``NEEDS`` that its interpreter does not meet."""
    sentences = []
    for what, (program, remedy) in NEEDS[flag].items():
        argv = [arguments.python, "-W", "ignore", "-c", program]
        cwd, env = getattr(arguments, flag), {**os.environ, **THREADS, **QUIET}
        ended = subprocess.run(argv, cwd=cwd, env=env, capture_output=True, text=True, check=False)
        if ended.returncode:
            last = (ended.stderr.strip() or f"exit code {ended.returncode}").splitlines()[-1]
            found = f"{arguments.python} in {cwd}: {last}"
            sentences.append(f"--{flag} needs {what}: {found}; {remedy}, or name another interpreter by --python")
    return sentences


def made_data(folder: Path) -> None:
    """Make one data set of images of 640 pixels: in COCO's form, and in YOLO's."""
    mtrain = [sys.executable, "-m", "mtrain", "data"]
    sizes = ["--train", str(IMAGES), "--val", str(VAL), "--size", "640"]
    subprocess.run([*mtrain, "make", "digits", str(folder / "coco"), *sizes], check=True, stdout=subprocess.DEVNULL)
    converted = [*mtrain, "convert", str(folder / "yolo"), "--to", "yolo", "--format", "coco"]
    subprocess.run([*converted, "--root", str(folder / "coco")], check=True, stdout=subprocess.DEVNULL)


def ours(
    arguments: argparse.Namespace, *, spec: str, backend: str, data: list[str]
) -> Callable[[int, Path], list[str]]:
    """Return what makes the command of mtrain's side; ``backend`` trains with one rank."""

    def command(epochs: int, folder: Path) -> list[str]:
        values = {
            "backend.name": backend,
            "data.image_size": arguments.side,
            "data.workers": 1,
            "train.epochs": None,
            "train.updates": epochs * IMAGES // arguments.batch,
            "schedule.horizon_epochs": epochs,
            "train.batch_size": arguments.batch,
            "evaluate.enabled": False,
            "cluster.threads": 1,
            "report.dir": str(folder),
            "report.plots": False,
            "report.tensorboard": False,
            "report.display": "quiet",
        }
        pairs = [word for key, value in values.items() for word in ("-o", f"{key}={json.dumps(value)}")]
        return [sys.executable, "-m", "mtrain", "train", "-c", spec, *data, *pairs]

    return command


def yolov5(arguments: argparse.Namespace, folder: Path) -> Race:
    """Return the race against ``train.py`` of YOLOv5, from scratch, with its own recipe."""
    names = folder / "race.yaml"
    described = yaml.safe_load((folder / "yolo" / "data.yaml").read_text())
    # The original reads a relative path from its own folder.
    names.write_text(yaml.safe_dump({**described, "path": str(folder / "yolo")}))
    # The original downloads this font into its folder of settings unless it is there; nothing is drawn with it.
    (folder / "Arial.ttf").touch()

    def command(epochs: int, place: Path) -> list[str]:
        recipe = ["--weights", "", "--cfg", "models/yolov5n.yaml", "--hyp", "data/hyps/hyp.scratch-low.yaml"]
        size = ["--imgsz", str(arguments.side), "--batch-size", str(arguments.batch), "--epochs", str(epochs)]
        rest = ["--device", "cpu", "--workers", "1", "--noplots", "--noval", "--nosave", "--project", str(place)]
        python = ["env", f"YOLOV5_CONFIG_DIR={folder}", arguments.python]
        return [*python, "train.py", "--data", str(names), *recipe, *size, *rest]

    own = ours(arguments, spec="yolov5n", backend="solo", data=["--data", str(names)])
    name = f"YOLOv5n, {arguments.side} px, batch {arguments.batch}"
    return Race(name=name, batch=arguments.batch, original=command, ours=own, cwd=arguments.yolov5.absolute())


def paddledetection(arguments: argparse.Namespace, folder: Path) -> Race:
    """Return the race against ``tools/train.py`` of PaddleDetection: PP-YOLOE-s, from scratch, with its own recipe."""
    data = folder / "coco"

    def command(epochs: int, place: Path) -> list[str]:
        place.mkdir(parents=True, exist_ok=True)
        config = place / f"race-{epochs}.yml"
        checkout = arguments.paddledetection.absolute()
        values = {"checkout": checkout, "epochs": epochs, "folder": place, "data": data}
        config.write_text(PADDLE.format(**values, batch=arguments.batch, side=arguments.side))
        return [arguments.python, "tools/train.py", "-c", str(config)]

    # One size of images, as in the original's batch transforms above, and its interpolations.
    values = {"data.root": str(data), "data.format": "coco", "data.augment.sizes": [arguments.side]}
    pairs = [word for key, value in values.items() for word in ("-o", f"{key}={json.dumps(value)}")]
    own = ours(arguments, spec="ppyoloe_s", backend="fleet", data=pairs)
    name = f"PP-YOLOE-s, {arguments.side} px, batch {arguments.batch}"
    checkout, variables = arguments.paddledetection.absolute(), vectors.wanted_variables()
    return Race(name=name, batch=arguments.batch, original=command, ours=own, cwd=checkout, variables=variables)


def row(race: Race, arguments: argparse.Namespace, folder: Path) -> dict[str, object]:
    """Run the rounds of a race, and return its row: CPU seconds per update of each side, and ratios of the originals'."""
    sides = race.sides(folder)
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    short, long = arguments.epochs
    updates = (long - short) * IMAGES / race.batch
    order = [(side, epochs) for side in sides for epochs in (short, long)]
    for number in range(arguments.rounds):
        taken = {}
        for side, epochs in order[::-1] if number % 2 else order:
            argv = sides[side].command(epochs, folder / f"{side.replace(' ', '-')}-{number}-{epochs}")
            taken[side, epochs] = cpu_seconds(argv, cwd=sides[side].cwd, variables=sides[side].variables)
        for side, found in seconds.items():
            found.append((taken[side, long] - taken[side, short]) / updates)
        words = ", ".join(f"{side} {found[-1]:.3f}" for side, found in seconds.items())
        print(f"round {number + 1}: {words}", flush=True)
    found = {"name": race.name, **seconds, **compared(seconds["original"], seconds["ours"])}
    if race.variables:
        found["variables"] = dict(race.variables)
        found["with variables"] = compared(seconds["original with variables"], seconds["ours"])
    return found


def compared(original: list[float], ours: list[float]) -> dict[str, object]:
    """Return the ratio of each round, and the median."""
    ratios = [theirs / mine for theirs, mine in zip(original, ours, strict=True)]
    return {"ratio": median(ratios), "ratios": ratios}


def cpu_seconds(argv: list[str], *, cwd: Path, variables: Mapping[str, str]) -> float:
    """Run a command to its end and return the CPU seconds of all its processes.

    Raises:
        SystemExit: it has failed; its last words are printed.
    """
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    # The originals look for their own packages, and mtrain's are not theirs.
    paths = [str(Path(__file__).parents[1])] if "mtrain" in argv else []
    inherited = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    environ = {**os.environ, **THREADS, **QUIET, **variables, "PYTHONPATH": os.pathsep.join([*paths, *inherited])}
    ended = subprocess.run(argv, cwd=cwd, env=environ, capture_output=True, text=True, check=False)
    processes.reap(spare=0)  # Processes that their parents have left count too.
    if ended.returncode:
        sys.exit(f"{' '.join(argv)}: exit code {ended.returncode}\n{(ended.stdout + ended.stderr)[-3000:]}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def worded(found: Mapping[str, object]) -> str:
    """Return a row for people: medians, and the least and the largest value of all rounds."""

    def spread(values: object) -> str:
        assert isinstance(values, list)
        return f"{median(values):.3f} ({min(values):.3f} to {max(values):.3f})"

    def judged(ratios: Mapping[str, object]) -> str:
        ahead = "ahead" if float(str(ratios["ratio"])) > 1 else "NOT ahead"
        return f"ratio {spread(ratios['ratios'])}, mtrain is {ahead}"

    words = (
        f"{found['name']}: original {spread(found['original'])} s CPU per update, mtrain {spread(found['ours'])}; "
        f"{judged(found)}"
    )
    variables, further = found.get("variables"), found.get("with variables")
    if isinstance(variables, Mapping) and isinstance(further, Mapping):
        pairs = " ".join(f"{name}={value}" for name, value in variables.items())
        words += f"\n  with {pairs}: original {spread(found['original with variables'])}; {judged(further)}"
    return words


if __name__ == "__main__":
    sys.exit(main())
