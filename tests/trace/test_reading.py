"""The files of the ranks of a training are joined to its updates."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from mtrain_trace import reading, recorder
from mtrain_trace.reading import TraceError
from tests.trace.test_compare_command import write

ROW = {"digest": "0" * 16, "norm": 1.0, "sketch": [0.0] * 16}


def change(folder: Path, rank: int, changes: Mapping[str, Any]) -> None:
    """Make the first trace of ``folder`` that of a rank of two, whose updates have other values."""
    (first,) = folder.glob("rank-00000-*")
    facts = json.loads((first / "process.json").read_text())
    lines = [json.loads(line) | changes for line in (first / "updates.jsonl").read_text().splitlines()]
    other = folder / f"rank-{rank:05d}-host-{rank + 1}"
    other.mkdir(exist_ok=True)
    (other / "process.json").write_text(json.dumps({**facts, "rank": rank, "ranks": 2}))
    (other / "updates.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_the_loss_of_an_update_is_the_sum_of_its_passes_and_the_mean_of_its_ranks(tmp_path: Path) -> None:
    micro = {"loss": 0.5, "samples": ["a"], "targets": [], "modes": [0, 1], "autocast": None}
    write(tmp_path)
    change(tmp_path, 1, {"micro_batches": [micro, {**micro, "loss": 1.5}]})
    update = reading.read(tmp_path).updates[0]
    assert (update.losses, update.pass_losses, update.loss) == ([1.0, 2.0], [1.0, 0.5, 1.5], 1.5)


@pytest.mark.parametrize(("digest", "drifted"), [("0", None), ("1", 1)])
def test_ranks_that_hold_other_weights_are_seen(tmp_path: Path, digest: str, drifted: int | None) -> None:
    write(tmp_path)
    change(tmp_path, 1, {"weights": {**ROW, "digest": digest * 16}})
    trace = reading.read(tmp_path)
    assert trace.first_drift == drifted
    assert trace.updates[0].ranks_agree == {"weights": drifted is None, "gradients": True}


@pytest.mark.parametrize("form", [recorder.FORM - 1, recorder.FORM + 1])
def test_a_trace_of_another_form_is_refused_with_the_remedy(tmp_path: Path, form: int) -> None:
    write(tmp_path, form=form)
    with pytest.raises(
        TraceError, match=f"is a trace of form {form}, .* reads form {recorder.FORM} .* record .* again"
    ):
        reading.read(tmp_path)
