"""CPU milliseconds per image that scoring takes after the model: YOLOv5's own val.py against mtrain, in turns.

    python benchmarks/evaluation.py --yolov5 CHECKOUT [--images 96] [--candidates 1000] [--rounds 5] [--json FILE]

Both sides get the same decoded outputs of a detector, made up around made-up objects: suppression with the thresholds of
val.py, then the metrics. mtrain computes the twelve metrics of COCO. val.py computes its own precision, recall and AP
(``own figures``), and with ``--save-json`` those of COCO by pycocotools too (``metrics``). The checkout is run by the interpreter that
``--python`` names, in processes of its own; nothing of it is part of mtrain. Where that has no torchvision with operators,
of which there is no build for the CPU on PyPI, ``peers/greedy_nms.c`` takes the place of ``torchvision.ops.nms``.
"""

import argparse
import contextlib
import ctypes
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[1]
CLASSES, SIDE, OBJECTS = 10, 320, 4
CONFIDENCE, IOU, KEPT = 0.001, 0.6, 300
"""What val.py suppresses with."""
BATCH = 8
SAME_AP = 1e-4
"""By how much AP may differ: equal scores may be in another order."""
WORDS = {"own figures": "metrics", "all with own figures": "all"}
"""What is compared with a part that only the original has."""


