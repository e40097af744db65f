"""All orders of the calls of a script's optimizers: each trains the weights of the plain loop, or is refused in one sentence."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mtrain
from mtrain.backends._torch.engine import of_one_rank
from mtrain.core.interfaces import Progress, Rates, Recipe
from mtrain.core.samples.feed import LoaderFeed
from mtrain.core.samples.sampler import Shares
from mtrain.core.update.cadence import Cadences
from mtrain.core.update.loop import Hooks, Job, Loop
from mtrain.core.update.stepping import Stepper, Use
from mtrain.errors import ScriptError
from mtrain.rank.script import gradients
from mtrain.rank.script.loop import ScriptLoop
from mtrain.rank.script.states import TRANSITIONS
from mtrain.rank.script.updater import Updater
from tests.ports import held_port
from tests.script.in_process import rank_of

Call = tuple[int, str]
"""Number of the model, and what is called for it."""
Program = Sequence[Sequence[Call]]
"""The calls for each micro batch."""
RATE, MOMENTUM = 0.1, 0.9


def networks(count: int) -> list[nn.Module]:
    torch.default_generator.manual_seed(0)  # `torch.manual_seed` formats call stacks
    return [nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2)).double() for _ in range(count)]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM, fused=True)


def loss_of(models: Sequence[nn.Module], own: int, x: Tensor) -> Tensor:
    """A loss of one model that goes through all of them, with a penalty of the gradient by the input."""
    x = x.clone().requires_grad_()
    y = x
    for model in models:
        y = model(y)
    (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    return (y - own).square().mean() + (slope.norm() - 1).square()


@dataclass
class Plain:
    """The loop of torch alone."""

    models: list[nn.Module]
    accumulate: int
    optimizers: list[torch.optim.Optimizer] = field(default_factory=list)

    def run(self, program: Program, data: Sequence[Tensor]) -> None:
        self.optimizers = [sgd(model) for model in self.models]
        for number, (calls, x) in enumerate(zip(program, data, strict=True)):
            for model, call in calls:
                self.call(model, call, x, last=(number + 1) % self.accumulate == 0)

    def call(self, number: int, call: str, x: Tensor, *, last: bool) -> None:
        model, optimizer = self.models[number], self.optimizers[number]

        def backward() -> Tensor:
            loss = loss_of(self.models, number, x) / self.accumulate
            own = torch.autograd.grad(loss, list(model.parameters()))
            for parameter, gradient in zip(model.parameters(), own, strict=True):
                parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
            return loss

        if call == "step(closure)":
            optimizer.step(lambda: [optimizer.zero_grad(), backward()][1])
            optimizer.zero_grad()
        if call in ("backward", "update", "gradients(loss)"):
            backward()
        if call in ("step", "update") and last:
            optimizer.step()
        if call in ("step", "update", "skip") and last:
            optimizer.zero_grad()


class Batches:
    """The loader of a program."""

    def __init__(self, data: Sequence[Tensor], updates: int) -> None:
        self.data, self.updates_per_epoch = data, updates

    def micro_batches(self, epoch: int, start: int = 0) -> Iterator[dict[str, Tensor]]:
        return iter([{"x": x.numpy()} for x in self.data])


class Ours:
    """The loop of a script, on one rank."""

    def __init__(
        self, models: list[nn.Module], data: Sequence[Tensor], *, accumulate: int, own_order: bool, searches: bool
    ) -> None:
        self.models = models
        rank = of_one_rank(torch.device("cpu"))
        steppers = []
        # An optimizer of torch is tried before it is used, which takes most of the time of a program; closures need one.
        own = {"native_optimizer": sgd} if searches else {}
        for number, model in enumerate(models):
            recipe = Recipe(
                rule="sgd", groups=(("", {"momentum": MOMENTUM}),), micro_batch=1, accumulate=accumulate, own_order=own_order,
                own_model=True, precision="fp64", named=len(models) > 1, **own,
            )  # fmt: skip
            _, optimizer = rank.prepare(lambda model=model: model, recipe)
            name = "" if len(models) == 1 else "AB"[number]
            steppers.append(Stepper(optimizer, lambda _: Rates(learning_rates=(RATE,)), name=name, own_order=own_order))
        updates = len(data) // accumulate
        job = Job(
            session=rank,
            steppers=steppers,
            feed=LoaderFeed(session=rank, loader=Batches(data, updates), global_batch=1),
            total_updates=updates,
            shares=Shares(rank=0, size=1, shards=1, rounds=accumulate),
        )
        self.loop = ScriptLoop(Loop(job, Cadences(evaluate_at_end=False), Hooks(), Progress()), differs="other samples")
        self.updaters = [Updater(stepper.optimizer) for stepper in steppers]
        for model, updater, stepper in zip(models, self.updaters, steppers, strict=True):
            gradients.watch(model, self.loop.saw_gradients)
            updater.stepper, updater.loop = stepper, self.loop

    def run(self, program: Program) -> None:
        for calls, batch in zip(program, self.loop, strict=True):
            for model, call in calls:
                self.call(model, call, batch["x"])
        assert next(self.loop, None) is None
        self.loop.leave()

    def call(self, model: int, call: str, x: Tensor) -> None:
        updater = self.updaters[model]
        stepper = updater.stepper
        assert stepper is not None
        before, micro = stepper.use, self.loop.loop.micro
        assert micro is not None
        loss = lambda: loss_of(self.models, model, x)  # noqa: E731
        if call == "step(closure)":
            updater.step(lambda: updater.backward(loss()))
        elif call == "gradients(loss)":
            updater.gradients(loss())
        elif call in ("update", "backward"):
            getattr(updater, call)(loss())
        else:
            getattr(updater, call)()
        expected = TRANSITIONS[call][before]
        assert stepper.use is (Use.ASKED if not micro.last and expected in (Use.STEPPED, Use.SKIPPED) else expected)


def tried(
    program: Program, *, models: int = 1, accumulate: int = 1, own_order: bool = True, searches: bool = False
) -> str | None:
    """Run a program beside the plain loop, and compare; return the refusal, or None."""
    data = list(torch.linspace(-1, 1, 2 * len(program), dtype=torch.float64).reshape(len(program), 1, 2))
    ours, plain = networks(models), Plain(networks(models), accumulate)
    try:
        Ours(ours, data, accumulate=accumulate, own_order=own_order, searches=searches).run(program)
    except ScriptError as error:
        return str(error)
    plain.run(program, data)
    for one, other in zip(ours, plain.models, strict=True):
        for a, b in zip(one.parameters(), other.parameters(), strict=True):
            assert torch.equal(a, b), (program, a - b)
            assert a.grad is None, program
    return None


def orders(
    calls: Sequence[Call], *, longest: int, micro_batches: int, settings: dict[str, Any]
) -> Iterator[str | None]:
    """Try all programs, and yield their refusals; what follows a call that was refused needs no trial."""

    def grow(begun: list[list[Call]]) -> Iterator[str | None]:
        refusal = tried([*begun, *[[] for _ in range(micro_batches - len(begun))]], **settings)
        if refusal is None or refusal.startswith("session.batches:"):
            if len(begun[-1]) < longest:
                for call in calls:
                    yield from grow([*begun[:-1], [*begun[-1], call]])
            if len(begun) < micro_batches and begun[-1]:
                yield from grow([*begun, []])
        yield refusal

    return grow([[]])


SENTENCE = re.compile(r"(A's |B's )?optimizer\.[a-z]+(\([a-z]+\))?[ :(]|session\.batches: ")
WITHOUT_CLOSURE = tuple(call for call in TRANSITIONS if call != "step(closure)")
CASES = {
    "one batch": ({}, WITHOUT_CLOSURE, 3, 1),
    "one batch, closures": ({"searches": True}, ("step(closure)", "backward", "step", "update"), 2, 1),
    "one batch, exchanged meanwhile": ({"own_order": False}, WITHOUT_CLOSURE, 3, 1),
    "two updates": ({}, ("update", "backward", "step", "skip"), 2, 2),
    "two micro batches": ({"accumulate": 2}, ("update", "backward", "step", "skip"), 2, 2),
    "two micro batches, exchanged meanwhile": ({"accumulate": 2, "own_order": False}, ("update", "backward", "step"), 2, 2),
    "two models": ({"models": 2}, ("update", "backward", "step", "gradients"), 3, 1),
    "two models, two updates": ({"models": 2}, ("update", "backward", "step"), 2, 2),
    "two models, two micro batches": ({"models": 2, "accumulate": 2}, ("update", "backward", "step"), 2, 2),
}  # fmt: skip


def test_an_exchange_is_not_left_out_by_hand(tmp_path, monkeypatch) -> None:
    place = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "MASTER_PORT": held_port()}
    for name, value in {**place, "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, str(value))
    x = torch.ones(4, 2, dtype=torch.float64)
    with rank_of(tmp_path / "run", "backend.name=ddp", "train.accumulate=2"), mtrain.session() as session:
        model, optimizer = session.prepare(lambda: networks(1)[0], optimizer=mtrain.SGD(learning_rate=0.1))
        for number, rows in enumerate(session.batches(list(x), global_batch=2, updates=1)):
            with pytest.raises(ScriptError, match=r"session.prepare\(accumulate=N\)"), model.no_sync():
                pass
            optimizer.update(model(rows).sum())
            assert number < 2


def test_a_skip_in_mid_update_is_no_decision_about_another_micro_batch() -> None:
    mixed = [[(0, "backward"), (0, "skip")], [(0, "backward"), (0, "step")]]
    assert "called after skip() for an earlier micro batch" in str(tried(mixed, accumulate=2))
    assert tried([[(0, "backward"), (0, "skip")]] * 2, accumulate=2) is None


@pytest.mark.parametrize("case", CASES)
def test_every_order_trains_as_the_plain_loop_or_is_refused_in_one_sentence(case: str) -> None:
    settings, names, longest, micro_batches = CASES[case]
    calls = [(model, name) for model in range(settings.get("models", 1)) for name in names]
    refusals = list(orders(calls, longest=longest, micro_batches=micro_batches, settings=settings))
    trained = refusals.count(None)
    told = {refusal for refusal in refusals if refusal is not None}
    print(f"{case}: {len(refusals)} orders, {trained} train as the plain loop, {len(told)} sentences for the others")
    assert trained
    assert told
    for sentence in told:
        assert SENTENCE.match(sentence), sentence
        assert ";" in sentence, f"no remedy: {sentence}"
