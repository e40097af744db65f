"""Whether mtrain's updates are those of an original: its own batches are fed to mtrain, from its own start weights.

    python benchmarks/peers/yolov5_record.py CHECKOUT 8 record.pt --epochs 2 --batch-size 8 ...
    python benchmarks/fed.py record.pt yolov5n_bccd_reference -o data.root=... schedule.horizon_epochs=2
    python benchmarks/peers/ppyoloe_record.py CHECKOUT CONFIG.yml record.pkl
    python benchmarks/fed.py record.pkl ppyoloe_s_bccd -o backend.options.framework=paddle ... --epochs 3

The record holds a training in float64, and mtrain computes in float64 too, so only the order of additions differs. A
difference of 1e-14 grows tenfold every other update at the published learning rates, and within twenty updates nothing is
left to compare; rates that are a fiftieth of theirs (in both) keep it near rounding. Printed are the largest relative differences of
losses and gradient norms, of rates and momentum, and of weights and averages after the last update. Every epoch of the
record must have whole batches.
"""

import argparse
import json
import pickle
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))


class Fed:
    """A loader whose batches are those of a record."""

    def __init__(self, updates: list[dict[str, Any]], per_epoch: int) -> None:
        self.updates_per_epoch = per_epoch
        self._updates = updates

    def micro_batches(self, epoch: int, start: int = 0) -> Iterator[dict[str, Any]]:
        """Yield the batches of an epoch, each as one micro batch."""
        for number in range(epoch * self.updates_per_epoch + start, (epoch + 1) * self.updates_per_epoch):
            given = self._updates[number]
            count = len(given["pixels"])
            yield {
                "images": np.ascontiguousarray(given["pixels"].transpose(0, 2, 3, 1)),
                "targets": given["targets"],
                "index": np.arange(count),
                "scale_pad": np.tile(np.array([1, 1, 0, 0], np.float32), (count, 1)),
                "random_key": np.zeros(count, np.int32),
                "epoch": np.array([epoch]),
            }

    def close(self) -> None:
        """Do nothing: nothing is open."""


def main() -> int:
    """Train on the record, and print the differences."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("record", type=Path)
    parser.add_argument("spec")
    parser.add_argument("-o", dest="values", nargs="+", default=[], metavar="PATH=VALUE")
    parser.add_argument("--epochs", type=int, default=2, help="of the record")
    arguments = parser.parse_args()
    record = read(arguments.record)
    with tempfile.TemporaryDirectory() as name:
        for line in compared(record, trained(record, arguments, Path(name))):
            print(line)
    return 0


def read(path: Path) -> dict[str, Any]:
    """Return a record with arrays; torch is imported for its own alone."""
    if path.suffix == ".pkl":
        found: dict[str, Any] = pickle.loads(path.read_bytes())
        return found
    import torch

    record = torch.load(path, weights_only=False)
    states = {name: {key: value.numpy() for key, value in record[name].items()} for name in ("start", "weights", "ema")}
    return {**record, **states}


def trained(record: Mapping[str, Any], arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Train a job of one rank in this process; return its lines of updates and its state."""
    from safetensors.numpy import save_file

    from mtrain.core.update.trainer import train as run_loop
    from mtrain.rank import process
    from mtrain.rank.spec import assembly, train
    from mtrain.spec import config
    from mtrain.system.runfolder import RunFolder

    start = {name: x.astype(np.float32) if x.dtype.kind == "f" else x for name, x in record["start"].items()}
    save_file({name: np.array(x, order="C") for name, x in start.items()}, folder / "start.safetensors")
    updates, side = record["updates"], record["updates"][0]["pixels"].shape[-1]
    fixed = ["backend.name=solo", "cluster.nproc_per_node=1", "train.precision=fp64", "evaluate.enabled=false"]
    sizes = ["train.epochs=null", f"train.updates={len(updates)}", f"data.image_size={side}", "data.workers=1"]
    given = [f"model.weights={folder}/start.safetensors", "report.plots=false", "report.tensorboard=false"]
    job = config.load(arguments.spec, overrides=[*fixed, *sizes, *given, *arguments.values]).job
    for name in ("checkpoints", "logs"):
        (folder / "run" / name).mkdir(parents=True)
    with assembly.assemble(job, train.open_task(job), leave=lambda error: None, training=True) as assembled:
        stop = process.StopRequest()
        run = train.TrainingRun(assembled, train.open_task(job), RunFolder(folder / "run"), None, stop=stop)
        run.loader = Fed(updates, len(updates) // arguments.epochs)
        run_loop(run.loop(), assembled.model)
        state = assembled.session.state(assembled.model, assembled.optimizer)
        weights, averages = dict(state.weights), dict(state.ema)
    rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    return {"rows": [row for row in rows if row["kind"] == "update"], "weights": weights, "ema": averages}


def compared(record: Mapping[str, Any], found: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each quantity with its largest difference."""
    pairs = list(zip(record["updates"], found["rows"], strict=True))
    yield f"{len(pairs)} updates"
    for name, theirs, ours in (
        ("loss", lambda a: a["loss"], lambda b: b["losses"]["total"]),
        ("gradient norm", lambda a: a["norm"], lambda b: b["gradient_norm"]),
        ("momentum", lambda a: a["momentum"], lambda b: b["momentum"]),
    ):
        if any(ours(b) is None for _, b in pairs):
            yield f"{name}: not among mtrain's records of this job"
            continue
        differences = [abs(ours(b) / theirs(a) - 1) for a, b in pairs]
        yield f"{name}: {max(differences):.1e}; of the updates in turn " + " ".join(f"{x:.0e}" for x in differences)
    # The original may have one group of parameters where mtrain has several of one learning rate.
    rates = max(
        abs(x - y) for a, b in pairs for x, y in zip(sorted({*a["rates"]}), sorted({*b["learning_rates"]}), strict=True)
    )
    yield f"learning rates: {rates:.1e}"
    for name in ("weights", "ema"):
        theirs_of = {neutral(key): x.astype(np.float64) for key, x in record[name].items()}
        theirs_of = {key: x for key, x in theirs_of.items() if key in found[name]}
        shares = {key: np.abs(found[name][key] - x).max() / max(np.abs(x).max(), 1e-12) for key, x in theirs_of.items()}
        worst = max(shares, key=lambda key: shares[key])
        yield f"{name}: {shares[worst]:.1e} of the largest value of an array ({worst}; {len(shares)} arrays)"


def neutral(name: str) -> str:
    """Return the name of an entry as mtrain has it."""
    return name.replace("._mean", ".running_mean").replace("._variance", ".running_var")


if __name__ == "__main__":
    raise SystemExit(main())