def main() -> None:
    """Run the rounds, and print and write the row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--yolov5", type=Path, required=True, help="checkout of ultralytics/yolov5")
    parser.add_argument("--python", default=sys.executable, help="interpreter that has what the checkout needs")
    parser.add_argument("--images", type=int, default=96)
    parser.add_argument("--candidates", type=int, default=1000, help="boxes of an image above the threshold")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--outputs", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.side:
        print(json.dumps(SIDES[arguments.side](dict(np.load(arguments.outputs)), arguments.yolov5)))
        return
    with tempfile.TemporaryDirectory() as folder:
        outputs = Path(folder, "outputs.npz")
        np.savez(outputs, **made(arguments.images, arguments.candidates))
        rounds = []
        for number in range(arguments.rounds):
            order = list(SIDES) if number % 2 else list(SIDES)[::-1]
            rounds.append({side: measured(side, outputs, arguments) for side in order})
            print(f"round {number + 1}: {rounds[-1]}", flush=True)
            precisions = [one["AP"] for one in rounds[-1].values()]
            if abs(precisions[0] - precisions[1]) > SAME_AP:
                raise SystemExit(f"AP differs: {precisions}; the sides do not score the same boxes")
    row: dict[str, Any] = {"images": arguments.images, "candidates": arguments.candidates}
    for part in ("suppression", "metrics", "own figures", "all", "all with own figures"):
        found = [[one[side].get(part, one[side][WORDS.get(part, part)]) for one in rounds] for side in SIDES]
        ratios = [theirs / mine for theirs, mine in zip(*found, strict=True)]
        row[part] = {"original": median(found[0]), "ours": median(found[1]), "ratio": median(ratios)}
        print(
            f"{part}: original {median(found[0]):.2f} ms CPU per image, mtrain {median(found[1]):.2f}; "
            f"ratio {median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        )
    if arguments.json:
        arguments.json.write_text(json.dumps(row, indent=1))


def made(images: int, candidates: int) -> dict[str, Any]:
    """Return decoded outputs (N, A, 5 + classes) float32 and the objects (N, K, 5): class and box, in pixels."""
    generator = np.random.default_rng(0)
    anchors = 3 * sum((SIDE // stride) ** 2 for stride in (8, 16, 32))
    outputs = np.zeros((images, anchors, 5 + CLASSES), np.float32)
    outputs[..., :4], outputs[..., 4], outputs[..., 5:] = SIDE / 2, 1e-5, 1e-3
    centres = generator.uniform(40, SIDE - 40, (images, OBJECTS, 2))
    sizes = generator.uniform(24, 72, (images, OBJECTS, 2))
    classes = generator.integers(0, CLASSES, (images, OBJECTS))
    for image in range(images):
        which = generator.integers(0, OBJECTS, candidates)
        rows = generator.choice(anchors, candidates, replace=False)
        near = np.concatenate((centres[image, which], sizes[image, which]), axis=1)
        spread = generator.exponential(0.3, (candidates, 1))
        boxes = near + generator.normal(0, 1, (candidates, 4)) * np.tile(sizes[image, which], 2) * spread
        outputs[image, rows, :4] = np.maximum(boxes, 2)
        outputs[image, rows, 4] = np.exp(-4 * spread[:, 0]) * generator.uniform(0.3, 1, candidates) + 0.01
        outputs[image, rows, 5 + classes[image, which]] = generator.uniform(0.2, 1, candidates)
    corners = np.concatenate((centres - sizes / 2, centres + sizes / 2), axis=2)
    return {"outputs": outputs, "objects": np.concatenate((classes[..., None], corners), axis=2)}


def measured(side: str, outputs: Path, arguments: argparse.Namespace) -> dict[str, float]:
    """Run one side in a process of its own."""
    python = arguments.python if side == "original" else sys.executable
    command = [
        python,
        __file__,
        "--side",
        side,
        "--outputs",
        str(outputs),
        "--yolov5",
        str(arguments.yolov5.absolute()),
    ]
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    paths = [*([str(ROOT)] if side == "ours" else []), os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, **threads, "YOLO_OFFLINE": "true", "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    ended = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if ended.returncode:
        sys.exit(f"{side}: exit code {ended.returncode}\n{ended.stderr[-3000:]}")
    found: dict[str, float] = json.loads(ended.stdout.splitlines()[-1])
    return found


def original(data: dict[str, Any], checkout: Path) -> dict[str, float]:
    """Suppress and score as val.py does. Its limit of time, which drops images on a busy machine, is lifted."""
    sys.path.insert(0, str(checkout))
    os.chdir(checkout)
    sys.path.append(str(ROOT / "benchmarks" / "peers"))
    import torch
    from yolov5_train import named_operator

    declared = named_operator()  # kept for the life of the process
    from utils import general, metrics

    general.time = type("Clock", (), {"time": staticmethod(lambda: 0.0)})
    if declared is not None or not hasattr(torch.ops.torchvision, "nms"):
        general.torchvision.ops.nms = compiled_nms()
    thresholds = torch.linspace(0.5, 0.95, 10)
    outputs, objects = torch.from_numpy(data["outputs"]), torch.from_numpy(data["objects"]).float()

    def once(count: int) -> dict[str, float]:
        began, suppressing, rows, results = time.process_time(), 0.0, [], []
        for start in range(0, count, BATCH):
            before = time.process_time()
            batch = outputs[start : start + BATCH].clone()  # it writes into its input
            found = general.non_max_suppression(batch, CONFIDENCE, IOU, multi_label=True, max_det=KEPT)
            suppressing += time.process_time() - before
            for number, predictions in enumerate(found):
                truth = objects[start + number]
                # The checkout has moved this function from one file to another.
                match = metrics.process_batch if hasattr(metrics, "process_batch") else own_match(checkout)
                rows.append((match(predictions, truth, thresholds), predictions[:, 4], predictions[:, 5], truth[:, 0]))
                results.append(predictions.numpy())
        stats = [torch.cat(column).numpy() for column in zip(*rows, strict=True)]
        metrics.ap_per_class(*stats, plot=False, names=dict(enumerate("0123456789")))
        own, began = time.process_time() - began - suppressing, time.process_time()
        coco = pycocotools_metrics(data["objects"][:count], results)
        scoring = time.process_time() - began
        print(f"COCO's AP {coco:.6f}", file=sys.stderr)
        return {"suppression": suppressing, "metrics": scoring, "own figures": own, "AP": coco}

    with torch.inference_mode():
        return timed(once, len(outputs))


def pycocotools_metrics(objects: Any, results: list[Any]) -> float:
    """Compute COCO's metrics as val.py does from the file that it writes; return AP."""
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    truth = COCO()
    truth.dataset = {
        "images": [{"id": number} for number in range(len(objects))],
        "categories": [{"id": number, "name": str(number)} for number in range(CLASSES)],
        "annotations": [
            {"id": 1 + number * OBJECTS + place, "image_id": number, "category_id": int(row[0]), "iscrowd": 0}
            | {"bbox": [row[1], row[2], row[3] - row[1], row[4] - row[2]]}
            | {"area": (row[3] - row[1]) * (row[4] - row[2])}
            for number, rows in enumerate(objects.tolist())
            for place, row in enumerate(rows)
        ],
    }
    with contextlib.redirect_stdout(sys.stderr):
        truth.createIndex()
        entries = [
            {"image_id": number, "category_id": int(row[5]), "bbox": [*row[:2], row[2] - row[0], row[3] - row[1]]}
            | {"score": row[4]}
            for number, rows in enumerate(results)
            for row in rows.tolist()
        ]
        evaluation = COCOeval(truth, truth.loadRes(entries), "bbox")
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    return float(evaluation.stats[0])


