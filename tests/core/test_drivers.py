"""The two drivers of the training loop, that of a spec and that of a script, on ranks that are threads, with numpy."""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest

from mtrain.core.collective import OneRank
from mtrain.core.interfaces import Capabilities, Progress, Rates, Why
from mtrain.core.network.noise import shard_seed
from mtrain.core.ranks.agreement import (
    HEAD,
    NO_REQUESTS,
    Agreement,
    RankPlace,
    RanksDisagree,
    Requests,
    head,
    read_head,
)
from mtrain.core.samples.feed import LoaderFeed
from mtrain.core.samples.sampler import Shares
from mtrain.core.update.cadence import Cadence, Cadences
from mtrain.core.update.loop import Hooks, Job, Loop
from mtrain.core.update.stepping import Stepper
from mtrain.core.update.trainer import train
from mtrain.errors import Interrupted, NonFiniteError, ScriptError
from mtrain.rank.script.loop import ScriptLoop
from mtrain.rank.script.updater import Updater
from tests.core.test_trainer import Descent, Line, Numpy, Ranks, Scalar

DRIVERS = ("spec", "script")
UPDATES_PER_EPOCH = 4


class Loss(Scalar):
    """A loss that a script may use."""

    shape = ()

    def detach(self) -> float:
        return float(self)

    def __mul__(self, weight: float) -> "Loss":
        scaled = Loss(float(self) * weight)
        scaled.weight = weight
        return scaled

    weight = 1.0
    backward = None


class Curve(Line):
    """A Line whose losses are good for both drivers."""

    def __call__(self, batch: Mapping[str, np.ndarray]) -> dict[str, Any]:
        return {"total": Loss(super().__call__(batch)["total"])}


class Exchanged(Descent):
    """Gradient descent on the mean of all ranks' gradients, with weights of shards."""

    def __init__(self, model: Line, accumulate: int, collective: Any) -> None:
        super().__init__(model, accumulate)
        self.collective = collective
        self.moved: list[bool] = []
        self.made = 0
        self.bad: set[int] = set()
        """Updates of this model whose norm is ``bad_norm``."""
        self.bad_norm = math.inf

    @contextmanager
    def micro_batch(self, *, last: bool, moves_buffers: bool = True) -> Iterator[None]:
        self.lasts.append(last)
        self.moved.append(moves_buffers)
        yield

    def backward(self, loss: Any) -> None:
        slope = 2 * (self.model.weight - 2) * np.mean(self.model.last**2)
        self.gradient += float(slope) * loss.weight / self.accumulate

    def step(self, rates: Rates) -> float:
        self.gradient = float(self.collective.all_reduce(np.array([self.gradient]), "mean")[0])
        self.made += 1
        norm = super().step(rates)
        return self.bad_norm if self.made - 1 in self.bad else norm


class Counting:
    """A collective that counts its vectors."""

    def __init__(self, inside: Any) -> None:
        self.inside, self.rank, self.size = inside, inside.rank, inside.size
        self.lengths: list[int] = []

    def all_reduce(self, x: np.ndarray, op: str) -> Any:
        self.lengths.append(len(x))
        return self.inside.all_reduce(x, op)

    def all_gather(self, value: Any) -> list[Any]:
        return self.inside.all_gather(value)  # type: ignore[no-any-return]


class Shard:
    """Loader of the shards of this rank; shard k of an update has the same numbers on every rank."""

    updates_per_epoch = UPDATES_PER_EPOCH

    def __init__(self, shares: Shares) -> None:
        self.shares = shares

    def micro_batches(self, epoch: int, start: int = 0) -> Iterator[dict[str, np.ndarray]]:
        for update in range(start, UPDATES_PER_EPOCH):
            for number in range(self.shares.passes):
                yield {"x": np.random.default_rng([epoch, update, self.shares.shard(number)]).normal(size=3)}

    def close(self) -> None:
        """Do nothing."""


