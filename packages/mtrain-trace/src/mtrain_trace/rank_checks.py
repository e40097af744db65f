"""Look at one training of several ranks for what its ranks must agree on, or must not, whatever it is compared with."""

from __future__ import annotations

import math
from collections import Counter

from mtrain_trace.files import read_lines
from mtrain_trace.reading import Trace
from mtrain_trace.recorder import ARRAYS

EPOCHS = "epochs.jsonl"


def findings(trace: Trace) -> list[str]:
    """Return in words what is wrong among the ranks of a training; empty for one rank."""
    if trace.ranks < 2 or trace.optimizer_facts["sharded"]:
        return []
    return [*_starts(trace), *_saves(trace), *_metrics(trace), *_random_numbers(trace)]


def length(a: Trace, b: Trace) -> list[str]:
    """Return in words how two trainings differ in length alone, where the ranks explain it."""
    if not a.updates or len(a.updates) == len(b.updates):
        return []
    factor, ranks = len(b.updates) / len(a.updates), b.ranks / a.ranks
    if math.isclose(factor, ranks) and a.samples_per_update == b.samples_per_update:
        return [
            f"B makes {len(b.updates)} updates, A {len(a.updates)}, as many times as it has ranks: the steps of an epoch are not "
            "divided by the number of ranks (steps_per_epoch // hvd.size())"
        ]
    return []


def _starts(trace: Trace) -> list[str]:
    """Say which ranks begin with other weights than rank 0."""
    first: dict[str, str] = {}
    others = []
    for process in sorted(trace.processes, key=lambda process: int(process["rank"])):
        for record in read_lines(process["folder"] / ARRAYS):
            if record["update"] == 0 and record["optimizer"] == trace.optimizer:
                digests = {name: row[0] for name, row in record["weights"].items()}
                first = first or digests
                if digests != first:
                    others.append(int(process["rank"]))
    if not others:
        return []
    return [
        f"ranks {others} begin with other weights than rank 0: they are not broadcast before the first update "
        "(hvd.broadcast_variables, BroadcastGlobalVariablesCallback; DDP does it itself), or are drawn with another seed"
    ]


def _saves(trace: Trace) -> list[str]:
    """Say where several ranks write the same files."""
    # A rank that writes a file many times counts once.
    writers = Counter(path for process in trace.processes for path in set(process.get("saves") or ()))
    shared = sorted(path for path, count in writers.items() if count > 1)
    if not shared:
        return []
    return [
        f"{writers[shared[0]]} ranks write {shared[0]}: the files of one destroy those of another; save on rank 0 alone "
        "(if hvd.rank() == 0)"
    ]


def _metrics(trace: Trace) -> list[str]:
    """Say which metrics of an epoch the ranks do not share."""
    by_epoch: dict[int, list[dict[str, float]]] = {}
    for process in trace.processes:
        for record in read_lines(process["folder"] / EPOCHS):
            by_epoch.setdefault(int(record["epoch"]), []).append(record["logs"])
    for epoch, logs in sorted(by_epoch.items()):
        for name in logs[0]:
            values = [one[name] for one in logs if name in one]
            # Averages over ranks differ in their last digits where each rank computes its own.
            if max(values) - min(values) > 1e-6 * max(map(abs, values)):
                shown = ", ".join(f"{value:.6g}" for value in values[:4])
                return [
                    f"the ranks have other metrics after epoch {epoch + 1} ({name}: {shown}): they are not averaged over the ranks "
                    "(hvd.callbacks.MetricAverageCallback), so schedules and the choice of the best checkpoint differ too"
                ]
    return []


def _random_numbers(trace: Trace) -> list[str]:
    """Say where dropout leaves out the same elements on all ranks; of torch, a comparison tells it where it matters."""
    first = trace.processes[0]
    if first.get("framework") != "tensorflow" or not first.get("dropouts") or not trace.updates:
        return []
    states = [state for state in trace.updates[0].rng if state]
    if len(states) > 1 and len(set(states)) == 1:
        return [
            "all ranks draw the same random numbers: dropout leaves out the same elements on each (one seed for all ranks; add "
            "hvd.rank() to the seed after the model is built)"
        ]
    return []