def compiled_nms() -> Any:
    """Compile ``peers/greedy_nms.c``, and return it with the signature of ``torchvision.ops.nms``."""
    import torch

    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(__file__).parent / "peers" / "greedy_nms.c", Path(folder, "nms.so")
        subprocess.run(["cc", "-O3", "-march=native", "-fPIC", "-shared", str(source), "-o", str(library)], check=True)
        function = ctypes.CDLL(str(library)).greedy_nms
    function.argtypes = (ctypes.c_void_p, ctypes.c_long, ctypes.c_float, ctypes.c_void_p)
    function.restype = ctypes.c_long

    def nms(boxes: torch.Tensor, scores: torch.Tensor, threshold: float) -> torch.Tensor:
        order = scores.argsort(descending=True)
        boxes, kept = boxes[order].contiguous(), torch.empty(len(order), dtype=torch.long)
        count = function(boxes.data_ptr(), len(order), threshold, kept.data_ptr())
        return order[kept[:count]]

    return nms


def own_match(checkout: Path) -> Any:
    """Return the function of val.py that matches predictions with objects."""
    import val

    return val.process_batch


def ours(data: dict[str, Any], checkout: Path) -> dict[str, float]:
    """Suppress and score as an evaluation of mtrain does."""
    from mtrain.models.common.nms import Selection, detections
    from mtrain.tasks.detection.annotations import AnnotatedImage, assemble
    from mtrain.tasks.detection.evaluator import CocoEvaluator

    selection = Selection(
        confidence=CONFIDENCE, iou_threshold=IOU, max_detections=KEPT, multi_label=True, class_agnostic=False
    )
    outputs, objects = data["outputs"], data["objects"]
    scale_pad = np.tile(np.array([1, 1, 0, 0], np.float32), (BATCH, 1))

    def once(count: int) -> dict[str, float]:
        images = []
        for number, rows in enumerate(objects[:count]):
            boxes = np.concatenate((rows[:, 1:3], rows[:, 3:] - rows[:, 1:3]), axis=1)
            crowd, areas = np.zeros(len(rows), bool), boxes[:, 2:].prod(1)
            name = f"{number:06}.jpg"  # images are sorted by name
            images.append(
                AnnotatedImage(Path(name), name, number, SIDE, SIDE, boxes, rows[:, 0].astype(int), crowd, areas)
            )
        annotations = assemble(images, class_names="0123456789", category_ids=range(CLASSES))
        began, suppressing = time.process_time(), 0.0
        evaluator = CocoEvaluator(annotations)
        for start in range(0, count, BATCH):
            before = time.process_time()
            found = [detections(rows, selection) for rows in outputs[start : start + BATCH]]
            suppressing += time.process_time() - before
            index = np.arange(start, start + len(found))
            evaluator.add({"index": index, "scale_pad": scale_pad[: len(found)]}, found)
        score = evaluator.result([evaluator.partial()])["AP"]
        return {"suppression": suppressing, "metrics": time.process_time() - began - suppressing, "AP": score}

    return timed(once, len(outputs))


def timed(once: Any, count: int) -> dict[str, float]:
    """Return the milliseconds per image of a run after one that warms up."""
    once(BATCH)
    found = once(count)
    taken = {part: 1000 * seconds / count for part, seconds in found.items() if part != "AP"}
    taken["all"] = taken["suppression"] + taken["metrics"]
    if "own figures" in taken:
        taken["all with own figures"] = taken["suppression"] + taken["own figures"]
    return {**taken, "AP": found["AP"]}


SIDES = {"original": original, "ours": ours}

if __name__ == "__main__":
    main()
