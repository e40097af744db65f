"""Record the README's terminal: `python -m scripts.site.recording` runs the commands and writes docs/images/recording.svg."""

import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
import time
from html import escape
from pathlib import Path

COMMANDS = (
    "mtrain-trace run --out one -- python train.py",
    "mtrain-trace run --out two -- torchrun --nproc-per-node 2 train.py",
    "mtrain compare one two",
)
TARGET = Path(__file__).parents[2] / "docs" / "images" / "recording.svg"
COLUMNS, LINE, MARGIN = 56, 22, 20
"""As few columns as a telephone shows in a size that can be read."""
TYPED = ' class="c"'
LONGEST_WAIT_S = 1.5
"""Waits for a command are shortened to this."""
STYLE = (
    "text{font:18px ui-monospace,Menlo,Consolas,monospace;fill:#f0f6fc;white-space:pre;animation:show .01s backwards}"
    ".c{fill:#7ee787}@keyframes show{from{opacity:0}}@media(prefers-reduced-motion){text{animation:none}}"
)


def record(folder: Path) -> list[tuple[float, str]]:
    """Return the lines of a terminal in which the commands run, each with its time in seconds."""
    shutil.copy(Path(__file__).with_name("recorded.py"), folder / "train.py")
    path = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    shown, now = [], 0.5
    for command in COMMANDS:
        shown.append((now, f"$ {command}"))
        begun = time.monotonic()
        done = subprocess.run(  # noqa: S603
            command.split(), cwd=folder, env=os.environ | path, text=True, stdout=-1, stderr=-2, check=False
        )
        now += min(time.monotonic() - begun, LONGEST_WAIT_S)
        for line in done.stdout.splitlines():
            now += 0.2
            shown.append((now, line))
        now += LONGEST_WAIT_S
    return shown


def draw(shown: list[tuple[float, str]]) -> str:
    """Return an SVG whose lines come as they came in the terminal; where nothing moves, all of them are there."""
    rows = [
        (when, part, line[:1] == "$")
        for when, line in shown
        for part in textwrap.wrap(line, COLUMNS, subsequent_indent="    ", break_on_hyphens=False) or [""]
    ]
    width, height = 2 * MARGIN + round(COLUMNS * 10.9), 2 * MARGIN + LINE * len(rows)
    texts = (
        f'<text x="{MARGIN}" y="{MARGIN + LINE * (i + 1) - 6}"{TYPED * typed} '
        f'style="animation-delay:{when:.1f}s">{escape(part)}</text>'
        for i, (when, part, typed) in enumerate(rows)
    )
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img">'
    title = "<title>A terminal: one training on one process and on two, and where they differ</title>"
    ground = f'<rect width="{width}" height="{height}" rx="8" fill="#0d1117"/>'
    return "\n".join([head, title, f"<style>{STYLE}</style>", ground, *texts, "</svg>", ""])


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        TARGET.write_text(draw(record(Path(name))))