class Bench:
    """One rank with either driver, and everything that it calls written down."""

    def __init__(
        self,
        driver: str,
        *,
        collective: Any = None,
        shards: int | None = None,
        rounds: int = 2,
        updates: int = 10,
        late: bool = False,
        body: Callable[["Bench", int], None] = lambda bench, number: None,
        progress: Progress | None = None,
        models: int = 1,
        **cadences: Any,
    ) -> None:
        self.driver, self.body, self.asked_to_stop = driver, body, False
        session: Any = Numpy()
        self.seeds: list[int] = []
        session.capabilities = Capabilities(seed=self.seeds.append)
        self.collective = session.collective = Counting(collective or OneRank())
        size = self.collective.size
        rounds = rounds if models == 1 else 1  # a model steps after the last micro batch of an update
        self.shares = Shares(rank=self.collective.rank, size=size, shards=shards or size, rounds=rounds)
        self.models = [Curve() for _ in range(models)]
        self.model = self.models[0]
        optimizers: Any = [Exchanged(model, self.shares.passes, collective or OneRank()) for model in self.models]
        self.optimizer = optimizers[0]
        self.uses: Callable[[int, int], bool] = lambda update, model: True
        """Of a script: whether an update is one of a model, by their numbers."""
        self.records: list[dict[str, Any]] = []
        self.saves: list[tuple[int, Why]] = []
        progress = progress or Progress()
        loader: Any = Shard(self.shares)
        job = Job(
            session=session,
            steppers=[
                Stepper(
                    optimizer,
                    lambda update: Rates(learning_rates=(0.05 / (1 + update),)),
                    count=progress.update,
                    name="" if models == 1 else "ABC"[place],
                    own_order=models > 1,
                )
                for place, optimizer in enumerate(optimizers)
            ],
            feed=LoaderFeed(session=session, loader=loader, global_batch=6),
            total_updates=updates,
            shares=self.shares,
            seed=0,
            late=late,
            sums_metrics=driver == "spec",
        )
        hooks = Hooks(
            on_update=self.records.append,
            save=self.save,
            stop=lambda: self.asked_to_stop,
        )
        self.loop = Loop(job, Cadences(evaluate_at_end=False, **cadences), hooks, progress)

    def save(self, progress: Progress, score: float | None, why: Why) -> None:
        self.saves.append((progress.update, why))
        self.saved, self.weight = progress, self.model.weight

    def run(self) -> Progress:
        """Train to the end; ``body`` is called with the number of each micro batch once its loss was used."""
        if self.driver == "spec":
            forward, count = self.model, iter(range(1 << 30))

            class Watched(Curve):
                def __call__(inner, batch: Any) -> Any:
                    self.body(self, next(count))
                    return forward(batch)

                def train(inner) -> None:
                    forward.train()

            return train(self.loop, Watched())
        for model in self.models:
            model.train()
        updaters = [Updater(stepper.optimizer) for stepper in self.loop.job.steppers]
        batches = ScriptLoop(self.loop, differs="other samples")
        for updater, stepper in zip(updaters, self.loop.job.steppers, strict=True):
            updater.stepper, updater.loop = stepper, batches
        for number, batch in enumerate(batches):
            for place, (updater, model) in enumerate(zip(updaters, self.models, strict=True)):
                if self.uses(number, place):
                    updater.update(model(batch)["total"])
            try:
                self.body(self, number)
            except StopIteration:
                break
        batches.leave()
        self.loop.finish()
        return self.loop.progress


def on_ranks(size: int, driver: str, **settings: Any) -> list[tuple[Bench, Any]]:
    """A bench on each rank, and what its run returned or raised."""
    benches: dict[int, Bench] = {}

    def work(rank: int, collective: Any) -> Any:
        benches[rank] = Bench(driver, collective=collective, **settings)
        return benches[rank].run()

    ended = Ranks(size).run(work)
    return [(benches[rank], ended[rank]) for rank in range(size)]


def test_both_drivers_learn_and_record_the_same() -> None:
    benches = [Bench(driver) for driver in DRIVERS]
    spec, script = (bench.run() for bench in benches)
    assert spec == script
    assert benches[0].model.weight == benches[1].model.weight
    losses = [[next(iter(record["losses"].values())) for record in bench.records] for bench in benches]
    assert losses[0] == pytest.approx(losses[1], rel=1e-15)
    assert [r["gradient_norm"] for r in benches[0].records] == [r["gradient_norm"] for r in benches[1].records]
    assert benches[0].saves == benches[1].saves == [(10, "due")]


def test_one_rank_has_nobody_to_agree_with() -> None:
    bench = Bench("script")
    bench.run()
    assert bench.collective.lengths == []
    assert len(bench.records) == 10


@pytest.mark.parametrize("driver", DRIVERS)
def test_three_shards_on_two_ranks_train_as_on_one_and_on_three(driver: str) -> None:
    one, three = Bench(driver, shards=3), on_ranks(3, driver)
    one.run()
    two = on_ranks(2, driver, shards=3)
    weights = [bench.model.weight for bench, _ in [*two, *three]]
    assert weights == pytest.approx([one.model.weight] * 5, rel=1e-12)
    for bench, progress in two:
        assert progress.update == 10
        assert [r["losses"] for r in bench.records] == [pytest.approx(r["losses"], rel=1e-12) for r in one.records]
    # Rank 1 computes shard 1 of each of the two rounds, and shard 0 with weight 0, which moves no statistics.
    assert two[1][0].seeds[:4] == [shard_seed(0, shard, 0) for shard in (1, 0, 4, 3)]
    assert two[1][0].optimizer.moved[:4] == [True, False, True, False]


