"""The main program of every rank in the backends' tests: it enters a backend, runs studies by name, and leaves it."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from mtrain.backends.ddp import DDP
from tests.backends import studies as shared


def main(kind: type[Any], own: Mapping[str, Any], argv: Sequence[str]) -> tuple[int, Path]:
    """``argv``: STUDIES BACKEND OUT OPTIONS. STUDIES names functions of ``own`` and of ``studies``, with commas
    between; BACKEND is "ddp", which ``kind`` is compared with, or anything else for ``kind``.

    A study gets the session; what it returns on every rank comes to OUT/<study>.json as a list ordered by rank. Returns
    (rank, OUT), after the backend is left.
    """
    torch.set_num_threads(1)
    studies, name, folder, options = argv
    out = Path(folder)
    chosen = DDP if name == "ddp" else kind
    extra = {"find_unused_parameters": True, "static_graph": False} if name == "ddp" else {}
    with chosen(chosen.Options(device="cpu", **extra, **json.loads(options))) as session:
        for study in studies.split(","):
            run = own.get(study) or getattr(shared, study)
            everyone = session.collective.all_gather(run(session))
            if session.collective.rank == 0:
                (out / f"{study}.json").write_text(json.dumps(everyone))
        return session.collective.rank, out
