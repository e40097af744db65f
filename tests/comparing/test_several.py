"""Of a job with several models, the one that differs first is named, and why where that is known."""

import json
from pathlib import Path

import numpy as np
import pytest

from mtrain.compare.recorded import RecordedRequest
from mtrain.compare.recorded import compare as compare_recorded
from mtrain.compare.several import explain
from mtrain.compare.traces import trace_of, with_recipe
from mtrain.core.state.trace import SIZE
from mtrain.records.history import History
from mtrain.spec import config
from mtrain_trace.comparing import compare
from mtrain_trace.reading import Trace
from tests.comparing.jobs import RECIPE

UPDATES = 4
PARTS = ("weights/0", "weights/1", "momentum/0", "momentum/1", "buffers/slow")
"""Groups 0 and 1 are those of the models G and D; no update trains the model slow."""


def series(seed: int) -> np.ndarray:
    """A part's sketch before and after each update; each moves on from the one before."""
    return np.random.default_rng(seed).normal(size=(UPDATES + 1, SIZE)).cumsum(axis=0)


LOSSES = {name: np.linspace(first, first / 2, UPDATES) for name, first in (("loss_G", 0.7), ("loss_D", 1.4))}


def looked(sketches: dict, place: int) -> dict:
    digests = {part: rows[place].tobytes().hex()[:16] for part, rows in sketches.items()}
    return {
        "digests": digests, "sketches": {part: rows[place].tolist() for part, rows in sketches.items()},
        "ranks_agree": True, "models": ["G", "D"], "samples": "0" * 16,
    }  # fmt: skip


def trace(**changes) -> Trace:
    """The trace of a GAN with a slow copy of its generator; ``changes``: other values."""
    sketches = {part: series(seed) for seed, part in enumerate(PARTS)} | changes.get("sketches", {})
    losses = LOSSES | changes.get("losses", {})
    norms = {"G": np.full(UPDATES, 0.3), "D": np.full(UPDATES, 0.4)} | changes.get("norms_of", {})
    trained = changes.get("trained", [frozenset("GD")] * UPDATES)
    rates = changes.get("rates", np.full((UPDATES, 2), 0.1))
    history = History()
    history.add({"kind": "start", "update": 0, "trace": looked(sketches, 0)})
    for u in range(UPDATES):
        models = {
            name: {"gradient_norm": norms[name][u] if name in norms else None, "updated": name in trained[u]}
            for name in sorted({"G", "D", *trained[u]})
        }
        history.add(
            {
                "kind": "update", "update": u, "losses": {name: values[u] for name, values in losses.items()},
                "gradient_norm": None, "learning_rates": rates[u].tolist(), "models": models,
                "trace": looked(sketches, u + 1),
            }
        )  # fmt: skip
    return with_recipe(trace_of(history, loss="loss"), RECIPE, ranks=2)


def told(other: Trace) -> str:
    """What is said of a job beside that of ``trace()``."""
    return " / ".join(explain(compare(trace(), other)))


def changed(values: np.ndarray, update: int, by: float) -> np.ndarray:
    """The values with another one at ``update``."""
    other = values.copy()
    other[update] += by
    return other


def moved(part: str, update: int, how) -> dict:
    """Sketches in which the step of a part in ``update`` is ``how(step)``."""
    rows = series(PARTS.index(part))
    rows[update + 1] = rows[update] + how(rows[update + 1] - rows[update])
    return {part: rows}


def test_two_equal_jobs_have_no_cause_of_difference():
    assert told(trace()) == ""


def test_a_gradient_that_is_left_in_another_model_is_named():
    other = trace(norms_of={"D": changed(np.full(UPDATES, 0.4), 2, 0.25)})
    assert "the gradient of model D is not (0.65 instead of 0.4), that of model G is" in told(other)
    assert "the gradient of another model's loss is left in it" in told(other)


def test_a_loss_that_is_given_to_another_model_too_is_named():
    added = LOSSES["loss_G"][1]
    other = trace(losses={"loss_D": changed(LOSSES["loss_D"], 1, added)})
    assert "the loss of model D is larger by that of model G" in told(other)
    other = trace(losses={"loss_D": changed(LOSSES["loss_D"], 1, added * 1.01)})
    assert "is larger by that of model G" not in told(other)
    assert told(other).startswith("model D: ")


def test_a_target_network_that_is_trained_is_named():
    other = trace(
        trained=[frozenset("GD"), *[frozenset({"G", "D", "slow"})] * 3], sketches=moved("buffers/slow", 1, lambda s: -s)
    )
    assert told(other).startswith("in update 2 it trains model slow, which the reference never trains")


