"""Losses that are sums, or means over tokens: any number of ranks, shards and micro batches trains the whole batch's loss."""

import json
import sys

import pytest
import torch

import mtrain
from mtrain.core.checkpoint import store
from mtrain.errors import ScriptError
from tests.script.in_process import rank_of
from tests.script.runs import SCRIPTS, done, largest_difference, weights

sys.path.insert(0, str(SCRIPTS))
import train_sums

SCRIPT = str(SCRIPTS / "train_sums.py")
SOLO = ("backend.name=solo", "backend.options.framework=torch")
WAYS = {
    "shards-1": (), "shards-3": ("cluster.shards=3",), "accumulate-2": ("train.accumulate=2",),
    "shards-2-accumulate-2": ("cluster.shards=2", "train.accumulate=2"),
}  # fmt: skip
RANKS = {
    "ddp-2": ("-b", "ddp", "--nproc-per-node", "2"),
    "ddp-3": ("-b", "ddp", "--nproc-per-node", "3"),
    "horovod-2": ("-b", "horovod", "--nproc-per-node", "2"),
    "zero1-3": ("-b", "deepspeed", "--nproc-per-node", "3", "-o", "backend.options.stage=1"),
    "zero3-2": ("-b", "deepspeed", "--nproc-per-node", "2", "-o", "backend.options.stage=3"),
    "fsdp-3": ("-b", "fsdp", "--nproc-per-node", "3"),
}


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train_sums.py"])


def plain(kind: str) -> tuple[dict, list[float]]:
    """Return the weights and losses of a plain loop over whole batches."""
    model, data = train_sums.net().double(), train_sums.Sentences()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.01)
    starts = [first for _ in range(train_sums.EPOCHS) for first in range(0, train_sums.LENGTH, train_sums.BATCH)]
    assert len(starts) == 50
    curve = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda update: 0.5 * (1 + torch.tensor(torch.pi * update / 50, dtype=torch.float64).cos().item())
    )
    losses = []
    for first in starts:
        batch = slice(first, first + train_sums.BATCH)
        total, count = train_sums.of_batch(
            model, (torch.from_numpy(data.inputs[batch]), torch.from_numpy(data.targets[batch]))
        )
        loss = total if kind == "sum" else total / count
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        curve.step()
        losses.append(loss.item())
    return {name: value.numpy() for name, value in model.state_dict().items()}, losses


def recorded(run) -> list[dict]:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [record for line in lines if (record := json.loads(line))["kind"] == "update"]


@pytest.mark.parametrize("kind", train_sums.KINDS)
@pytest.mark.parametrize("way", WAYS)
def test_sums_and_weighted_means_are_those_of_the_whole_batch(tmp_path, monkeypatch, kind, way):
    monkeypatch.setattr(sys, "argv", ["train_sums.py", kind, *(("--accumulate", "2") if "acc" in way else ())])
    with rank_of(tmp_path / "run", *SOLO, "report.every_updates=1", *WAYS[way]):
        train_sums.main()
    expected, losses = plain(kind)
    saved = store.load(store.newest(tmp_path / "run/checkpoints")).state.weights
    assert largest_difference(saved, expected) <= 1e-12
    assert [record["losses"]["loss"] for record in recorded(tmp_path / "run")] == pytest.approx(losses, rel=1e-11)


@pytest.fixture(scope="module")
def plain_losses():
    return {kind: plain(kind) for kind in train_sums.KINDS}


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("ranks", "kind"),
    [
        ("ddp-2", "tokens"),
        *(pytest.param(ranks, kind, marks=pytest.mark.slow) for ranks in RANKS for kind in ("all", "total", "sum")),
    ],
)
@pytest.mark.job
def test_several_ranks_train_the_loss_of_the_whole_batch(tmp_path, plain_losses, ranks, kind):
    accumulate = ("--accumulate", "2") if kind != "total" else ()
    done(tmp_path, "--name", "many", *RANKS[ranks], "-o", "report.every_updates=1", SCRIPT, kind, *accumulate)
    saved, records = weights(tmp_path, "many"), recorded(tmp_path / "runs/many")
    for each in train_sums.KINDS if kind == "all" else [kind]:
        expected, losses = plain_losses[each]
        prefix, name = (f"{each}/", f"loss_{each}") if kind == "all" else ("", "loss")
        own = {key.removeprefix(prefix): value for key, value in saved.items() if key.startswith(prefix)}
        difference = largest_difference(own, expected)
        print(f"{each} on {ranks}: largest difference to the whole batch {difference:.1e}")
        assert difference <= 1e-12
        assert [record["losses"][name] for record in records] == pytest.approx(losses, rel=1e-11)


