"""Schedulers of torch in a script: any of them gives the learning rates that it gives in a plain loop, and is saved and restored."""

import itertools
import json
import sys

import pytest
import torch

import mtrain
from mtrain.core.checkpoint import store
from mtrain.errors import ScriptError
from mtrain.rank.script import kept
from mtrain.rank.script.native import RecordingOptimizer
from mtrain.rank.script.schedulers import adopt, groups_of_native, make_scheduler
from tests.script.runs import SCRIPTS

sys.path.insert(0, str(SCRIPTS))
from points import Plain

schedulers = torch.optim.lr_scheduler

STEPS = 12


def sequential(optimizer):
    """A warm-up, and a cosine after it."""
    parts = [schedulers.LinearLR(optimizer, 0.1, total_iters=3), schedulers.CosineAnnealingLR(optimizer, 6)]
    return schedulers.SequentialLR(optimizer, parts, milestones=[4])


def chained(optimizer):
    """Two curves, one on top of the other."""
    return schedulers.ChainedScheduler(
        [schedulers.ConstantLR(optimizer, 0.3, 4), schedulers.ExponentialLR(optimizer, 0.9)]
    )


class ByMetric:
    """A schedule that is a function of metrics, as a script may write it."""

    def __init__(self, optimizer):
        self.optimizer, self.metrics = optimizer, []

    def step(self, metric):
        self.metrics.append(metric)
        for group in self.optimizer.param_groups:
            group["lr"] = 0.1 / (1 + sum(self.metrics))

    def state_dict(self):
        return {"metrics": self.metrics}

    def load_state_dict(self, state):
        self.metrics = list(state["metrics"])


MAKERS = {
    "OneCycleLR": lambda o: schedulers.OneCycleLR(o, max_lr=0.2, total_steps=STEPS + 2),
    "CyclicLR": lambda o: schedulers.CyclicLR(o, 0.01, 0.1, step_size_up=3),
    "SequentialLR": sequential,
    "ChainedScheduler": chained,
    "CosineAnnealingWarmRestarts": lambda o: schedulers.CosineAnnealingWarmRestarts(o, 4),
    "CosineAnnealingLR": lambda o: schedulers.CosineAnnealingLR(o, 5),
    "LambdaLR": lambda o: schedulers.LambdaLR(o, lambda step: (step + 1) / STEPS),
    "MultiplicativeLR": lambda o: schedulers.MultiplicativeLR(o, lambda step: 0.9),
    "MultiStepLR": lambda o: schedulers.MultiStepLR(o, [3, 7]),
    "PolynomialLR": lambda o: schedulers.PolynomialLR(o, total_iters=9),
    "StepLR": lambda o: schedulers.StepLR(o, 4),
    "ReduceLROnPlateau": lambda o: schedulers.ReduceLROnPlateau(o, factor=0.5, patience=1),
    "SWALR": lambda o: torch.optim.swa_utils.SWALR(o, swa_lr=0.01, anneal_epochs=5),
    "a function of metrics": ByMetric,
}


def optimizer_of(kind, learning_rates=(0.1, 0.02)):
    """An optimizer of torch with two groups."""
    groups = [{"params": [torch.zeros(2, requires_grad=True)], "lr": rate} for rate in learning_rates]
    return torch.optim.Adam(groups, betas=(0.8, 0.99)) if kind == "adam" else torch.optim.SGD(groups, momentum=0.9)


