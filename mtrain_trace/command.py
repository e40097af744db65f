"""The command ``mtrain-trace``: record a training, and compare two."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from mtrain_trace import causes, comparing, reading, wording
from mtrain_trace.recorder import AT_VARIABLE, EVERY_VARIABLE, NUDGE_VARIABLE
from mtrain_trace.startup import VARIABLE

SAME, DIFFERENT, WRONG_USE = 0, 1, 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code: 0 the same, 1 different, 2 wrong use; ``run`` returns that of its command."""
    words = list(sys.argv[1:] if argv is None else argv)
    own, command = (words[: words.index("--")], words[words.index("--") + 1 :]) if "--" in words else (words, [])
    options = parser().parse_args(own)
    try:
        if options.verb == "run":
            return _run(options, command)
        return _compare(options)
    except reading.TraceError as error:
        print(f"error: {error}", file=sys.stderr)
        return WRONG_USE
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return WRONG_USE


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command's own words, those before ``--``."""
    parser = argparse.ArgumentParser(
        prog="mtrain-trace",
        description="Record what a training does at every update, and find where two trainings part.",
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    run = verbs.add_parser(
        "run", help="record a training: mtrain-trace run --out A -- torchrun --nproc-per-node 2 train.py"
    )
    run.add_argument("--out", required=True, type=Path, help="new folder for the trace")
    run.add_argument(
        "--every", type=_count, default=1, help="record weights, gradients and moments at every n-th update only"
    )
    run.add_argument(
        "--at", type=_count, action="append", default=[], help="record each array at this update too (repeatable)"
    )
    run.add_argument(
        "--calibrate",
        action="store_true",
        help="move one start weight by one unit in the last place: a repetition that shows how rounding grows",
    )
    compare = verbs.add_parser("compare", help="compare two traces; exit code 0 the same, 1 different")
    compare.add_argument("a", type=Path, help="folder of the training that counts as right")
    compare.add_argument("b", type=Path, help="folder of the training whose differences are explained")
    compare.add_argument("--calibration", type=Path, help="a again, recorded with --calibrate")
    compare.add_argument("--optimizer", type=int, help="number of the optimizer, from 0; default: all of them")
    compare.add_argument("--bits", action="store_true", help="exit code 1 for rounding, too")
    compare.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text}: expected a number from 1")
    return number


def _run(options: argparse.Namespace, command: list[str]) -> int:
    """Start the command with the recorder in its Python processes."""
    if not command:
        raise reading.TraceError("no command; write it after --, such as: mtrain-trace run --out A -- python train.py")
    if options.out.exists() and any(options.out.iterdir()):
        raise reading.TraceError(f"{options.out}: is not empty; a trace gets a folder of its own")
    environment = dict(os.environ)
    boot = str(Path(__file__).resolve().parent / "boot")
    environment["PYTHONPATH"] = os.pathsep.join([boot, *filter(None, [environment.get("PYTHONPATH")])])
    environment[VARIABLE] = str(options.out.resolve())
    environment[EVERY_VARIABLE] = str(options.every)
    environment[AT_VARIABLE] = ",".join(map(str, options.at))
    if options.calibrate:
        environment[NUDGE_VARIABLE] = "1"
    try:
        status = subprocess.run(command, env=environment, check=False).returncode  # noqa: S603  (the user's own command)
    except OSError as error:
        raise reading.TraceError(f"{command[0]}: cannot be started: {error.strerror}") from error
    traces = sorted(options.out.glob("rank-*")) if options.out.exists() else []
    if not traces:
        print(
            f"mtrain-trace: nothing was recorded: no process took a step of a torch optimizer (exit code {status})",
            file=sys.stderr,
        )
        return status or WRONG_USE
    trace = reading.read(options.out)
    for remark in trace.remarks:
        print(f"mtrain-trace: {remark}", file=sys.stderr)
    print(f"mtrain-trace: {len(trace.updates)} updates of {len(traces)} process(es) in {options.out}", file=sys.stderr)
    return 128 - status if status < 0 else status


def _compare(options: argparse.Namespace) -> int:
    count = min(reading.optimizers_of(options.a), reading.optimizers_of(options.b)) if options.optimizer is None else 0
    numbers = range(count) if options.optimizer is None else [options.optimizer]
    status, values = SAME, []
    for number in numbers:
        a, b = reading.read(options.a, optimizer=number), reading.read(options.b, optimizer=number)
        calibration = reading.read(options.calibration, optimizer=number) if options.calibration else None
        result = comparing.compare(a, b, calibration=calibration)
        result.sentences = causes.explain(result)
        if result.parting is not None or (options.bits and result.verdict != "same bits"):
            status = DIFFERENT
        if options.json:
            values.append(wording.as_json(result))
        else:
            front = [f"optimizer {number}:"] if len(list(numbers)) > 1 else []
            print("\n".join([*front, *wording.lines(result)]))
    if options.json:
        print(json.dumps(values[0] if len(values) == 1 else values, indent=1))
    return status
