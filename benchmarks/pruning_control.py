"""Pruning against its control: a network that was pruned and tuned, and the same small network trained from scratch as long in all.

    python benchmarks/pruning_control.py -c digits --dense 200 --tune 100 --seeds 0,1,2 -o data.image_size=128

For each seed: the dense network for ``--dense`` updates; pruned to ``--target`` of its FLOPs and tuned for ``--tune`` more, with
and without imitating the dense one (``train.distil``); and the small network from random weights for the sum of both, with and
without imitating. The score is that of the last evaluation. Rows appear as they are made; ``--out`` keeps the runs, and a
run that is there already is not made again.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

KINDS = ("dense", "pruned", "tuned", "tuned, taught", "from scratch", "from scratch, taught")


def mtrain(*arguments: str) -> None:
    """Run one command of mtrain.

    Raises:
        SystemExit: It failed.
    """
    done = subprocess.run([sys.executable, "-m", "mtrain", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr or done.stdout)


def last_score(run: Path) -> float:
    """Return the score of a run's last evaluation."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return float([record for record in records if record["kind"] == "evaluation"][-1]["metrics"]["score"])


class Study:
    """The runs of one seed in a folder."""

    def __init__(self, options: argparse.Namespace, seed: int) -> None:
        self.options, self.seed = options, seed
        self.runs = options.out / "runs"

    def trained(self, name: str, spec: str, updates: int, values: Sequence[str]) -> float:
        """Train, unless that was done before; return the score."""
        run = self.runs / f"{name}-{self.seed}"
        if not (run / "summary.json").exists():
            fixed = [f"train.seed={self.seed}", "train.epochs=null", f"train.updates={updates}"]
            fixed += ["evaluate.every_epochs=null", f"evaluate.every_updates={updates}"]
            fixed += ["checkpoint.every_epochs=null", f"checkpoint.every_updates={updates}", "report.plots=false"]
            where = ["--backend", "solo", "--nproc-per-node", "1", "--name", run.name]
            pairs = [word for value in (*fixed, f"report.dir={self.runs}", *values) for word in ("-o", value)]
            mtrain("train", "-c", spec, *where, *pairs)
        return last_score(run)

    def scores(self) -> dict[str, float]:
        """Return the score of each kind of network."""
        given, options = self.options.overrides, self.options
        found = {"dense": self.trained("dense", options.spec, options.dense, given)}
        small = options.out / f"small-{self.seed}"
        if not small.exists():
            mtrain(
                *("prune", "--run", str(self.runs / f"dense-{self.seed}"), "--target", str(options.target)),
                *("--by", options.by, "--out", str(small)),
            )
        report = json.loads((small / "pruned.json").read_text())
        found["pruned"] = float(report["metrics"][1]["score"])
        spec, rate = str(small / "spec.yml"), [f"optimizer.learning_rate={options.tune_rate}"]
        teacher = [f"train.distil.teacher={self.runs / f'dense-{self.seed}'}"]
        fresh, whole = ["model.weights=null"], options.dense + options.tune
        found["tuned"] = self.trained("tuned", spec, options.tune, rate)
        found["from scratch"] = self.trained("scratch", spec, whole, fresh)
        found["tuned, taught"] = self.trained("tuned-taught", spec, options.tune, [*rate, *teacher])
        found["from scratch, taught"] = self.trained("scratch-taught", spec, whole, [*fresh, *teacher])
        return found


def main() -> None:
    """Print a row for each seed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-c", dest="spec", default="digits")
    parser.add_argument("--dense", type=int, default=200)
    parser.add_argument("--tune", type=int, default=100)
    parser.add_argument("--tune-rate", type=float, default=0.001)
    parser.add_argument("--target", type=float, default=0.5)
    parser.add_argument("--by", default="taylor")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--out", type=Path, default=Path("pruning-control"))
    parser.add_argument("-o", dest="overrides", action="append", default=[])
    options = parser.parse_args()
    print("| seed |", " | ".join(KINDS), "|", flush=True)
    for seed in map(int, options.seeds.split(",")):
        found = Study(options, seed).scores()
        print(f"| {seed} |", " | ".join(f"{found[kind]:.4f}" for kind in KINDS), "|", flush=True)


if __name__ == "__main__":
    main()
