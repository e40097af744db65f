"""Training in a cell of a real kernel: one live output, and the stop button."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.notebooks.kernels import run_cells, texts

pytestmark = pytest.mark.job

TRAIN = """
import mtrain
result = mtrain.train("vit_digits", backend="ddp", ranks=1, overrides={
    "train": {"epochs": None, "updates": 100_000, "batch_size": 8}, "data.workers": 0,
    "evaluate.every_epochs": None, "checkpoint.every_epochs": None, "report.plots": False,
})
print(result.exit_reason, result.checkpoint, result.summary["updates"] == result.records.updates[-1]["update"] + 1)
"""


def test_the_stop_button_ends_training_with_saved_state_and_progress_is_one_output(tmp_path: Path):
    async def stop_after_updates(manager: Any) -> None:
        metrics = tmp_path / "runs/vit_digits/metrics.jsonl"
        async with asyncio.timeout(200):
            while not (metrics.exists() and '"kind": "update"' in metrics.read_text()):
                await asyncio.sleep(0.1)
        await manager.interrupt_kernel()

    training, curves = run_cells([TRAIN, "result.plot()"], folder=tmp_path, meanwhile=stop_after_updates)
    shown = [output for output in training.outputs if output.output_type == "display_data"]
    assert len(shown) == 1
    assert "saving and ending" in shown[0].data["text/html"]
    assert "<progress" in shown[0].data["text/html"]
    reason, checkpoint, complete = texts(training)[-1].split()
    assert (reason, complete) == ("interrupted", "True")
    assert (tmp_path / checkpoint / "MANIFEST.json").is_file()
    assert texts(curves, "image/png")
