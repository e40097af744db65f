"""Measure mtrain on a machine with GPUs, in one command: `scripts/gpu-bench`. A table and a JSON file are the result.

It runs the conformance kit of each backend on 1, 2, 4, ... GPUs, short jobs in each precision, and YOLOv5l and PP-YOLOE-l on
the images of ``--data``, in turn with the originals' own scripts where their checkouts are given; without ``--data``, on the
embedded digits. Nothing is judged here but exit codes: the file holds what was measured, with the commands and the machine.
``--tiny`` does all of it on a CPU, with small models: it shows that the script works and measures nothing.
"""

import argparse
import json
import os
import platform
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FORMAT = 1
LIBRARIES = {"ddp": "torch", "fleet": "paddle", "deepspeed": "deepspeed", "horovod": "horovod"}
"""What a backend needs; it is left out where that is not installed."""
WARM_UP = 10
"""Updates at the start of a job whose records do not count."""
TAIL = 2000
"""Characters of the output of a command that failed."""
ORIGINALS = {
    "yolov5": "{python} -m torch.distributed.run --nproc-per-node {gpus} train.py --data {data_file} --weights '' --cfg yolov5l.yaml "
    "--img {size} --batch-size {batch} --epochs {epochs} --device {devices} --noval --nosave --project {work} --exist-ok",
    "paddledetection": "{python} -m paddle.distributed.launch --gpus {devices} tools/train.py -c "
    "configs/ppyoloe/ppyoloe_plus_crn_l_80e_coco.yml -o epoch={epochs} TrainReader.batch_size={share} "
    "TrainDataset.dataset_dir={data} save_dir={work}",
}
"""Commands of the originals, run in their checkouts."""
PAIRS = {"yolov5": ("yolov5l", ("ddp",), "fp16"), "paddledetection": ("ppyoloe_l", ("ddp", "fleet"), "fp32")}
"""The original, mtrain's spec that does the same, the backends that train it, and the precision that the original has by itself."""
KIT_GPUS = (1, 2, 4, 6)
"""Numbers of ranks among which the kit's small batch divides."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is run."""

    arguments: argparse.Namespace
    work: Path
    gpus: Sequence[int]
    """Numbers of GPUs, or of ranks on the CPU with ``--tiny``."""

    @property
    def tiny(self) -> bool:
        """Whether everything is small and on the CPU."""
        return bool(self.arguments.tiny)

    def devices(self, count: int) -> list[str]:
        """Return the arguments of mtrain for ``count`` ranks."""
        if self.tiny:
            return ["--devices", "cpu", "--nproc-per-node", str(count)]
        return ["--devices", ",".join(map(str, range(count)))]


@dataclass(kw_only=True)
class Results:
    """What was measured so far; written after each command, so that nothing is lost."""

    path: Path
    machine: Mapping[str, Any]
    correct: list[dict[str, Any]] = field(default_factory=list)
    speed: list[dict[str, Any]] = field(default_factory=list)

    def add(self, kind: str, row: dict[str, Any]) -> None:
        """Add a row to ``correct`` or ``speed``, show it, and write the file."""
        getattr(self, kind).append(row)
        told = {key: value for key, value in row.items() if key not in ("command", "kit", "output", "records")}
        print(f"{kind}: {json.dumps(told)}", flush=True)
        self.write()

    def failed(self) -> list[dict[str, Any]]:
        """Return the rows whose command failed."""
        return [row for row in (*self.correct, *self.speed) if row["exit"]]

    def write(self) -> None:
        """Write the file."""
        content = {"format": FORMAT, "machine": self.machine, "correct": self.correct, "speed": self.speed}
        self.path.write_text(json.dumps({**content, "failed": len(self.failed())}, indent=1) + "\n")


def ran(command: Sequence[str], *, folder: Path = ROOT, limit_s: float) -> dict[str, Any]:
    """Run a command; return it, its exit code (-1: it took too long), its seconds, and the end of its output if it failed."""
    began = time.perf_counter()
    try:
        process = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=limit_s)
        code, output = process.returncode, process.stdout + process.stderr
    except subprocess.TimeoutExpired as error:
        code, output = -1, f"no end after {error.timeout:.0f} s"
    except OSError as error:
        code, output = 127, str(error)
    seconds = round(time.perf_counter() - began, 3)
    return {
        "command": shlex.join(command),
        "exit": code,
        "seconds": seconds,
        **({"output": output[-TAIL:]} if code else {}),
    }


def mtrain(*words: str | Path) -> list[str]:
    """Return a command of mtrain in this environment."""
    return [sys.executable, "-m", "mtrain", *map(str, words)]


