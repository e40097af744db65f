"""The command ``mtrain-trace``: record a training, compare two, and find which setting parts them."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from mtrain_trace import bisecting, causes, comparing, rank_checks, reading, running, wording
from mtrain_trace.files import CannotTell, TraceError, say
from mtrain_trace.reading import Trace

# An error has a code of its own: it is never the verdict that trainings differ.
SAME, DIFFERENT, WRONG_USE, CANNOT_TELL = 0, 1, 2, 3
"""Exit codes of all commands that compare, here and in mtrain."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code, see ``SAME``; ``run`` returns that of its command."""
    words = list(sys.argv[1:] if argv is None else argv)
    own, command = (words[: words.index("--")], words[words.index("--") + 1 :]) if "--" in words else (words, [])
    options = parser().parse_args(own)
    try:
        if options.verb == "run":
            return _run(options, command)
        return _bisect(options, command) if options.verb == "bisect" else _compare(options)
    except TraceError as error:
        say(f"error: {error}", file=sys.stderr)
        return code_of(error)
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return CANNOT_TELL
    except Exception as error:
        if os.environ.get("MTRAIN_DEBUG"):
            raise
        say(
            f"error: {type(error).__name__}: {error}; nothing is said about the trainings (MTRAIN_DEBUG=1 shows where this comes from)",
            file=sys.stderr,
        )
        return CANNOT_TELL


def code_of(error: TraceError) -> int:
    """Return the exit code for an error: whether the folders are wrong, or what they hold tells nothing."""
    return CANNOT_TELL if isinstance(error, CannotTell) else WRONG_USE


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command's own words, those before ``--``."""
    parser = argparse.ArgumentParser(
        prog="mtrain-trace",
        description="Record what a training does at every update, and find where two trainings part.",
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    run = verbs.add_parser(
        "run",
        help="record a training: mtrain-trace run --out A -- torchrun --nproc-per-node 2 train.py",
        usage="mtrain-trace run --out FOLDER [options] -- COMMAND ...",
    )
    run.add_argument("--out", required=True, type=Path, help="new folder for the trace")
    _add_recording(run)
    run.add_argument(
        "--calibrate",
        action="store_true",
        help="move each start weight by one unit in the last place: a repetition that shows how rounding grows",
    )
    compare = verbs.add_parser(
        "compare", help="compare two traces; exit code 0 the same, 1 different, 2 wrong use, 3 cannot tell"
    )
    compare.add_argument("a", type=Path, help="folder of the training that counts as right")
    compare.add_argument("b", type=Path, help="folder of the training whose differences are explained")
    compare.add_argument("--calibration", type=Path, help="a again, recorded with --calibrate")
    compare.add_argument("--optimizer", type=int, help="number of the optimizer, from 0; default: all of them")
    compare.add_argument("--bits", action="store_true", help="exit code 1 for rounding, too")
    compare.add_argument("--json", action="store_true", help="print JSON")
    bisect = verbs.add_parser(
        "bisect",
        help="find which of several settings parts a training: "
        "mtrain-trace bisect --out X --a '--lr 0.1' --b 'NAME=1 --lr 0.1 --compile' -- python train.py",
        usage="mtrain-trace bisect --out FOLDER --a SETTINGS --b SETTINGS [options] -- COMMAND ...",
    )
    bisect.add_argument("--out", required=True, type=Path, help="new folder for the traces")
    bisect.add_argument("--a", required=True, help="variables and flags of the training that counts as right")
    bisect.add_argument("--b", required=True, help="variables and flags of the training that parts")
    bisect.add_argument("--bits", action="store_true", help="rounding counts as parting, too")
    _add_recording(bisect)
    return parser


def _add_recording(verb: argparse.ArgumentParser) -> None:
    """Add the options of what is recorded."""
    verb.add_argument(
        "--every", type=_count, default=1, help="record weights, gradients and moments at every n-th update only"
    )
    verb.add_argument(
        "--at", type=_count, action="append", default=[], help="record each array at this update too (repeatable)"
    )
    verb.add_argument("--updates", type=_count, help="end the training after this many updates")


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text}: expected a number from 1")
    return number


