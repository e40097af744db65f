"""Loops in loops on any number of ranks: rows that the model makes, passes over them and pieces, all draws from the global generators."""

import sys
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch

import mtrain

BODIES, PASSES, PIECES, ROWS = 4, 2, 3, 6
TOTAL = BODIES * PASSES * PIECES


def network():
    """Build the model."""
    return torch.nn.Linear(3, 1)


def main() -> None:
    """Train; the ranks end at the place that a file ``kill`` names, once."""
    killed = Path("kill").read_text().split() if Path("kill").exists() else []
    with mtrain.session() as session:
        model, optimizer = session.prepare(network, optimizer=mtrain.Adam(learning_rate=0.05), seed=3)
        own = np.random.default_rng(session.rank)
        if "own" in sys.argv:
            session.keep("own", own)
        for body in session.range(BODIES):
            with torch.no_grad():
                rows = torch.rand(PIECES * ROWS, 3, dtype=torch.float64) + np.random.normal()
                rows += model(rows)
            for each in range(PASSES):
                order = torch.randperm(len(rows))
                for piece in session.updates(PIECES, global_batch=ROWS, total=TOTAL):
                    x = session.share(rows[order[piece * ROWS :][:ROWS]])
                    optimizer.update((model(x) - x.sum(1, keepdim=True)).square().mean())
                    own.normal()
                    if killed == [str(body), str(each), str(piece)]:
                        with suppress(FileNotFoundError):
                            Path("kill").unlink()
                        raise SystemExit(3)
        session.print(f"own {own.normal():.9f}")


if __name__ == "__main__":
    main()
