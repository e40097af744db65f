"""One spec on two ranks of ddp, Horovod and DeepSpeed ZeRO 0 to 3: digests of what they learn, which must be the same.

``python -m tests.parity.same_bits [--model ppyoloe_s] [--updates 50] [--rule sgd]``; exit code 1 when they are not.
Real jobs through the command line, in float32: momentum, warm-up, clipping on some updates, two micro batches an
update, an average.
"""

import argparse
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT)) if str(ROOT) not in sys.path else None

from mtrain.core.state.digest import digest  # noqa: E402
from tests.parity import jobs  # noqa: E402
from tests.parity.jobs import Setting  # noqa: E402

STACKS: Mapping[str, Sequence[str]] = {
    "ddp": (),
    "horovod": (),
    **{f"deepspeed-{stage}": (f"backend.options.stage={stage}",) for stage in range(4)},
}
"""Name -> overrides; the part before the dash is the backend. The first is what the others are compared with."""


@dataclass(frozen=True, kw_only=True)
class Learnt:
    """The exact bits that a job has learnt."""

    weights: str
    ema: str
    moments: str
    """Digests."""
    losses: tuple[float, ...]
    norms: tuple[float, ...]
    """Of each update."""


def learn(model: str, name: str, folder: Path, data: Path, *, updates: int, more: Sequence[str] = ()) -> Learnt:
    """Run one job; ``more``: overrides."""
    setting = Setting(model=model, backend=name.partition("-")[0], ranks=2, updates=updates)
    values = ("train.accumulate=2", *STACKS[name], *more)
    pairs = [word for value in values for word in ("-o", value)]
    run = f"{model}-{name}"
    jobs.mtrain("train", *setting.arguments(folder, data), *pairs, "--name", run, timeout_s=1200)
    actual = jobs.trace(folder / run)
    parts = {part: digest(arrays) for part, arrays in actual.arrays.items()}
    return Learnt(**parts, losses=tuple(actual.losses.tolist()), norms=tuple(actual.norms.tolist()))


def main(argv: Sequence[str] | None = None) -> int:
    """Print the digests; 1 when they differ."""
    parser = argparse.ArgumentParser(prog="tests.parity.same_bits", description=str(__doc__).split("\n")[0])
    parser.add_argument("--model", choices=tuple(jobs.SPECS), default="ppyoloe_s")
    parser.add_argument("--updates", type=int, default=50)
    parser.add_argument("--rule", choices=("sgd", "adam", "adamw"), default="sgd")
    parser.add_argument("--backends", default=",".join(STACKS), help="comma-separated")
    arguments = parser.parse_args(argv)
    results: dict[str, Learnt] = {}
    print(f"{arguments.model}, {arguments.updates} updates of {arguments.rule}, 2 ranks, float32")
    print(f"{'':<14}{'weights':<18}{'ema':<18}{'moments':<18}{'last loss':<24}largest norm", flush=True)
    with tempfile.TemporaryDirectory() as name:
        data = jobs.make_data(Path(name) / "data")
        for stack in arguments.backends.split(","):
            rule = (f"optimizer.rule={arguments.rule}",)
            one = learn(arguments.model, stack, Path(name), data, updates=arguments.updates, more=rule)
            results[stack] = one
            digests = "".join(f"{text[:16]:<18}" for text in (one.weights, one.ema, one.moments))
            print(f"{stack:<14}{digests}{one.losses[-1]:<24.17g}{max(one.norms):.17g}", flush=True)
    same = len(set(results.values())) == 1
    print("the same bits" if same else "they differ")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
