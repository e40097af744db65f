"""Train one rank on one framework and save the result: ``python -m tests.contract.learn FRAMEWORK RULE OUT.npz``."""

import sys
from pathlib import Path

import numpy as np

from mtrain.core.binding import bind
from tests.contract import training
from tests.contract.training import Case
from tests.framework import FRAMEWORKS

UPDATES = 50


def main(name: str, rule: str, out: Path, *, quantised: bool = False) -> None:
    """Train in float64, with BatchNorm that learns, accumulation, clipping and an average.

    ``quantised``: weights and inputs are rounded to 8 bits from the third update on.
    """
    framework = FRAMEWORKS[name]()
    bind(framework.nn, framework.ops)
    framework.one_thread()
    with framework.solo() as session:
        case = Case(batchnorm="synced", accumulate=2, rule=rule, quantised=quantised)
        np.savez(out, **training.train(session, case, updates=UPDATES))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