# ---------------------------------------------------------------------------------------------------------- the machine
def machine() -> dict[str, Any]:
    """Describe this machine and the versions of what computes."""
    gpus = _answer("nvidia-smi", "--query-gpu=name,driver_version,memory.total,power.limit", "--format=csv,noheader")
    code = (
        "import importlib.metadata as m, json; print(json.dumps({n: m.version(n) for n in ('mtrain', 'torch', 'paddlepaddle', "
        "'paddlepaddle-gpu', 'deepspeed', 'horovod') if any(d.metadata['Name'] == n for d in m.distributions())}))"
    )
    return {
        "gpus": [line.strip() for line in gpus.splitlines()],
        "links": _answer("nvidia-smi", "topo", "-m"),
        "versions": json.loads(_answer(sys.executable, "-c", code) or "{}"),
        "commit": _answer("git", "rev-parse", "HEAD").strip(),
        "python": platform.python_version(),
        "system": platform.platform(),
        "cores": len(os.sched_getaffinity(0)),
    }


def _answer(*command: str) -> str:
    try:
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def numbers_of_gpus(present: int) -> list[int]:
    """Return 1, 2, 4, ... up to the number that is present."""
    return [2**i for i in range(present.bit_length()) if 2**i <= present]


# ---------------------------------------------------------------------------------------------------------- correctness
def check_backends(plan: Plan, results: Results) -> None:
    """Run the conformance kit of each backend for each number of GPUs that it can take."""
    for backend in plan.arguments.backends:
        largest = max(plan.gpus)
        for count in sorted({*plan.gpus, *((6,) if largest >= 6 else ())} & set(KIT_GPUS)):
            if backend == "solo" and count > 1:
                continue
            found = plan.work / f"kit-{backend}-{count}.json"
            device = "cpu" if plan.tiny else "cuda"
            words = ["plugins", "test", backend, "--kind", "backends", "--ranks", str(count), "--json", found]
            only = ["--only", "collective.reduces"] if plan.tiny else []
            row = ran(mtrain(*words, "-o", f"backend.options.device={device}", *only), limit_s=plan.arguments.limit_s)
            kit = json.loads(found.read_text()) if found.exists() else None
            results.add("correct", {"what": "kit", "backend": backend, "gpus": count, **row, "kit": kit})


def check_precisions(plan: Plan, results: Results) -> None:
    """Train the digits in each precision, on the fewest and the most GPUs, with metrics read at once and one update later."""
    precisions = ("fp32",) if plan.tiny else ("fp32", "bf16", "fp16")
    counts = sorted({min(plan.gpus), max(plan.gpus)})
    for backend, precision, count in product(plan.arguments.backends, precisions, counts):
        for late in (False, True):
            results.add("correct", precision_row(plan, backend, precision, count, late=late))


def precision_row(plan: Plan, backend: str, precision: str, count: int, *, late: bool) -> dict[str, Any]:
    """Train the digits for some updates; return what they came to."""
    name = f"digits-{backend}-{precision}-{count}-{'late' if late else 'prompt'}"
    values = [f"backend.name={backend}", f"train.precision={precision}"]
    values += [f"backend.options.late_figures={str(late).lower()}"]
    values += ["train.epochs=null", f"train.updates={6 if plan.tiny else 60}"]
    row, folder = job(plan, "digits", name, count, values)
    records, summary = read_run(folder)
    return {
        "what": "precision",
        "backend": backend,
        "precision": precision,
        "gpus": count,
        **row,
        "late": late,
        "weights_sha256": summary.get("weights_sha256"),
        "device": summary.get("device"),
        "last_losses": [record["losses"]["total"] for record in records][-3:],
        "skipped": records[-1]["skipped_updates"] if records else None,
    }


# ---------------------------------------------------------------------------------------------------------------- speed
def job(plan: Plan, spec: str, name: str, count: int, values: Sequence[str]) -> tuple[dict[str, Any], Path]:
    """Run a job of mtrain; return what ``ran`` returns, and the run folder."""
    quiet = [
        f"report.dir={plan.work / 'runs'}",
        "report.plots=false",
        "report.tensorboard=false",
        "evaluate.enabled=false",
    ]
    pairs = [word for value in (*quiet, *values) for word in ("-o", value)]
    words = ["train", "-c", spec, "--name", name, *plan.devices(count), *pairs]
    return ran(mtrain(*words), limit_s=plan.arguments.limit_s), plan.work / "runs" / name