def _run(options: argparse.Namespace, command: list[str]) -> int:
    """Start the command with the recorder in its Python processes, and say what was recorded."""
    if not command:
        raise TraceError("no command; write it after --, such as: mtrain-trace run --out A -- python train.py")
    settings = running.RecordingSettings(options.every, tuple(options.at), options.calibrate, options.updates)
    status = running.run(command, options.out, settings)
    traces = sorted(options.out.glob("rank-*")) if options.out.exists() else []
    if not traces:
        say(
            f"mtrain-trace: nothing was recorded: no process took a step of an optimizer of torch, Paddle or Keras "
            f"(exit code {status})",
            file=sys.stderr,
        )
        return status or WRONG_USE
    try:
        trace = reading.read(options.out)
    except reading.TraceError:
        if problem := running.refusal_of_disk(options.out):
            raise reading.TraceError(problem) from None
        raise
    for remark in trace.remarks:
        say(f"mtrain-trace: {remark}", file=sys.stderr)
    updates, processes = len(trace.updates), len(traces)
    say(
        f"mtrain-trace: {updates} update{'s' * (updates != 1)} of {processes} process{'es' * (processes != 1)} in {options.out}",
        file=sys.stderr,
    )
    return 128 - status if status < 0 else status


def compare_folders(
    a: Path, b: Path, *, calibration: Path | None = None, optimizer: int | None = None
) -> list[comparing.Comparison]:
    """Compare two traces: one comparison for each optimizer that both have, or for the one with a number.

    Raises:
        TraceError: a folder holds no trace.
    """
    nudged = reading.read_all(calibration, optimizer=optimizer) if calibration else []
    return compare_traces(*(reading.read_all(folder, optimizer=optimizer) for folder in (a, b)), calibration=nudged)


def compare_traces(
    ours: Sequence[Trace], theirs: Sequence[Trace], *, calibration: Sequence[Trace] = ()
) -> list[comparing.Comparison]:
    """Compare two trainings, given by the traces of their optimizers: one comparison for each that both have."""
    results: list[comparing.Comparison] = []
    for number, traces in enumerate(zip(ours, theirs)):
        with np.errstate(all="ignore"):  # numbers without end are compared like all others
            results.append(_compare_one(*traces, calibration[number] if number < len(calibration) else None))
    if not any(result.holds_anything for result in results):
        raise CannotTell(f"{ours[0].folder} and {theirs[0].folder}: hold nothing that can be compared")
    if len(ours) != len(theirs):
        counts = f"A has {len(ours)} optimizer(s), B {len(theirs)}"
        results[0].remarks.append(f"{counts}: the further ones are not compared, so this is not told to be the same")
        results[0].is_partial = True
    return results


def _compare_one(a: Trace, b: Trace, nudged: Trace | None) -> comparing.Comparison:
    """Compare one optimizer of two trainings, and explain what parts them.

    Raises:
        CannotTell: a trace holds what no recorder writes.
    """
    with reading.refusing_what_is_broken(f"{a.folder} and {b.folder}"):
        result = comparing.compare(a, b, calibration=nudged)
        result.sentences = causes.explain(result)
        known = {*rank_checks.findings(a)}
        result.findings = [words for words in rank_checks.findings(b) if words not in known]
        if result.parting is None:
            result.findings += rank_checks.length(a, b)
        return result


def is_parted(results: Sequence[comparing.Comparison], *, bits: bool = False) -> bool:
    """Return whether trainings part, be it by rounding with ``bits``, or something is wrong among the ranks of B."""
    return any(
        result.parting is not None or result.findings or (bits and result.verdict != "same bits") for result in results
    )


def verdict_code(results: Sequence[comparing.Comparison], *, bits: bool = False) -> int:
    """Return the exit code for comparisons."""
    if is_parted(results, bits=bits):
        return DIFFERENT
    return CANNOT_TELL if any(result.is_partial for result in results) else SAME


def json_of(results: Sequence[comparing.Comparison]) -> str:
    """Return the comparisons of two trainings as JSON: one object, or a list where they have several optimizers."""
    values = [wording.as_json(result) for result in results]
    return json.dumps(values[0] if len(values) == 1 else values, indent=1)


def _compare(options: argparse.Namespace) -> int:
    results = compare_folders(options.a, options.b, calibration=options.calibration, optimizer=options.optimizer)
    say(json_of(results) if options.json else "\n".join(wording.text(results)))
    return verdict_code(results, bits=options.bits)


def _bisect(options: argparse.Namespace, command: list[str]) -> int:
    """Find the settings that part a training; exit code 1 where there are some."""
    if not command:
        raise TraceError("no command; write it after --, such as: mtrain-trace bisect ... -- python train.py")
    bisector = bisecting.Bisector(
        command,
        (options.a, options.b),
        out=options.out,
        record=running.RecordingSettings(options.every, tuple(options.at), updates=options.updates),
        bits=options.bits,
        tell=say,
    )
    result = bisector.find()
    if not result.culprits:
        say(f"\nTHE SAME under both settings ({result.starts} trainings)")
        return SAME
    for words, comparison in result.culprits:
        say(f"\nPARTED BY {words}")
        say("\n".join(wording.parting(comparison)))
    say(f"\n{len(result.culprits)} of {len(result.differences)} differences matter ({result.starts} trainings)")
    return DIFFERENT
