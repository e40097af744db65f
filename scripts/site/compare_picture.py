"""Draw the README's picture: what one run of `mtrain compare` found, as an SVG for light and one for dark pages.

    python -m scripts.site.compare_picture FOLDER/compare.json "COMMAND"   # takes the numbers of a new run, then draws
    python -m scripts.site.compare_picture                                 # draws again from docs/images/compare.json

`docs/images/compare.json` holds the numbers that are drawn, and nothing else of the run.
"""

import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[2] / "docs" / "images"
NUMBERS = FOLDER / "compare.json"
NAMES = {"ddp": "torch DDP", "horovod": "Horovod", "fleet": "Paddle Fleet"}
MOST_ALIKE = {"reference": "the reference", "within float32": "as close as DDP to itself"}
"""Verdict of `compare.json` -> what the picture says; `within float32` is given where a nudge of one unit in the last place, which
is the dashed curve, takes torch DDP as far from itself."""
WIDTH, HEIGHT = 640, 668
LEFT, RIGHT, TOP, BOTTOM = 80, 616, 396, 540
"""Edges of the plot. The text is large enough to be read where a telephone shows the picture 360 pixels wide."""
EXPONENTS = (-8, -6, -4, -2, 0)
"""Powers of ten on the axis of differences; what is below the first is drawn on it."""


@dataclass(frozen=True)
class Theme:
    """Colours of one form of the picture."""

    page: str
    edge: str
    text: str
    quiet: str
    same: str
    near: str


THEMES: Mapping[str, Theme] = {
    "light": Theme("#ffffff", "#d0d7de", "#1f2328", "#59636e", "#1a7f37", "#bc4c00"),
    "dark": Theme("#0d1117", "#3d444d", "#f0f6fc", "#9198a1", "#3fb950", "#f0883e"),
}


def numbers_of(compared: Mapping[str, Any], command: str) -> dict[str, Any]:
    """Return what is drawn of a `compare.json`."""
    backends = []
    for backend in compared["backends"]:
        gap = backend.get("against_reference", {}).get("gaps", {}).get("loss", {})
        backends.append({"label": backend["label"], "verdict": backend["verdict"], "loss": gap.get("curve", [])})
    facts = compared["facts"]
    return {
        "command": command,
        "updates": compared["updates"],
        "agree": compared["agree"],
        "backends": backends,
        "nudged": compared["float64"]["nudged"]["loss"],
        "facts": {name: facts[name] for name in ("data", "model", "updates", "versions")},
    }


def svg(numbers: Mapping[str, Any], theme: Theme) -> str:
    """Return the picture of ``numbers`` in the colours of ``theme``."""
    updates, backends = numbers["updates"], numbers["backends"]
    title = f"One spec on {len(backends)} backends: {updates} updates of {numbers['facts']['model']}"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        f'role="img" font-family="system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif" font-size="20">',
        f"<title>{escape(title)}, on real images and two ranks</title>",
        f'<rect x="0.5" y="0.5" width="{WIDTH - 1}" height="{HEIGHT - 1}" rx="8" fill="{theme.page}" stroke="{theme.edge}"/>',
        _text(24, 42, title, theme.text, font_size=21, font_weight=600),
        *_rows(backends, theme),
        *_plot(numbers, theme),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _rows(backends: Sequence[Mapping[str, Any]], theme: Theme) -> list[str]:
    """Return the table: backend, verdict, largest difference of the loss."""
    parts = [
        _text(24, 80, "backend", theme.quiet, font_size=17),
        _text(258, 80, "weights, moments, losses", theme.quiet, font_size=17),
        _text(RIGHT, 80, "loss differs by", theme.quiet, font_size=17, text_anchor="end"),
    ]
    for place, backend in enumerate(backends):
        y = 118 + 42 * place
        verdict = backend["verdict"]
        colour = theme.same if verdict in ("reference", "same bits") else theme.near
        largest = {"reference": "", "same bits": "0"}.get(verdict) or f"{max(backend['loss'], default=0.0):.1e}"
        parts += [
            f'<line x1="24" y1="{y - 27}" x2="{RIGHT}" y2="{y - 27}" stroke="{theme.edge}"/>',
            _text(24, y, _name(backend["label"]), theme.text),
            f'<circle cx="244" cy="{y - 7}" r="7" fill="{colour}"/>',
            _text(258, y, MOST_ALIKE.get(verdict, verdict), colour, font_weight=600),
            _text(
                RIGHT, y, "" if verdict == "reference" else largest.replace("e-0", "e-"), theme.text, text_anchor="end"
            ),
        ]
    return parts