def step(scheduler, number):
    """Step a scheduler as a loop does."""
    wants_metric = isinstance(scheduler, ByMetric | schedulers.ReduceLROnPlateau)
    scheduler.step(*([1.0 + number // 5] if wants_metric else []))


def momentum_of(optimizer):
    group = optimizer.param_groups[0]
    return group["betas"][0] if "betas" in group else group["momentum"]


@pytest.mark.parametrize("kind", ["sgd", "adam"])
@pytest.mark.parametrize("name", MAKERS)
def test_any_scheduler_gives_the_rates_of_a_plain_loop_and_goes_on_from_its_saved_state(name, kind):
    plain = optimizer_of(kind)
    reference = MAKERS[name](plain)
    groups = groups_of_native(optimizer_of(kind))
    ours = make_scheduler(MAKERS[name], groups, framework="torch", ratios_stay=False)
    seen = []
    for number in range(STEPS):
        rates = ours(number)
        seen.append((*rates.learning_rates, rates.momentum))
        assert rates.learning_rates == [group["lr"] for group in plain.param_groups]
        assert (rates.momentum or momentum_of(optimizer_of(kind))) == momentum_of(plain)
        plain.step()
        step(reference, number)
        step(ours.scheduler, number)
        if number == STEPS // 2:  # as a checkpoint holds it
            text = json.dumps(kept.as_plain(ours.state_dict(), name="scheduler"))
            ours = make_scheduler(MAKERS[name], groups, framework="torch", ratios_stay=False)
            ours.load_state_dict(kept.from_plain(json.loads(text), torch.from_numpy))
    assert len(set(seen)) > 1, "the rates change"


def test_a_scheduler_that_was_made_with_its_optimizer_is_taken_over():
    plain, given = optimizer_of("sgd"), optimizer_of("sgd")
    reference, scheduler = sequential(plain), sequential(given)
    ours = adopt(scheduler, given)
    assert [group["lr"] for group in given.param_groups] == [0.1, 0.02], "mtrain scales the first learning rates"
    for number in range(STEPS):
        (rate,) = ours(number).learning_rates
        assert rate == plain.param_groups[0]["lr"]
        plain.step()
        reference.step()
        scheduler.step()
    assert [group["lr"] for group in given.param_groups] == [0.1, 0.02], "it changes a stand-in"
    with pytest.raises(ScriptError, match="returned an optimizer and a StepLR; expected a scheduler of this optimizer"):
        adopt(schedulers.StepLR(optimizer_of("sgd"), 1), given)


class Own:
    """A scheduler as scripts write them, that is nothing of torch's: a warm-up, and then perhaps the curve that it wraps."""

    first = 0.25

    def __init__(self, optimizer):
        self.number = 0
        self.hold(optimizer)
        self.bases = [group["lr"] for group in self.groups()]
        self.set(self.first)

    def hold(self, optimizer):
        self.opt = optimizer

    def groups(self):
        return self.opt.param_groups

    def set(self, factor):
        for base, group in zip(self.bases, self.groups(), strict=True):
            group["lr"] = factor * base

    def step(self):
        self.number += 1
        self.set(min(1.0, self.first + self.number / 4))

    def state_dict(self):
        return {"number": self.number}

    def load_state_dict(self, state):
        self.number = state["number"]


class OfGroups(Own):
    def hold(self, optimizer):
        self.held = optimizer.param_groups

    def groups(self):
        return self.held


class OfEachGroup(OfGroups):
    def hold(self, optimizer):
        self.held = list(optimizer.param_groups)


class Wrapping(Own):
    def hold(self, optimizer):
        self.after = schedulers.ExponentialLR(optimizer, 0.5)

    def groups(self):
        return self.after.optimizer.param_groups

    def step(self):
        if self.number >= 4:
            self.after.step()
        else:
            super().step()


class WrappingOwn(Own):
    def hold(self, optimizer):
        self.parts = {"inner": Own(optimizer)}

    def groups(self):
        return self.parts["inner"].groups()


class FromZero(Own):
    first = 0.0


class Slotted:
    __slots__ = ("factor", "opt")

    def __init__(self, optimizer):
        self.opt, self.factor = optimizer, 1.0

    def step(self):
        self.factor *= 0.5
        for group in self.opt.param_groups:
            group["lr"] *= 0.5

    def state_dict(self):
        return {"factor": self.factor}

    def load_state_dict(self, state):
        self.factor = state["factor"]


@pytest.mark.parametrize("kind", ["sgd", "adam"])
@pytest.mark.parametrize("own", [Own, OfGroups, OfEachGroup, Wrapping, WrappingOwn, Slotted])
def test_an_own_scheduler_that_was_made_with_its_optimizer_is_taken_as_one_made_from_it(own, kind):
    plain, given = optimizer_of(kind), optimizer_of(kind)
    reference, scheduler = own(plain), own(given)
    ours = adopt(scheduler, given)
    first = [group["lr"] for group in given.param_groups]
    assert first[0] / first[1] == pytest.approx(5), "mtrain scales the first learning rates"
    beside = make_scheduler(own, groups_of_native(optimizer_of(kind)), framework="torch", ratios_stay=True)
    seen = []
    for number in range(STEPS):
        rates = ours(number)
        seen += rates.learning_rates
        assert rates.learning_rates == [plain.param_groups[0]["lr"]] == beside(number).learning_rates
        plain.step()
        for each in (reference, scheduler, beside.scheduler):
            each.step()
        if number == STEPS // 2:
            other = optimizer_of(kind)
            ours, state = adopt(scheduler := own(other), other), ours.state_dict()
            ours.load_state_dict(
                kept.from_plain(json.loads(json.dumps(kept.as_plain(state, name="x"))), torch.from_numpy)
            )
    assert len(set(seen)) > 1
    assert [group["lr"] for group in given.param_groups] == first, "it changes a stand-in"


def test_an_own_scheduler_that_begins_with_0_leaves_the_optimizer_its_learning_rate():
    optimizer = torch.optim.SGD([torch.zeros(2, requires_grad=True)], lr=0.1)
    recorded = RecordingOptimizer(lambda model: (optimizer, FromZero(optimizer)))
    assert recorded(None) is optimizer
    assert recorded.learning_rate == 0.1
    rates = []
    for number in range(6):
        rates += recorded.scheduler(number).learning_rates
        recorded.scheduler.scheduler.step()
    assert rates == pytest.approx([0.0, 0.025, 0.05, 0.075, 0.1, 0.1])


class Hidden(Own):
    def hold(self, optimizer):
        self.groups = lambda: optimizer.param_groups


class Stateless:
    def __init__(self, optimizer):
        self.optimizer = optimizer

    def step(self):
        pass


@pytest.mark.parametrize(
    "own", [Hidden, Stateless, lambda optimizer: Own(optimizer_of("sgd")), lambda optimizer: optimizer]
)
def test_an_own_scheduler_whose_optimizer_or_state_cannot_be_seen_is_refused(own):
    given = optimizer_of("sgd")
    with pytest.raises(ScriptError, match=r"returned an optimizer and a \w+; expected .*scheduler="):
        adopt(own(given), given)


def test_rates_of_groups_that_an_optimizer_of_torch_cannot_follow_are_refused():
    groups = groups_of_native(optimizer_of("sgd"))
    of_each = [lambda step: 0.5**step, lambda step: 0.9**step]
    ours = make_scheduler(lambda o: schedulers.LambdaLR(o, of_each), groups, framework="torch", ratios_stay=True)
    assert ours(0).learning_rates == [0.1]
    ours.scheduler.step()
    with pytest.raises(ScriptError, match="learning rates of other ratios than those of the optimizer"):
        ours(1)


# -------------------------------------------------------------------------------------------------- whole trainings
def network():
    return torch.nn.Sequential(torch.nn.Linear(8, 12), torch.nn.Tanh(), torch.nn.Linear(12, 2))


@pytest.fixture
def script(monkeypatch, tmp_path):
    """An empty folder, as a script's."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["script.py"])


LOADER = torch.utils.data.DataLoader(Plain(48, 0), batch_size=8)
CURVE = {"max_lr": 0.3, "total_steps": 18}


def loss_of(model, batch):
    return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])


def trained_plainly(make, curve):
    """The weights of a plain loop of three epochs, with a scheduler that is stepped in each update."""
    torch.manual_seed(5)
    model = network()
    optimizer = make(model)
    scheduler = curve(optimizer)
    for _, batch in itertools.product(range(3), LOADER):
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
        scheduler.step()
    return list(model.parameters())


SGD = {"lr": 0.05, "momentum": 0.8}
ADAMW = {"lr": 1e-2, "betas": (0.8, 0.99)}


@pytest.mark.parametrize(
    ("make", "given"),
    [
        (
            lambda m: torch.optim.SGD(m.parameters(), fused=True, **SGD),
            {"optimizer": mtrain.SGD(learning_rate=0.05, momentum=0.8)},
        ),
        (
            lambda m: torch.optim.SGD(m.parameters(), **SGD),
            {"optimizer": lambda m: torch.optim.SGD(m.parameters(), **SGD)},
        ),
        (
            lambda m: torch.optim.AdamW(m.parameters(), **ADAMW),
            {"optimizer": lambda m: torch.optim.AdamW(m.parameters(), **ADAMW)},
        ),
    ],
)
def test_a_cycle_of_the_momentum_reaches_the_rule(make, given, script):
    def curve(optimizer):
        return schedulers.OneCycleLR(optimizer, **CURVE)

    with mtrain.session() as session:
        model, optimizer = session.prepare(network, scheduler=curve, seed=5, **given)
        for batch in session.batches(LOADER, epochs=3):
            optimizer.update(loss_of(model, batch))
            optimizer.scheduler.step()
    for own, other in zip(model.parameters(), trained_plainly(make, curve), strict=True):
        assert torch.equal(own, other)


def test_an_optimizer_that_comes_with_its_scheduler_trains_what_the_plain_loop_trains(script):
    def make(model):
        return torch.optim.AdamW(model.parameters(), **ADAMW)

    made_of = []

    def both(model):
        optimizer = make(model)
        made_of.append(optimizer)
        return optimizer, schedulers.OneCycleLR(optimizer, **CURVE)

    with mtrain.session() as session:
        model, optimizer = session.prepare(network, optimizer=both, seed=5)
        assert "step" not in vars(made_of[0]), "a copy of the optimizer would step the first one"
        for batch in session.batches(LOADER, epochs=3):
            optimizer.update(loss_of(model, batch))
            optimizer.scheduler.step()
    reference = trained_plainly(make, lambda optimizer: schedulers.OneCycleLR(optimizer, **CURVE))
    for own, other in zip(model.parameters(), reference, strict=True):
        assert torch.equal(own, other)


def test_training_stops_early_and_the_best_checkpoint_is_that_of_the_metric(script):
    with mtrain.session() as session:
        model, optimizer = session.prepare(network, optimizer=mtrain.SGD(learning_rate=0.5), seed=5)
        errors = iter([3.0, 1.0, 2.0, 2.5, 0.1])
        for epoch in session.epochs(5):
            for batch in session.batches(LOADER):
                optimizer.update(loss_of(model, batch))
            error = next(errors)
            session.evaluate(model, Plain(20, 1), metric=lambda p, t, e=error: {"error": e}, score="-error")
            if epoch - session.best["epoch"] >= 2:
                break
        assert (session.best["epoch"], session.best["error"]) == (1, 1.0)
    assert session.progress.update == 24
    assert store.load(store.best(session.run_dir / "checkpoints")).progress.update == 12