def test_a_model_that_is_left_out_of_an_update_is_named():
    other = trace(
        trained=[*[frozenset("GD")] * 2, frozenset("G"), frozenset("GD")],
        sketches=moved("weights/1", 2, lambda s: 0 * s),
    )
    assert "in update 3 it does not train model D, and the reference does" in told(other)


def test_an_average_of_the_wrong_model_or_at_another_rate_is_named():
    of_another = np.random.default_rng(9).normal(size=SIZE)
    message = told(trace(sketches=moved("buffers/slow", 2, lambda step: of_another)))
    assert (
        "the trained models are the same, and model slow, which no update trains, is not: it follows another model"
        in message
    )
    assert "model slow, which no update trains, moves 2 times as far" in told(
        trace(sketches=moved("buffers/slow", 2, lambda s: 2 * s))
    )
    assert "nothing moves it" in told(trace(sketches=moved("buffers/slow", 2, lambda s: 0 * s)))


def test_a_scheduler_whose_state_is_lost_is_named():
    rates = np.full((UPDATES, 2), 0.1)
    rates[3, 1] = 0.4
    other = trace(rates=rates, sketches=moved("weights/1", 3, lambda s: 4 * s))
    message = told(other)
    assert "the settings of the optimizer differ (A and B): lr 0.1 and 0.4 (group 1 of D)" in message
    assert "the learning rates agreed before" in message
    assert "was not resumed or not stepped" in message


def run_folder(path: Path, *, ranks: int, times: dict[str, float]) -> Path:
    """A run folder of the GAN, in which the losses and gradients of some models are multiplied."""
    path.mkdir()
    lines = [{"kind": "start", "update": 0, "ranks": ranks, "backend": "ddp"}]
    for u in range(UPDATES):
        losses = {name: float(values[u]) * times.get(name[-1], 1.0) for name, values in LOSSES.items()}
        models = {name: {"gradient_norm": 0.3 * times.get(name, 1.0), "updated": True} for name in "GD"}
        update = {"kind": "update", "update": u, "losses": losses, "gradient_norm": None, "learning_rates": [0.1, 0.1]}
        lines.append({**update, "models": models})
    (path / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return path


@pytest.mark.parametrize(
    ("times", "said"),
    [
        (
            {"D": 2.0},
            "the loss_D of B is 2 times that of A, as many times as there are ranks: summed over ranks and not averaged, or multiplied by "
            "their number; the gradient of model D is 2 times as long too",
        ),
        ({"D": 0.5, "G": 1.01}, "the loss_D of B is 1/2 of that of A, one part for each rank: averaged twice"),
        ({"D": 2.0, "G": 2.0}, "the loss of B is 2 times that of A, as many times as there are ranks"),
        ({"D": 1.3}, "the loss is computed otherwise"),
    ],
)
def test_the_loss_of_one_model_that_is_multiplied_is_named_of_run_folders(
    tmp_path: Path, times: dict[str, float], said: str
) -> None:
    folders = [run_folder(tmp_path / "a", ranks=1, times={}), run_folder(tmp_path / "b", ranks=2, times=times)]
    (result,) = compare_recorded(RecordedRequest(folders=folders))
    (comparison,) = result.comparisons
    assert comparison.parting is not None
    assert comparison.parting.update == 1
    assert len(comparison.sentences) == 1
    assert said in comparison.sentences[0]
    assert ("loss_" in comparison.sentences[0]) is ("loss_" in said)


def test_the_keys_in_which_the_specs_of_two_runs_differ_are_said_first(tmp_path: Path) -> None:
    folders = [run_folder(tmp_path / "a", ranks=1, times={}), run_folder(tmp_path / "b", ranks=1, times={"D": 1.3})]
    for folder, seed in zip(folders, (0, 1), strict=True):
        loaded = config.load("vit_digits", overrides=[f"train.seed={seed}", f"report.dir={folder}"])
        lines = (folder / "metrics.jsonl").read_text().replace("loss_D", "total")
        (folder / "metrics.jsonl").write_text(lines)
        (folder / "spec.json").write_text(config.resolved_json(loaded.spec))
    (result,) = compare_recorded(RecordedRequest(folders=folders))
    assert result.comparisons[0].sentences[0] == "the specs differ (A and B): train.seed 0 and 1"
    assert len(result.comparisons[0].sentences) > 1
    (same,) = compare_recorded(RecordedRequest(folders=[folders[0], folders[0]]))
    assert not any("the specs differ" in remark for remark in same.comparisons[0].remarks)
