"""The samplers of `mtrain sweep` on functions whose optimum is known, without any training.

    python benchmarks/search_samplers.py --trials 50 --seeds 0,1,2,3,4

Proposals come from the code of a sweep, one trial after the other. For each function and sampler the table has the median over
the seeds of the distance from the optimum that the best trial has after 10, 20, 30 ... trials, and the seeds of which it is
nearer at the end than random values with the same seed.
"""

import argparse
import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from optuna.trial import FrozenTrial, create_trial

from mtrain_sweep.definition import Sampler, SweepDefinition
from mtrain_sweep.proposals import propose
from mtrain_sweep.space import read_space

SAMPLERS: tuple[Sampler, ...] = ("random", "tpe")
STEP = 10


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A function to be made small over a search space; its smallest value is ``least``."""

    space: Mapping[str, Any]
    start: Mapping[str, Any]
    """What the spec would have: some samplers begin there."""
    value: Callable[[Mapping[str, Any]], float]
    least: float


def branin(at: Mapping[str, Any]) -> float:
    """Return Branin's function, which has three equal minima (Dixon and Szego 1978)."""
    x, y = at["x"], at["y"]
    valley = y - 5.1 / (4 * math.pi**2) * x**2 + 5 / math.pi * x - 6
    return float(valley**2 + 10 * (1 - 1 / (8 * math.pi)) * math.cos(x) + 10)


RULES = {"sgd": 0.5, "adam": 0.0, "lamb": 1.0, "lion": 2.0}


def tuning(at: Mapping[str, Any]) -> float:
    """Return squared distances of two logarithms from their best values, and a cost of the choice: as tuning often looks."""
    distance = (math.log10(at["rate"]) + 2.5) ** 2 + 0.3 * (math.log10(at["decay"]) + 4) ** 2
    return float(distance + RULES[at["rule"]])


PROBLEMS = {
    "Branin": Problem(
        space={"x": {"low": -5.0, "high": 10.0}, "y": {"low": 0.0, "high": 15.0}},
        start={"x": 2.5, "y": 7.5},
        value=branin,
        least=10 / (8 * math.pi),
    ),
    "rates": Problem(
        space={
            "rate": {"low": 1e-6, "high": 1.0, "log": True},
            "decay": {"low": 1e-8, "high": 1.0, "log": True},
            "rule": {"choices": list(RULES)},
        },
        start={"rate": 1e-3, "decay": 1e-4, "rule": "sgd"},
        value=tuning,
        least=0.0,
    ),
}


def search(problem: Problem, sampler: Sampler, *, trials: int, seed: int) -> list[float]:
    """Return the distance of the best trial so far from the optimum, after each trial."""
    parameters = [one.model_copy(update={"start": problem.start[one.name]}) for one in read_space(problem.space)]
    asked = SweepDefinition(
        sampler=sampler, pruner="none", metric="value", direction="min", seed=seed, trials=trials,
        parameters=tuple(parameters), folder="/", base={},
    )  # fmt: skip
    done: list[FrozenTrial] = []
    for number in range(trials):
        one = propose(asked, done, number)
        value = problem.value(one.params)
        notes = {"params": one.params, "distributions": one.distributions, "system_attrs": one.system_attrs}
        done.append(create_trial(value=value, **notes))  # type: ignore[arg-type]
    values = [float(trial.value or 0.0) - problem.least for trial in done]
    return [min(values[: count + 1]) for count in range(trials)]


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=50)
    parser.add_argument("--seeds", default="0,1,2,3,4")
    parser.add_argument("--samplers", default=",".join(SAMPLERS))
    options = parser.parse_args()
    seeds, counts = [int(seed) for seed in options.seeds.split(",")], range(STEP, options.trials + 1, STEP)
    print(
        "| function | sampler |",
        " | ".join(f"{count} trials" for count in counts),
        "| nearer than random |",
        flush=True,
    )
    for name, problem in PROBLEMS.items():
        ends: dict[str, list[float]] = {}
        for sampler in options.samplers.split(","):
            found = [search(problem, sampler, trials=options.trials, seed=seed) for seed in seeds]
            ends[sampler] = [one[-1] for one in found]
            medians = " | ".join(f"{statistics.median(one[count - 1] for one in found):.3g}" for count in counts)
            wins = sum(mine < other for mine, other in zip(ends[sampler], ends.get("random", []), strict=False))
            print(
                f"| {name} | {sampler} | {medians} | {'' if sampler == 'random' else f'{wins} of {len(seeds)}'} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
