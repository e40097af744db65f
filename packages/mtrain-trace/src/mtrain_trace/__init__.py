"""Record what a training does at every update, for any script, and say whether two trainings are the same.

``mtrain-trace run --out A -- torchrun --nproc-per-node 2 train.py`` records without a change of the script;
``mtrain-trace compare A B`` names the first thing that parted, and its likely cause. Only numpy is needed besides what
the script itself uses.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mtrain_trace.recorder import Recorder

__all__ = ["__version__", "attach"]
__version__ = "0.1.0"


def attach(out: str) -> Recorder:
    """Begin to record this process's training into the folder ``out``.

    For a script that is not started by ``mtrain-trace run``. Call it before the first forward pass; every optimizer of
    torch, Paddle or Keras that takes a step afterwards is recorded.

    Returns:
        The recorder; its ``close`` writes what is outstanding and ends the recording. It is closed at exit at the latest.
    """
    from mtrain_trace.startup import Connection

    connection = Connection(out)
    connection.begin()
    return connection.recorder
