"""One rank that meets every planted fault: ``python -m tests.testing.fault_ranks REFERENCES OUT``, started by torchrun."""

import json
import sys
from dataclasses import asdict
from pathlib import Path

from tests.testing.faults import FAULTS

from mtrain.backends.ddp import DDP
from mtrain.core.binding import bind
from mtrain.errors import CheckpointError
from mtrain_kit.catalogue import ON_RANKS
from mtrain_kit.check_context import Site


def main(references: Path, out: Path) -> None:
    runs = {check.id: run for check, run in ON_RANKS.items()}
    results = {}
    backend = DDP(DDP.Options(device="cpu", timeout_s=60, late_figures=True))
    with backend as session:
        bind(backend.nn, backend.ops)
        for fault, (faulty, check) in FAULTS.items():
            site = Site(session=faulty(session), ranks=2, references=references)
            assert site.precision == "fp64"
            try:
                mine = [asdict(measure) | {"ok": measure.ok} for measure in runs[check](site)]
            except CheckpointError as error:  # on every rank: the kit takes an error for a failure
                mine = [{"what": "error", "ok": False, "detail": str(error)}]
            results[fault] = session.collective.all_gather(mine)
        if session.collective.rank == 0:
            out.write_text(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