def trained(take, *overrides: str, updates: int = 3, **settings) -> list[torch.Tensor]:
    """Train a layer by ``take(optimizer, model, batch, number)``; return its weights."""
    data = train_sums.Sentences()
    with mtrain.session() as session:
        optimizer = mtrain.SGD(learning_rate=0.1)
        model, optimizer = session.prepare(lambda: torch.nn.Linear(8, 3), optimizer=optimizer, seed=5, **settings)
        batches = session.batches(torch.utils.data.DataLoader(data, batch_size=12), updates=updates)
        for number, (inputs, _) in enumerate(batches):
            take(optimizer, model(inputs.to(next(model.parameters()).dtype)), number)
    return [x.detach().clone() for x in model.parameters()]


@pytest.mark.parametrize("precision", ["fp64", "bf16", "fp16"])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_weight_that_is_equal_everywhere_changes_nothing(precision, accumulate):
    settings = {"precision": precision, "accumulate": accumulate, "clip_norm": 0.1, "updates": 4}
    mean = trained(lambda optimizer, output, _: optimizer.update(output.square().mean()), **settings)
    weighted = trained(lambda optimizer, output, _: optimizer.update(output.square().mean(), weight=4096.0), **settings)
    assert all(map(torch.equal, mean, weighted))


def test_gradients_and_skips_of_a_weighted_update_are_those_of_the_mean():
    def steps(weights):
        shown = []

        def take(optimizer, output, number):
            words = {} if weights is None else {"weight": torch.tensor(weights[number % 2])}
            optimizer.backward(output[number % 3 :].square().mean(), **words)
            if number % 2:
                shown.extend(gradient.clone() for gradient in optimizer.gradients().values())
                shown.append(torch.tensor(optimizer.norm, dtype=torch.float64))
                optimizer.skip() if number == 3 else optimizer.step()

        return [*trained(take, accumulate=2, precision="fp64", overlap=False, updates=4), *shown]

    one, other = steps(None), steps([0.375, 0.375])
    assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(one, other, strict=True))
    assert not torch.equal(one[0], steps([1.0, 3.0])[0])


def test_each_of_several_losses_has_its_own_weight():
    """Boxes and tokens of one batch; in a single pass each weight is divided by its own sum."""

    def both(optimizer, output, _):
        optimizer.backward(output[:4].square().sum(), reduction="sum", weight=4, retain_graph=True)
        optimizer.backward(output.mean(), weight=12)
        optimizer.step()

    def joined(optimizer, output, _):
        optimizer.update(output[:4].square().sum() / 4 + output.mean())

    settings = {"precision": "fp64", "overlap": False}
    for one, other in zip(trained(both, **settings), trained(joined, **settings), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize(
    ("words", "accumulate", "told"),
    [
        ({"weight": -1}, 1, "weight=-1 given; expected a single finite number of at least 0"),
        ({"weight": float("nan")}, 1, "weight=nan given"),
        ({"weight": float("inf")}, 1, "weight=inf given"),
        ({"weight": True}, 1, "weight=True given"),
        ({"weight": "7"}, 1, "weight='7' given"),
        ({"weight": [3]}, 1, r"weight=\[3\] given"),
        ({"weight": torch.ones(2)}, 1, r"weight=tensor\(\[1., 1.\]\) given"),
        ({"weight": torch.tensor(-2.0)}, 1, r"weight=tensor\(-2.\) given"),
        ({"weight": 0}, 1, r"update 0, micro batch 0 of 1\): all weights of the update are 0"),
        ({"weight": torch.tensor(0), "reduction": "sum"}, 2, r"micro batch 1 of 2\): all weights of the update are 0"),
        ({"reduction": "none"}, 1, "reduction='none' given; expected 'mean' or 'sum'"),
        ({"reduction": "total"}, 1, "reduction='total' given"),
    ],
)
@pytest.mark.parametrize("call", ["update", "backward"])
def test_a_weight_or_reduction_that_means_nothing_is_refused(call, words, accumulate, told):
    with pytest.raises(ScriptError, match=told):
        trained(
            lambda optimizer, output, _: getattr(optimizer, call)(output.square().mean(), **words),
            accumulate=accumulate,
        )


def test_a_weight_for_some_micro_batches_of_an_update_is_refused():
    def some(optimizer, output, number):
        optimizer.update(output.mean(), **({"weight": 3} if number == 1 else {}))

    with pytest.raises(ScriptError, match=r"update 0, micro batch 1 of 2\): a weight given for some losses"):
        trained(some, accumulate=2)

    def further(optimizer, output, _):
        optimizer.backward(output.mean(), weight=3, retain_graph=True)
        optimizer.backward(output.square().mean(), weight=4)

    with pytest.raises(ScriptError, match=r"update 0, micro batch 0 of 2\): a weight given for some losses"):
        trained(further, accumulate=2, overlap=False)


def test_a_first_micro_batch_without_weight_counts_nothing():
    def take(optimizer, output, number):
        optimizer.update(output[number % 2 :].mean(), weight=float(number % 2))

    def plain(optimizer, output, number):
        optimizer.update((number % 2) * 2 * output[number % 2 :].mean())

    settings = {"accumulate": 2, "precision": "fp64"}
    for one, other in zip(trained(take, **settings), trained(plain, **settings), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-13, atol=1e-15)
