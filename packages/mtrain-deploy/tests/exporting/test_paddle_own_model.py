"""Programs of users' own Paddle models: Paddle's predictor gives what the layer's ``predict`` gives, for any size of batch."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from mtrain.core.checkpoint.format import Saved, write
from mtrain.core.interfaces import Progress, State

CODE = """
import numpy as np
from paddle import nn

class Net(nn.Layer):
    def __init__(self, width=4):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2D(1, width, 3, padding=1), nn.BatchNorm2D(width), nn.ReLU(), nn.AdaptiveAvgPool2D(1))
        self.side = nn.Linear(3, width)
        self.head = nn.Linear(width, 2)

    def scores(self, image, facts):
        return self.head(self.body(image).flatten(1) + self.side(facts))

    def forward(self, batch):
        return nn.functional.cross_entropy(self.scores(batch["image"], batch["more"][0]), batch["label"])

    def predict(self, batch):
        scores = self.scores(batch["image"], batch["more"][0])
        return {"scores": scores, "best": scores.argmax(1)}, batch["label"]

class Blind(Net):
    def predict(self, batch):
        return self.head.weight * 2, batch["label"]

class Single(Net):
    def predict(self, batch):
        return self.scores(batch["image"], batch["more"][0]), batch["label"]

class Images:
    def __len__(self):
        return 3

    def __getitem__(self, index):
        image = np.full((1, 6, 5), index, np.float32)
        return {"image": image, "more": (np.ones(3, np.float32), index), "label": index % 2}
"""
MAKE = """
import numpy as np, paddle, nets
paddle.seed(0)
net = nets.Net()
net.scores(paddle.randn([32, 1, 6, 5]), paddle.randn([32, 3]))  # the statistics of BatchNorm move
net.eval()
given = {f"{n}.{k}": a for n in (1, 2, 5) for k, a in (("image", paddle.randn([n, 1, 6, 5])), ("facts", paddle.randn([n, 3])))}
found = {f"{n}.{k}": v for n in (1, 2, 5)
         for k, v in net.predict({"image": given[f"{n}.image"], "more": (given[f"{n}.facts"],), "label": None})[0].items()}
np.savez("truth.npz", **{k: np.asarray(v) for k, v in {**given, **found}.items()})
np.savez("weights.npz", **{k: np.asarray(v) for k, v in net.state_dict().items()})
"""
READ = """
import json, numpy as np, paddle.inference as inference
config = inference.Config("own.json", "own.pdiparams"); config.disable_glog_info()
predictor = inference.create_predictor(config)
names = predictor.get_input_names(); truth = np.load("truth.npz"); told = {"inputs": names}
for n in (1, 2, 5):
    for name in names:
        predictor.get_input_handle(name).copy_from_cpu(truth[f"{n}.{'image' if name == 'image' else 'facts'}"])
    predictor.run()
    scores, *rest = (predictor.get_output_handle(name).copy_to_cpu() for name in predictor.get_output_names())
    best = rest[0] if rest else scores.argmax(1)
    told[str(n)] = [float(abs(scores - truth[f"{n}.scores"]).max()), int((best != truth[f"{n}.best"]).sum()), list(scores.shape)]
print("told", json.dumps(told))
"""
SPEC = """
model: {{name: ./nets.py:{model}, framework: paddle}}
data: {{format: ./nets.py:Images}}
train: {{updates: 4, batch_size: 2}}
backend: {{name: fleet}}
"""


def ran(folder: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, *words], cwd=folder, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a finished run of the layer, and what its predictions are; a process has one framework."""
    place = tmp_path_factory.mktemp("own")
    (place / "nets.py").write_text(CODE)
    process = ran(place, "-c", MAKE)
    assert process.returncode == 0, process.stderr
    weights = dict(np.load(place / "weights.npz"))
    state = State(weights=weights, ema={}, moments={}, counters={})
    for run, model in (("own", "Net"), ("blind", "Blind"), ("single", "Single")):
        checkpoints = place / "runs" / run / "checkpoints"
        checkpoints.mkdir(parents=True)
        saved = Saved(
            state=state, progress=Progress(update=4), spec={"model": {"name": f"nets.py:{model}"}}, meta={"extra": {}}
        )
        write(checkpoints / "step-00000004", saved)
    return place


def exported(folder: Path, run: str, model: str) -> "subprocess.CompletedProcess[str]":
    (folder / "own.yml").write_text(SPEC.format(model=model))
    words = ("export", "--run", f"runs/{run}", "-c", "own.yml", "--format", "paddle", "--force", "--out", "own")
    return ran(folder, "-m", "mtrain", *words)


@pytest.mark.parametrize(("run", "model"), [("own", "Net"), pytest.param("single", "Single", marks=pytest.mark.slow)])
def test_paddles_predictor_computes_what_predict_returns_for_every_size_of_batch(
    run: str, model: str, folder: Path
) -> None:
    process = exported(folder, run, model)
    assert process.returncode == 0, process.stderr
    process = ran(folder, "-c", READ)
    assert process.returncode == 0, process.stderr
    told = json.loads(process.stdout.rpartition("told ")[2])
    assert sorted(told.pop("inputs")) == ["image", "more.0"]  # neither the label nor the number beside the facts
    print("largest differences", told)
    for size, (difference, others, shape) in told.items():
        assert difference <= 1e-5
        assert others == 0
        assert shape == [int(size), 2]


def test_predictions_that_depend_on_no_array_are_refused(folder: Path) -> None:
    process = exported(folder, "blind", "Blind")
    assert process.returncode == 2
    assert "predictions depend on no array of a batch" in process.stderr
