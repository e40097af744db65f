"""Draw the seeds of the studies of accuracy: a small plot for each study, each side's seeds from the worst to the best.

    python benchmarks/seeds_picture.py [STUDY METRIC TITLE RESULTS.jsonl ...]

Without arguments it draws ``docs/images/seeds-of-studies.json`` as ``docs/images/seeds-of-studies.svg``. With them it first puts the
runs that ``accuracy.py`` has appended to RESULTS there, under the name of the study, which replaces what was there under that name.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

KEPT = Path(__file__).parents[1] / "docs" / "images" / "seeds-of-studies"
COLOURS = {"mtrain": "#1f6fb4"}
OTHERS = ("#d9622b", "#2f9e5b")
COLUMNS = 3


def main() -> None:
    """Take results in, and draw."""
    data = KEPT.with_suffix(".json")
    studies: dict[str, Any] = json.loads(data.read_text()) if data.exists() else {}
    if len(sys.argv) > 1:
        study, metric, title, *files = sys.argv[1:]
        rows = [json.loads(line) for file in files for line in Path(file).read_text().splitlines()]
        studies[study] = {"title": title, "metric": metric, "sides": sides(rows, metric)}
        data.write_text(json.dumps(studies, indent=1) + "\n")
    draw(studies, KEPT.with_suffix(".svg"))


def sides(rows: Sequence[Mapping[str, Any]], metric: str) -> dict[str, dict[str, float]]:
    """Return side -> seed -> metric."""
    found: dict[str, dict[str, float]] = {}
    for row in sorted(rows, key=lambda row: (row["side"], row["seed"])):
        found.setdefault(row["side"], {})[str(row["seed"])] = round(row["metrics"][metric], 6)
    return found


def draw(studies: Mapping[str, Any], path: Path) -> None:
    """Draw one plot for each study."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"svg.hashsalt": "seeds", "font.size": 8, "axes.spines.top": False, "axes.spines.right": False})
    count = len(studies)
    figure, axes = plt.subplots(-(-count // COLUMNS), COLUMNS, figsize=(9.5, 2.6 * -(-count // COLUMNS)), squeeze=False)
    for place in axes.flat[count:]:
        place.axis("off")
    for axis, study in zip(axes.flat, studies.values(), strict=False):
        for number, (name, seeds) in enumerate(study["sides"].items()):
            values = sorted(seeds.values())
            shares = [(place + 0.5) / len(values) for place in range(len(values))]
            colour = COLOURS.get(name, OTHERS[number % len(OTHERS)])
            label = f"{name}: mean {sum(values) / len(values):.3f}, n {len(values)}"
            axis.plot(shares, values, "o-", color=colour, markersize=3.5, linewidth=1, label=label)
        axis.set(title=study["title"], ylabel=study["metric"], xlim=(0, 1), xticks=[0, 0.5, 1])
        axis.set_xticklabels(["worst seed", "median", "best seed"])
        axis.margins(y=0.12)
        axis.grid(color="#e4e4e4", linewidth=0.6)
        axis.legend(frameon=False, fontsize=7, loc="best")
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    main()
