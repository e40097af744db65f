"""The program of one rank: it trains, evaluates, predicts, adds up numbers or runs a script, as its arguments say.

A launcher starts it as ``python -m mtrain.rank.worker --run-dir RUN [--mode train|compare|evaluate|predict|allreduce|script]
[--resume CHECKPOINT] [-- SCRIPT ARGUMENTS]``.
"""

import argparse
import json
import os
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from mtrain.rank import process
from mtrain.rank.records import log_to_stderr
from mtrain.rank.spec.evaluate import evaluate_only
from mtrain.rank.spec.train import train, train_repeatedly
from mtrain.spec import config
from mtrain.spec.resolved import Resolved
from mtrain.spec.trial import Trial
from mtrain.system.ending import end_with
from mtrain.system.runfolder import ROUNDS, RunFolder, keep_private


def arguments_of(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the arguments that a plan wrote."""
    parser = argparse.ArgumentParser(
        prog="mtrain.rank.worker", description="one rank of a job; started by `mtrain train`"
    )
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument(
        "--mode",
        choices=("train", "compare", "evaluate", "predict", "allreduce", "script"),
        default="train",
    )
    parser.add_argument("--resume", type=Path)
    parser.add_argument("--script-digest", help="SHA-256 that the script must have")
    parser.add_argument("--outside-paths", default="", help="paths of the spec that its user has set")
    parser.add_argument("--trial", type=Trial.of, help="what `mtrain compare` changes about the script's training")
    parser.add_argument("script", nargs="*", help="with --mode script: the script and its arguments")
    return parser.parse_args(argv)


def may_be_copied(argv: Sequence[str]) -> bool:
    """Import what ranks with these arguments need; return whether they may be copies of a process that has imported torch."""
    arguments = arguments_of(argv)
    if arguments.mode != "script":
        return True
    from mtrain.rank.script_mode import allows_torch_ahead

    if not arguments.script or not allows_torch_ahead(Path(arguments.script[0])):
        return False
    import_module("mtrain.rank.script.session")
    return True


def main(argv: Sequence[str] | None = None) -> int:
    """Run one rank with the arguments that a plan wrote; return the exit code."""
    arguments = arguments_of(argv)
    keep_private()
    resolved = Resolved.of(config.read(RunFolder(arguments.run_dir).spec_to_read))
    log_dir = resolved.spec.cluster.log_dir
    run_folder = RunFolder(arguments.run_dir, Path(log_dir) if log_dir else None)
    resume, mode = arguments.resume, arguments.mode

    def work(stop: process.StopRequest, leave: process.Leaving) -> None:
        log_to_stderr()
        if mode == "train":
            train(resolved, run_folder, resume, stop=stop, leave=leave)
        elif mode == "compare":
            rounds = json.loads((run_folder.path / ROUNDS).read_text(encoding="utf-8"))
            train_repeatedly(resolved, run_folder, [Path(folder) for folder in rounds], stop=stop, leave=leave)
        elif mode == "evaluate":
            evaluate_only(resolved, run_folder, resume, stop=stop, leave=leave)
        elif mode == "predict":
            # Imported here, as are the modes below: a rank that trains does not wait for what it does not use.
            from mtrain.rank.spec.predict import predict

            predict(resolved, run_folder.path, resume, leave=leave)
        elif mode == "allreduce":
            from mtrain.rank.allreduce import allreduce

            allreduce(resolved, run_folder, leave=leave)
        else:
            run_own_script(resolved, run_folder, arguments, stop=stop, leave=leave)

    return process.run(work, run_folder=run_folder, environ=os.environ)


def run_own_script(
    resolved: Resolved,
    run_folder: RunFolder,
    arguments: argparse.Namespace,
    *,
    stop: process.StopRequest,
    leave: process.Leaving,
) -> None:
    """Run the user's script, which calls ``mtrain.session`` or joins the ranks itself."""
    from mtrain.rank.script.job import RankJob
    from mtrain.rank.script_mode import knows_mtrain, run_script

    script, *words = arguments.script
    # A script that does not know mtrain never asks whether it is to end, so a signal must act on it as on any program.
    if not knows_mtrain(Path(script)):
        stop.leave_to_script()
    job = RankJob(
        resolved=resolved,
        run_folder=run_folder,
        resume=arguments.resume,
        outside_paths=frozenset(filter(None, arguments.outside_paths.split(","))),
        trial=arguments.trial,
        stop=stop,
        save_requested=stop.save,
        take_back=stop.take_back,
        leave=leave,
    )
    run_script(job, Path(script), words, digest=arguments.script_digest)


if __name__ == "__main__":
    end_with(main)