@pytest.mark.parametrize(("driver", "late"), [("spec", False), ("spec", True), ("script", False)])
def test_a_request_to_end_in_mid_accumulation_ends_after_the_update_and_the_rest_makes_the_same_weights(
    driver: str, late: bool
) -> None:
    def ask(bench: Bench, number: int) -> None:
        bench.asked_to_stop = bench.asked_to_stop or number == 6  # the first micro batch of update 3

    whole, first = Bench(driver, late=late), Bench(driver, late=late, body=ask)
    whole.run()
    with pytest.raises(Interrupted):
        first.run()
    at = 5 if late else 4  # what is asked for is known one update later
    assert first.saves == [(at, "ending")]
    assert len(first.records) == at
    rest = Bench(driver, late=late, progress=first.saved)
    rest.model.weight = first.weight
    rest.run()
    assert rest.model.weight == whole.model.weight


@pytest.mark.parametrize("number", [6, 7])
def test_an_evaluation_in_the_body_that_is_interrupted_saves_the_updates_that_were_made(number: int) -> None:
    def evaluate(bench: Bench, at: int) -> None:
        if at == number:
            bench.loop.interrupt()
            raise Interrupted("during evaluation")

    whole, bench = Bench("script"), Bench("script", body=evaluate)
    whole.run()
    with pytest.raises(Interrupted):
        bench.run()
    assert bench.saves == [(3 if number == 6 else 4, "ending")]  # half an update is made again
    rest = Bench("script", progress=bench.saved)
    rest.model.weight = bench.weight
    rest.run()
    assert rest.model.weight == whole.model.weight


def test_an_evaluation_by_hook_that_is_interrupted_is_made_up_for() -> None:
    evaluated: list[int] = []

    def evaluate(progress: Progress) -> dict[str, float]:
        if not evaluated:
            evaluated.append(-1)
            raise Interrupted("during evaluation")
        evaluated.append(progress.update)
        return {"score": 1.0}

    first = Bench("spec", evaluations=Cadence(every_updates=4))
    first.loop.hooks = replace(first.loop.hooks, evaluate=evaluate)
    with pytest.raises(Interrupted):
        first.run()
    assert first.saves == [(4, "ending")]
    rest = Bench("spec", evaluations=Cadence(every_updates=4), progress=first.saved)
    rest.loop.hooks = replace(rest.loop.hooks, evaluate=evaluate)
    rest.run()
    assert evaluated == [-1, 4, 8]


def test_a_script_that_breaks_on_all_ranks_ends_with_its_last_update_saved() -> None:
    def leave(bench: Bench, number: int) -> None:
        if number == 5:
            raise StopIteration

    for bench, progress in on_ranks(2, "script", body=leave):
        assert progress.update == 3
        assert bench.saves == [(3, "due")]
        assert len(bench.records) == 3


def test_ranks_of_which_one_breaks_are_refused_on_every_rank() -> None:
    def leave(bench: Bench, number: int) -> None:
        if number == 5 and bench.collective.rank == 1:
            raise StopIteration

    for _, error in on_ranks(3, "script", body=leave):
        assert isinstance(error, ScriptError)
        assert "after update 2, and others go on" in str(error)


def test_ranks_that_log_other_names_are_refused_on_every_rank() -> None:
    def log(bench: Bench, number: int) -> None:
        bench.loop.log({"a" if bench.collective.rank and number == 4 else "b": 1.0})

    for _, error in on_ranks(3, "script", body=log):
        assert isinstance(error, ScriptError)
        assert "different names in update 2" in str(error)


def test_names_that_change_on_all_ranks_are_averaged_under_their_own_names() -> None:
    def log(bench: Bench, number: int) -> None:
        bench.loop.log({"a" if number < 4 else "b": float(bench.collective.rank)})

    for bench, _ in on_ranks(3, "script", body=log, updates=4):
        metrics = [{k: v for k, v in record["losses"].items() if k != "loss"} for record in bench.records]
        assert metrics == [{"a": 1.0}] * 2 + [{"b": 1.0}] * 2


@pytest.mark.parametrize("driver", DRIVERS)
def test_the_ranks_exchange_one_vector_per_update(driver: str) -> None:
    for bench, _ in on_ranks(2, driver, updates=6, report_every=2):
        metrics = 2  # the loss and the wait for data
        # The names are new after the first update; updates that are not reported send no metrics.
        assert bench.collective.lengths == [HEAD, HEAD + metrics, HEAD, *[HEAD + metrics, HEAD] * 2]


@pytest.mark.parametrize("size", [1, 3, 8000])
@pytest.mark.parametrize("name", ["stop", "save", "save_due", "epoch_ends"])
def test_a_flag_of_one_rank_or_of_all_is_that_flag_and_no_other(size: int, name: str) -> None:
    place, asked = RankPlace(update=3), Requests(**{name: True})
    quiet, asks = np.array(head(NO_REQUESTS, place)), np.array(head(asked, place))
    for count in {1, size}:
        assert read_head((asks * count + quiet * (size - count)) / size, size=size) == asked
    assert read_head(quiet * size / size, size=size) == NO_REQUESTS