def _plot(numbers: Mapping[str, Any], theme: Theme) -> list[str]:
    """Return the curves: the relative difference of each update's loss from the reference."""
    parts = [_text(24, TOP - 18, "difference of the loss from torch DDP's, by update", theme.quiet, font_size=17)]
    for exponent in EXPONENTS:
        y = _height(10.0**exponent)
        label = "1" if exponent == 0 else f'10<tspan dy="-6" font-size="12">{exponent}</tspan>'
        parts += [
            f'<line x1="{LEFT}" y1="{y:.1f}" x2="{RIGHT}" y2="{y:.1f}" stroke="{theme.edge}" stroke-dasharray="2 4"/>',
            f'<text x="{LEFT - 10}" y="{y + 5:.1f}" text-anchor="end" font-size="16" fill="{theme.quiet}">{label}</text>',
        ]
    zero = BOTTOM + 26
    others = [backend for backend in numbers["backends"] if backend["verdict"] not in ("reference", "same bits")]
    return [
        *parts,
        f'<line x1="{LEFT}" y1="{zero}" x2="{RIGHT}" y2="{zero}" stroke="{theme.same}" stroke-width="4"/>',
        _text(LEFT - 10, zero + 5, "0", theme.quiet, font_size=16, text_anchor="end"),
        _curve(numbers["nudged"], theme.quiet, dashes="4 3"),
        *[_curve(backend["loss"], theme.near) for backend in others],
        *_key(zero + 28, "Horovod, DeepSpeed ZeRO: exactly 0", theme.same),
        *_key(zero + 54, "Paddle Fleet", theme.near),
        *_key(zero + 80, "torch DDP again, nudged by one unit in the last place", theme.quiet, dashes="4 3"),
    ]


def _key(y: float, words: str, colour: str, *, dashes: str = "") -> list[str]:
    """Return a line of the key: a piece of the curve, and what it is."""
    style = f' stroke-dasharray="{dashes}"' if dashes else ""
    line = f'<line x1="{LEFT}" y1="{y - 6}" x2="{LEFT + 36}" y2="{y - 6}" stroke="{colour}" stroke-width="3"{style}/>'
    return [line, _text(LEFT + 46, y, words, colour, font_size=17)]


def _curve(values: Sequence[float], colour: str, *, dashes: str = "") -> str:
    step = (RIGHT - LEFT) / max(len(values) - 1, 1)
    points = " ".join(f"{LEFT + step * place:.1f},{_height(value):.1f}" for place, value in enumerate(values))
    style = f' stroke-dasharray="{dashes}"' if dashes else ""
    return (
        f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2.2" stroke-linejoin="round"{style}/>'
    )


def _height(value: float) -> float:
    """Return where a difference is drawn, on an axis of logarithms."""
    low, high = EXPONENTS[0], EXPONENTS[-1]
    exponent = min(max(math.log10(value) if value > 0 else low, low), high)
    return BOTTOM - (BOTTOM - TOP) * (exponent - low) / (high - low)


def _name(label: str) -> str:
    return NAMES.get(label, label.replace("deepspeed:stage=", "DeepSpeed ZeRO-"))


def _text(x: float, y: float, content: str, colour: str, **attributes: str | float) -> str:
    """Return a line of text; ``attributes`` are SVG's, with ``_`` for ``-``."""
    given = {"font_size": 20, "text_anchor": "start", **attributes}
    more = "".join(f' {name.replace("_", "-")}="{value}"' for name, value in given.items())
    return f'<text x="{x}" y="{y}" fill="{colour}"{more}>{escape(content)}</text>'


def main() -> None:
    """Draw both forms."""
    if len(sys.argv) > 1:
        compared = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
        NUMBERS.write_text(json.dumps(numbers_of(compared, sys.argv[2]), indent=1) + "\n", encoding="utf-8")
    numbers = json.loads(NUMBERS.read_text(encoding="utf-8"))
    for name, theme in THEMES.items():
        (FOLDER / f"compare-{name}.svg").write_text(svg(numbers, theme), encoding="utf-8")


if __name__ == "__main__":
    main()