def read_run(folder: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return the records of updates and the summary of a run; empty where there are none."""
    lines, summary = folder / "metrics.jsonl", folder / "summary.json"
    rows = [json.loads(line) for line in lines.read_text().splitlines()] if lines.exists() else []
    return [row for row in rows if row["kind"] == "update"], json.loads(summary.read_text()) if summary.exists() else {}


def measure(plan: Plan, results: Results) -> None:
    """Train for one epoch and for two with mtrain and with the originals; the difference is that of one epoch."""
    for original, (spec, backends, precision) in PAIRS.items():
        checkout = getattr(plan.arguments, original)
        for count in plan.gpus:
            for backend in backends:
                if backend in plan.arguments.backends:
                    results.add(
                        "speed", of_mtrain(plan, spec, backend, count, precision="fp32" if plan.tiny else precision)
                    )
            if checkout is not None:
                results.add("speed", of_original(plan, original, Path(checkout), count))


def of_mtrain(plan: Plan, spec: str, backend: str, count: int, *, precision: str) -> dict[str, Any]:
    """Return the images per second of mtrain, by two jobs and by the records of the longer one."""
    share = plan.arguments.batch_per_gpu
    values = [f"train.batch_size={share * count}", f"backend.name={backend}", f"train.precision={precision}"]
    values += [f"data.image_size={64 if plan.tiny else plan.arguments.size}"]
    if on_digits := plan.tiny or plan.arguments.data is None:
        model = ("yolov5n", "yolov5l") if spec.startswith("yolo") else ("ppyoloe_s", "ppyoloe_l")
        values += [f"model.name={model[not plan.tiny]}"]
    else:
        values += [f"data.root={plan.arguments.data}"]
    # Of the few digits more GPUs need more epochs for as many updates.
    length = count if on_digits else 1
    seconds, row, records, summary = [], {}, [], {}
    for number in (1, 2):
        name = f"{spec}-{backend}-{count}-{number}"
        row, folder = job(
            plan, "digits" if on_digits else spec, name, count, [*values, f"train.epochs={number * length}"]
        )
        records, summary = read_run(folder)
        seconds.append(row["seconds"])
        if row["exit"]:
            break
    rates = [record["samples_per_second"] for record in records[WARM_UP:]]
    images = records[-1]["updates_per_epoch"] * share * count * length if records else None
    waits = [record["data_wait_share"] for record in records[WARM_UP:]]
    measured = {
        "by_records": statistics.median(rates) if rates else None,
        **by_difference(seconds, images),
        "images": images,
        "data_wait_share": statistics.median(waits) if waits else None,
        "memory_bytes": max((record["memory_bytes"] for record in records), default=None),
        "device": summary.get("device"),
    }
    told = {"who": "mtrain", "spec": spec, "backend": backend, "precision": precision, "gpus": count}
    return {**told, **row, **measured}


def of_original(plan: Plan, original: str, checkout: Path, count: int) -> dict[str, Any]:
    """Return the images per second of an original's own script, by two runs."""
    given, seconds, row = plan.arguments, [], {}
    template = getattr(given, f"{original}_command") or ORIGINALS[original]
    for epochs in (1, 2):
        facts = {
            "python": getattr(given, f"{original}_python") or sys.executable, "gpus": count, "epochs": epochs, "size": given.size,
            "devices": ",".join(map(str, range(count))), "batch": given.batch_per_gpu * count, "share": given.batch_per_gpu,
            "data": given.data, "data_file": given.yolov5_data, "work": plan.work / original,
        }  # fmt: skip
        row = ran(shlex.split(template.format(**facts)), folder=checkout, limit_s=given.limit_s)
        seconds.append(row["seconds"])
        if row["exit"]:
            break
    return {"who": original, "gpus": count, **row, **by_difference(seconds, given.images)}


def by_difference(seconds: Sequence[float], images: int | None) -> dict[str, Any]:
    """Return the seconds of one epoch, and images per second where their number is known."""
    if len(seconds) < 2:
        return {"epoch_s": None, "by_difference": None}
    epoch_s = seconds[1] - seconds[0]
    rate = images / epoch_s if images is not None and epoch_s > 0 else None
    return {"epoch_s": round(epoch_s, 3), "by_difference": rate}


def table(results: Results) -> list[str]:
    """Return a line for people for each row."""
    lines = [
        f"{'part':<10}{'backend':<10}{'precision':<10}{'GPUs':>4}  {'exit':>4}{'seconds':>9}  result",
    ]
    for row in (*results.correct, *results.speed):
        facts = []
        if (rate := row.get("by_difference") or row.get("by_records")) is not None:
            facts = [f"{row.get('spec', row.get('who'))}: {rate:.1f} images/s"]
        if row.get("memory_bytes"):
            facts += [f"{row['memory_bytes'] / 2**30:.2f} GiB", f"waiting for data {row['data_wait_share'] or 0:.0%}"]
        if row.get("weights_sha256"):
            facts += [f"weights {row['weights_sha256'][:12]}", "metrics read late" if row["late"] else ""]
        told = (row.get("what", "speed"), row.get("backend", row.get("who")), row.get("precision", ""))
        lines.append(
            "{:<10}{:<10}{:<10}".format(*told)
            + f"{row['gpus']:>4}  {row['exit']:>4}{row['seconds']:>9.1f}  {', '.join(filter(None, facts))}"
        )
    return lines


# ----------------------------------------------------------------------------------------------------------------- main
PARTS: Mapping[str, Callable[[Plan, Results], None]] = {
    "kit": check_backends,
    "precisions": check_precisions,
    "speed": measure,
}


def parsed(words: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="gpu-bench", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--out", type=Path, default=Path("gpu-bench.json"), help="the JSON file; gpu-bench.json by default"
    )
    parser.add_argument("--tiny", action="store_true", help="everything small and on the CPU, to try the script")
    parser.add_argument("--only", choices=PARTS, action="append", help="a part; can be repeated")
    parser.add_argument("--gpus", help="numbers of GPUs, such as 1,2,4,8; by default powers of two up to what is there")
    parser.add_argument("--backends", default="ddp,fleet,deepspeed,horovod", help="those to test, if installed")
    parser.add_argument(
        "--data", type=Path, help="COCO's folder; some thousand images are enough; by default the embedded digits"
    )
    parser.add_argument("--images", type=int, help="training images in it, for the originals' images per second")
    parser.add_argument("--batch-per-gpu", type=int, default=16)
    parser.add_argument("--size", type=int, default=640, help="side of the images in pixels")
    parser.add_argument("--limit-s", type=float, default=7200.0, help="seconds for one command")
    parser.add_argument("--yolov5-data", type=Path, help="YOLOv5's own file that describes the same images")
    for original in ORIGINALS:
        parser.add_argument(f"--{original}", type=Path, help="checkout of the original")
        parser.add_argument(f"--{original}-python", help="interpreter of the original; by default this one")
        parser.add_argument(f"--{original}-command", help=f"in place of: {ORIGINALS[original]}")
    arguments = parser.parse_args(words)
    arguments.backends = [name for name in arguments.backends.split(",") if find_spec(LIBRARIES.get(name, "mtrain"))]
    if arguments.gpus is not None and not re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", arguments.gpus):
        parser.error(f"--gpus: {arguments.gpus!r} given; expected numbers of GPUs such as 1,2,4")
    for original in ORIGINALS:
        folder = getattr(arguments, original)
        if folder is not None and not folder.is_dir():
            parser.error(f"--{original}: {folder} is no folder; give the checkout of the original")
    return arguments


def missing(arguments: argparse.Namespace) -> str | None:
    """Return what the last part, after hours of measurements, would lack; None: nothing."""
    if arguments.tiny or (arguments.only and "speed" not in arguments.only):
        return None
    commands = {name: getattr(arguments, f"{name}_command") or ORIGINALS[name] for name in ORIGINALS}
    wanted = [commands[name] for name in ORIGINALS if getattr(arguments, name) is not None]
    if wanted and arguments.data is None:
        return "--data: not given; expected COCO's folder, of which some thousand images are enough"
    if wanted and arguments.images is None:
        return "--images: not given; expected the number of training images, for the originals' images per second"
    if any("{data_file}" in command for command in wanted) and arguments.yolov5_data is None:
        return "--yolov5-data: not given; expected the original's own file that describes the images"
    return None


def main(words: Sequence[str] | None = None) -> int:
    """Run all parts; return 1 if a command failed, 2 if there is nothing to run on."""
    arguments = parsed(words)
    here = machine()
    present = len(here["gpus"])
    if not present and not arguments.tiny:
        print("gpu-bench: nvidia-smi shows no GPU; with --tiny the script runs on the CPU", file=sys.stderr)
        return 2
    if lack := missing(arguments):
        print(f"gpu-bench: {lack}", file=sys.stderr)
        return 2
    chosen = arguments.gpus.split(",") if arguments.gpus else [1] if arguments.tiny else numbers_of_gpus(present)
    results = Results(path=arguments.out.absolute(), machine=here)
    with tempfile.TemporaryDirectory(prefix="gpu-bench-") as folder:
        plan = Plan(arguments=arguments, work=Path(folder), gpus=[int(count) for count in chosen])
        for name, part in PARTS.items():
            if not arguments.only or name in arguments.only:
                part(plan, results)
    results.write()
    print("\n".join(("", *table(results), "")))
    print(f"{len(results.failed())} commands failed; the results are in {results.path}")
    return 1 if results.failed() else 0


if __name__ == "__main__":
    sys.exit(main())
