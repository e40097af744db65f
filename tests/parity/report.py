"""The table of differences between torch and Paddle, and their growth as an image: ``make parity``."""

import argparse
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from tests.parity import jobs  # noqa: E402
from tests.parity.jobs import Setting, Trace  # noqa: E402

CASES = [
    Setting(model=model, backend=backend, ranks=ranks, precision=precision)
    for model in ("yolov5n", "ppyoloe_s")
    for backend, ranks in (("solo", 1), ("ddp", 2))
    for precision in ("fp64", "fp32")
]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--image", type=Path, default=ROOT / "docs" / "images" / "torch-and-paddle-parity.png")
    target = parser.parse_args().image
    print(f"{'':<34}{'loss':>10}{'norm':>10}{'weights':>10}{'ema':>10}{'moments':>10}{'first loss':>12}")
    curves = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data = jobs.make_data(folder / "data")
        for case in CASES:
            pair = jobs.run(case, folder, data), jobs.run(jobs.partner(case), folder, data)
            actual = jobs.differences(*pair)
            curves[case] = jobs.curve(pair[0].losses, pair[1].losses)
            values = "".join(f"{actual[part]:>10.1e}" for part in ("loss", "norm", "weights", "ema", "moments"))
            title = f"{case.model}, {case.precision}, {case.ranks} rank{'s' if case.ranks > 1 else ''}"
            print(f"{title:<34}{values}{curves[case][0]:>12.1e}", flush=True)
    draw(curves, target)
    print(f"growth of the difference: {target}")
    return 0


def draw(curves: dict[Setting, Trace], target: Path) -> None:
    """Relative difference of the loss, update by update."""
    import matplotlib.pyplot as plt

    metric, axes = plt.subplots(1, 2, figsize=(11, 4), sharey=True)
    for axis, model in zip(axes, ("yolov5n", "ppyoloe_s"), strict=True):
        for case, gap in curves.items():
            if case.model == model:
                axis.semilogy(
                    range(len(gap)), gap.clip(1e-17), label=f"{case.precision}, {case.ranks} rank(s)", linewidth=1.2
                )
        axis.set_title(model)
        axis.set_xlabel("update")
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("|torch - Paddle| / |torch| of the loss")
    axes[0].legend()
    metric.tight_layout()
    metric.savefig(target, dpi=110)


if __name__ == "__main__":
    sys.exit(main())