OTHER_PLACES: dict[str, Any] = {
    "update": 4,
    "leaves": True,
    "order": 8,
    "names": ("loss_G", "extra"),
    "models": ("G",),
    "skips": ("D",),
    "learning_rates": (0.1, 0.2, math.nextafter(0.3, 1)),
    "momenta": (None, 0.9),
}
"""A value of each member of a place, for one rank; the others are at ``PLACE``."""
PLACE = RankPlace(
    update=3, order=7, names=("loss_G",), models=("G", "D"), learning_rates=(0.1, 0.2, 0.3), momenta=(None, 0.8)
)


def agreed_at(places: list[RankPlace]) -> list[Any]:
    """What each rank learns of the others, or its error."""
    # All send as many numbers: names of metrics are checked before any are sent.
    return Ranks(len(places)).run(lambda rank, ranks: Agreement(ranks).agree(NO_REQUESTS, places[rank], []))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", [field.name for field in fields(RankPlace)])
def test_ranks_that_differ_in_one_member_of_their_place_are_refused_on_all_of_them(name: str) -> None:
    assert [requests for requests, _ in agreed_at([PLACE] * 3)] == [NO_REQUESTS] * 3
    for differing in range(3):
        places = [replace(PLACE, **({name: OTHER_PLACES[name]} if rank == differing else {})) for rank in range(3)]
        errors = agreed_at(places)
        assert all(isinstance(error, RanksDisagree) for error in errors), f"rank {differing} differs in {name}"
        assert [error.places for error in errors] == [places] * 3


@pytest.mark.parametrize("member", ["learning_rates", "momentum"])
@pytest.mark.parametrize("model", [0, 1])
def test_a_schedule_that_differs_between_ranks_is_refused_in_the_update_in_which_it_does(
    member: str, model: int
) -> None:
    def run(rank: int, collective: Any) -> Any:
        bench = Bench("script", collective=collective, updates=4, models=2)
        own = {"learning_rates": (0.04,)} if member == "learning_rates" else {"momentum": 0.5}
        same = bench.loop.job.steppers[model].schedule
        bench.loop.job.steppers[model].schedule = lambda at: replace(same(at), **(own if (at, rank) == (2, 1) else {}))
        return bench.run()

    for error in Ranks(2).run(run):
        assert isinstance(error, ScriptError)
        assert "different learning rates or momenta in update 2" in str(error)


@pytest.mark.parametrize("model", range(3))
@pytest.mark.parametrize("norm", [math.inf, math.nan])
def test_an_update_in_which_the_norm_of_any_of_several_models_is_not_finite_counts_as_one(
    model: int, norm: float
) -> None:
    bench = Bench("script", updates=6, models=3, report_every=10, max_nonfinite=2)
    optimizer: Any = bench.loop.job.steppers[model].optimizer
    optimizer.bad, optimizer.bad_norm = {1, 3, 4}, norm
    with pytest.raises(NonFiniteError):
        bench.run()
    assert [record["update"] for record in bench.records] == [0, 1, 3], "an update that is not finite is reported"
    assert [math.isfinite(record["gradient_norm"]) for record in bench.records] == [True, False, False]
    assert bench.loop.progress.skipped == 3


def test_a_model_that_is_not_updated_does_not_count_by_the_norm_of_its_last_update() -> None:
    bench = Bench("script", updates=6, models=2, max_nonfinite=2)
    optimizer: Any = bench.loop.job.steppers[1].optimizer
    optimizer.bad, bench.uses = {1}, lambda update, model: model == 0 or update < 2
    bench.run()
    assert bench.loop.progress.skipped == 1
    assert [math.isfinite(record["gradient_norm"]) for record in bench.records] == [True, False, *[True] * 4]


class RoundsByPlace(OneRank):
    """Rounds each number of a vector by its place there and the vector's length, as a ring of ranks does."""

    def all_reduce(self, x: Any, op: str) -> Any:
        return x * (1 + 2.0**-50 * ((np.arange(len(x)) + 2 * len(x)) % 7)) if op == "mean" else x


def test_a_job_that_begins_again_at_an_update_records_its_bits() -> None:
    metrics = [0.1, 0.3, 0.7]
    going_on, anew = Agreement(RoundsByPlace()), Agreement(RoundsByPlace())
    going_on.agree(NO_REQUESTS, RankPlace(update=0, names=("a", "b")), metrics)
    place = RankPlace(update=1, names=("a", "b"))
    assert going_on.agree(NO_REQUESTS, place, metrics)[1] == anew.agree(NO_REQUESTS, place, metrics)[1]
