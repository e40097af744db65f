"""The loop: what it calls, when, and with which metrics. On a session of one rank in numpy, which is a whole one."""

import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from mtrain.core import collective as collective_module
from mtrain.core.collective import OneRank, barrier, broadcast, differing, gather_on_first, mean
from mtrain.core.evaluate import evaluate, interruptible, metrics_of
from mtrain.core.interfaces import Progress, Rates, Why
from mtrain.core.samples.feed import LoaderFeed
from mtrain.core.samples.sampler import Shares
from mtrain.core.update.cadence import Cadence, Cadences, check_continues, count_score
from mtrain.core.update.loop import Hooks, Job, Loop
from mtrain.core.update.stepping import Stepper
from mtrain.core.update.trainer import train
from mtrain.errors import CheckpointError, Interrupted, NonFiniteError


class Scalar(float):
    """A number that can be a loss."""

    def detach(self) -> float:
        return float(self)


class Line:
    """A model with one weight: y = w x; the loss is the mean square of w x - 2 x."""

    def __init__(self) -> None:
        self.weight, self.training, self.last = 0.0, False, np.zeros(0)

    def train(self) -> None:
        self.training = True

    def eval(self) -> None:
        self.training = False

    def __call__(self, batch: Mapping[str, np.ndarray]) -> dict[str, Scalar]:
        assert self.training
        self.last = batch["x"]
        loss = float(np.mean(((self.weight - 2) * self.last) ** 2))
        return {"total": Scalar(loss), "part": Scalar(loss / 2)}


class Descent:
    """Plain gradient descent on a Line."""

    groups = (("weight",),)

    def __init__(self, model: Line, accumulate: int) -> None:
        self.model, self.accumulate, self.gradient, self.lasts = model, accumulate, 0.0, []

    @contextmanager
    def micro_batch(self, *, last: bool) -> Iterator[None]:
        self.lasts.append(last)
        yield

    def backward(self, loss: Scalar) -> None:
        slope = 2 * (self.model.weight - 2) * np.mean(self.model.last**2)
        self.gradient += float(slope) / self.accumulate if math.isfinite(loss) else math.nan

    def step(self, rates: Rates) -> float:
        norm, self.gradient = abs(self.gradient), -self.gradient
        if math.isfinite(norm):
            self.model.weight += rates.learning_rates[0] * self.gradient
        self.gradient = 0.0
        return norm

    def step_later(self, rates: Rates, numbers: Any, tensors: Any) -> Callable[[], tuple[float, np.ndarray]]:
        norm = self.step(rates)
        return lambda: (norm, np.array([*numbers, *tensors], float))

    @contextmanager
    def averaged(self) -> Iterator[None]:
        saved, self.model.weight = self.model.weight, 2.0
        yield
        self.model.weight = saved


class Numpy:
    """As much of a session as the loop asks for."""

    collective = OneRank()

    def batches(self, loader: Iterable[Any]) -> Iterator[Any]:
        return iter(loader)

    def infer(self, model: Line, batch: Any) -> dict[str, np.ndarray]:
        assert not model.training
        return {"y": model.weight * batch["x"]}

    def measure(self) -> dict[str, float]:
        return {"memory_bytes": 1e6}


class Numbers:
    """Loader of four updates an epoch, two micro batches each; remembers what was asked for."""

    updates_per_epoch = 4

    def __init__(self, poison: Iterable[int] = ()) -> None:
        self.asked: list[tuple[int, int]] = []
        self.poison = set(poison)
        self.closed = 0

    def micro_batches(self, epoch: int, start: int = 0) -> Iterator[dict[str, np.ndarray]]:
        self.asked.append((epoch, start))
        try:
            for update in range(start, 4):
                for i in range(2):
                    x = np.random.default_rng([epoch, update, i]).normal(size=3)
                    yield {"x": x * math.nan if epoch * 4 + update in self.poison else x}
        finally:
            self.closed += 1


class Bench:
    """A trainer with everything it calls written down."""

    late = False

    def __init__(self, *, updates: int = 10, poison: Iterable[int] = (), scores: Iterable[float] = (), **cadences: Any):
        self.model = Line()
        self.optimizer = Descent(self.model, 2)
        self.loader = Numbers(poison)
        self.log: list[tuple[Any, ...]] = []
        self.records: list[dict[str, Any]] = []
        self.scores = iter(scores)
        self.stop_at = self.refuse_at = self.save_at = -1
        self.reasons: list[Why] = []
        self.time, self.tick = 0.0, 1.0
        self.session: Any = Numpy()
        self.updates = updates
        self.cadences = Cadences(**cadences)
        self.hooks = Hooks(
            on_update=self.records.append,
            evaluate=self.evaluate,
            save=self.save,
            stop=self.stop,
            save_requested=self.save_requested,
            clock=self.clock,
        )

    def run(self, progress: Progress) -> Progress:
        feed = LoaderFeed(session=self.session, loader=self.loader, global_batch=6)  # type: ignore[arg-type]
        stepper = Stepper(
            self.optimizer, lambda update: Rates(learning_rates=(0.05 / (1 + update),)), count=progress.update
        )  # type: ignore[arg-type]
        job = Job(
            session=self.session,
            steppers=[stepper],
            feed=feed,
            total_updates=self.updates,
            shares=Shares.even(self.session.collective, rounds=2),
            late=self.late,
            sums_metrics=True,
        )
        return train(Loop(job, self.cadences, self.hooks, progress), self.model)

    def evaluate(self, progress: Progress) -> dict[str, float]:
        if progress.update == self.refuse_at:
            raise Interrupted("during evaluation")
        self.log.append(("evaluate", progress.update))
        score = next(self.scores, None)
        return {} if score is None else {"score": score}

    def save(self, progress: Progress, score: float | None, why: Why) -> None:
        self.log.append(("save", progress.update, score))
        self.reasons.append(why)
        self.saved, self.weight = progress, self.model.weight

    def stop(self) -> bool:
        return len(self.records) == self.stop_at

    def save_requested(self) -> bool:
        return len(self.records) == self.save_at

    def clock(self) -> float:
        self.time += self.tick
        return self.time


def test_a_job_runs_all_its_updates_and_says_where_it_ended() -> None:
    bench = Bench(updates=10)
    end = bench.run(Progress())
    assert (end.update, end.epoch, end.position, end.samples) == (10, 2, 2, 60)
    assert bench.loader.asked == [(0, 0), (1, 0), (2, 0)]
    assert bench.loader.closed == 3
    assert bench.optimizer.lasts == [False, True] * 10
    assert bench.log == [("evaluate", 10), ("save", 10, None)]
    assert bench.model.weight != 0


@pytest.mark.parametrize("cut", range(1, 10))
def test_a_job_resumed_at_any_update_learns_the_same(cut: int) -> None:
    whole = Bench(updates=10)
    whole.run(Progress())
    first, second = Bench(updates=cut), Bench(updates=10)
    progress = first.run(Progress())
    second.model.weight = first.model.weight
    second.run(progress)
    assert second.model.weight == whole.model.weight
    assert second.loader.asked[0] == divmod(cut, 4)
    assert [r["losses"] for r in first.records + second.records] == [r["losses"] for r in whole.records]


def test_a_record_says_what_happened() -> None:
    bench = Bench(updates=5)
    bench.run(Progress())
    first, record = bench.records[0], bench.records[4]
    x = [np.random.default_rng([0, 0, i]).normal(size=3) for i in range(2)]
    loss = np.mean([np.mean((2 * part) ** 2) for part in x])
    assert first["losses"] == pytest.approx({"total": loss, "part": loss / 2})
    assert first["gradient_norm"] == pytest.approx(np.mean([4 * np.mean(part**2) for part in x]))
    assert {k: record[k] for k in ("update", "epoch", "position", "updates_per_epoch", "total_updates")} == {
        "update": 4,
        "epoch": 1,
        "position": 0,
        "updates_per_epoch": 4,
        "total_updates": 5,
    }
    assert (record["learning_rate"], record["learning_rates"], record["momentum"], record["skipped_updates"]) == (
        0.01,
        [0.01],
        None,
        0,
    )
    assert record["memory_bytes"] == 1_000_000
    # The clock counts its calls: two of the waits for data are one each.
    assert record["data_wait_share"] == pytest.approx(2 / record["update_seconds"])
    assert record["samples_per_second"] == pytest.approx(6 / record["update_seconds"])


def test_records_are_as_rare_as_asked_for() -> None:
    bench = Bench(updates=10, report_every=4)
    bench.run(Progress())
    assert [r["update"] for r in bench.records] == [0, 4, 8]


def test_evaluation_comes_before_the_save_that_is_due_with_it() -> None:
    bench = Bench(
        updates=8,
        scores=[0.5, 0.4],
        evaluations=Cadence(every_epochs=1),
        saves=Cadence(every_updates=4, every_epochs=1),
    )
    end = bench.run(Progress())
    assert bench.log == [("evaluate", 4), ("save", 4, 0.5), ("evaluate", 8), ("save", 8, 0.4)]
    assert (end.best, end.best_epoch, end.epochs_without_gain) == (0.5, 0, 1)


def test_a_better_score_is_saved_though_no_save_is_due() -> None:
    bench = Bench(updates=8, scores=[0.1, 0.2, 0.1, 0.3], evaluations=Cadence(every_updates=2))
    bench.run(Progress())
    assert [entry for entry in bench.log if entry[0] == "save"] == [
        ("save", 2, 0.1),
        ("save", 4, 0.2),
        ("save", 8, 0.3),
    ]


def test_minutes_are_counted_from_the_last_save() -> None:
    bench = Bench(updates=60, evaluate_at_end=False, saves=Cadence(every_minutes=1.0))
    bench.run(Progress())
    saves = [entry[1] for entry in bench.log][:-1]  # the last one is that of the end
    gaps = {b - a for a, b in pairwise(saves)}
    assert len(saves) > 3
    assert gaps <= {min(gaps), min(gaps) + 1}
    assert min(gaps) > 1, "the clock is set again at each save"


def test_a_request_to_stop_ends_after_the_update_with_everything_saved() -> None:
    bench = Bench(updates=10, evaluations=Cadence(every_updates=1))
    bench.stop_at = 3
    with pytest.raises(Interrupted, match=r"update 4, state saved"):
        bench.run(Progress())
    assert bench.log[-1] == ("save", 4, None)
    assert ("evaluate", 4) not in bench.log, "whoever asked would wait for it"
    assert bench.loader.closed == 1
    assert bench.weight == bench.model.weight


@pytest.mark.parametrize("during_evaluation", [False, True])
def test_an_evaluation_that_a_request_to_end_came_in_front_of_is_made_up_for(during_evaluation: bool) -> None:
    scores, often = [0.1, 0.3, 0.2, 0.3, 0.2], {"patience": 3, "evaluations": Cadence(every_updates=2)}
    whole = Bench(updates=100, scores=scores, **often)
    first, second = Bench(updates=100, scores=scores[:2], **often), Bench(updates=100, scores=scores[2:], **often)
    if during_evaluation:
        first.refuse_at = 6
    else:
        first.stop_at = 6 - 1
    with pytest.raises(Interrupted):
        first.run(Progress())
    assert first.log[-1] == ("save", 6, None)
    second.model.weight = first.model.weight
    assert second.run(first.saved) == whole.run(Progress())
    evaluated = [entry for entry in first.log[:-1] + second.log if entry[0] == "evaluate"]
    assert evaluated == [entry for entry in whole.log if entry[0] == "evaluate"]


def test_a_job_resumed_at_its_end_does_nothing() -> None:
    bench, again = Bench(updates=8, scores=[0.5]), Bench(updates=8, scores=[0.5], patience=1)
    end = bench.run(Progress())
    assert again.run(end) == end
    assert again.log == []


def test_training_ends_when_patience_does() -> None:
    bench = Bench(updates=100, scores=[0.1, 0.3, 0.2, 0.3, 0.2], patience=3, evaluations=Cadence(every_updates=2))
    end = bench.run(Progress())
    assert (end.update, end.best) == (10, 0.3)
    assert bench.log[-1] == ("save", 10, None)


def test_a_gradient_that_is_not_finite_is_reported_and_passed_over() -> None:
    bench = Bench(updates=6, poison=[2, 3], max_nonfinite=3)
    bench.run(Progress())
    assert [r["skipped_updates"] for r in bench.records] == [0, 0, 1, 2, 2, 2]
    assert math.isfinite(bench.model.weight)


def test_an_update_that_is_skipped_is_reported_however_rare_reports_are() -> None:
    bench = Bench(updates=8, poison=[2, 3], max_nonfinite=3, report_every=5)
    bench.run(Progress())
    assert [record["update"] for record in bench.records] == [0, 2, 3, 5]


def test_too_many_of_them_in_a_row_end_the_job() -> None:
    bench = Bench(updates=10, poison=[1, 3, 4, 5], max_nonfinite=3)
    with pytest.raises(NonFiniteError, match="3 updates in a row, the last is update 5 of epoch 1"):
        bench.run(Progress())


def test_skipped_updates_are_counted_over_resumes() -> None:
    first, second = Bench(updates=4, poison=[1, 3]), Bench(updates=10, poison=[4, 5, 8], max_nonfinite=4)
    progress = first.run(Progress())
    end = second.run(progress)
    assert (end.skipped, end.skipped_in_a_row) == (5, 0)
    assert second.records[0]["skipped_updates"] == 3
    third = Bench(updates=10, poison=[4, 5], max_nonfinite=3)
    with pytest.raises(NonFiniteError, match="3 updates in a row"):
        third.run(progress)


class Late(Bench):
    """A trainer that reads the metrics of an update after the next one was started."""

    late = True


def test_a_late_job_learns_records_and_saves_what_a_prompt_one_does() -> None:
    settings: dict[str, Any] = {
        "updates": 10,
        "poison": [2, 3, 6],
        "scores": [0.1, 0.3, 0.2],
        "evaluations": Cadence(every_updates=3),
        "saves": Cadence(every_updates=4),
        "max_nonfinite": 3,
    }
    prompt, late = Bench(**settings), Late(**settings)
    assert late.run(Progress()) == prompt.run(Progress())
    assert (late.log, late.saved, late.weight) == (prompt.log, prompt.saved, prompt.weight)
    timeless = [
        [
            {k: v for k, v in record.items() if k not in ("update_seconds", "samples_per_second", "data_wait_share")}
            for record in one
        ]
        for one in (late.records, prompt.records)
    ]
    assert repr(timeless[0]) == repr(timeless[1])  # nan differs from itself


def test_a_late_record_comes_after_the_next_update_was_started() -> None:
    late, started = Late(updates=6), []
    step = late.optimizer.step_later
    late.optimizer.step_later = lambda *given: started.append(len(late.records)) or step(*given)  # type: ignore[assignment]
    late.run(Progress())
    assert started == [0, 0, 1, 2, 3, 4]
    assert [record["update"] for record in late.records] == list(range(6))


def test_a_late_job_follows_a_request_to_stop_after_the_next_update() -> None:
    late = Late(updates=10)
    late.stop_at = 3  # three records are there when the fifth update is started
    with pytest.raises(Interrupted, match=r"update 6, state saved"):
        late.run(Progress())
    assert len(late.records) == 6, "nothing is left unread"
    assert (late.saved.update, late.weight) == (6, late.model.weight)
    whole, second = Late(updates=10), Late(updates=10)
    second.model.weight = late.weight
    whole.run(Progress())
    second.run(late.saved)
    assert second.model.weight == whole.model.weight


def test_a_late_job_saves_on_request_once() -> None:
    late = Late(updates=10, evaluate_at_end=False)
    asked = [False] * 4 + [True] * 20
    late.hooks = replace(late.hooks, save_requested=lambda: asked.pop(0))
    save = late.hooks.save

    def served(progress: Progress, score: float | None, why: Why) -> None:
        asked[:] = [False] * 20
        save(progress, score, why)

    late.hooks = replace(late.hooks, save=served)
    late.run(Progress())
    assert late.reasons == ["requested", "due"]


def test_a_late_job_refuses_updates_without_end_one_update_later() -> None:
    late = Late(updates=10, poison=[3, 4, 5], max_nonfinite=3)
    with pytest.raises(NonFiniteError, match="3 updates in a row, the last is update 5 of epoch 1"):
        late.run(Progress())
    assert len(late.optimizer.lasts) == 2 * 7


def test_another_global_batch_or_split_is_refused_at_a_resume() -> None:
    progress = Progress(update=6, epoch=1, position=2, samples=36)
    check_continues(progress, updates_per_epoch=4, global_batch=6)
    check_continues(Progress(), updates_per_epoch=4, global_batch=6)
    with pytest.raises(CheckpointError, match=r"with train.batch_size 12 and 4 updates.*model\.weights"):
        check_continues(progress, updates_per_epoch=4, global_batch=12)
    with pytest.raises(CheckpointError, match="5 updates per epoch that would be epoch 1, position 1"):
        check_continues(progress, updates_per_epoch=5, global_batch=6)


def test_a_request_to_end_is_heard_between_micro_batches_of_an_evaluation() -> None:
    taken: list[Any] = []
    loader = [{"x": np.zeros(1)}, {"x": np.zeros(1)}, {"x": np.zeros(1)}]
    with pytest.raises(Interrupted):
        taken.extend(interruptible(loader, collective=OneRank(), stop=lambda: True))
    assert taken == []
    assert list(interruptible(loader, collective=OneRank(), stop=lambda: False)) == loader


class Collected:
    """An evaluator that keeps what it is given."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, float]] = []

    def add(self, batch: Mapping[str, Any], predictions: Any) -> None:
        self.seen += [(int(i), float(p)) for i, p in zip(batch["index"], predictions, strict=True)]

    def partial(self) -> Any:
        return self.seen

    def result(self, partials: Any) -> dict[str, float]:
        return {"score": sum(p for part in partials for _, p in part)}


def test_evaluation_scores_the_averaged_weights_and_leaves_training_as_it_was() -> None:
    model = Line()
    model.weight = 1.0
    model.train()
    loader = [{"x": np.array([1.0, 2.0]), "index": np.array([0, 1])}, {"x": np.array([3.0]), "index": np.array([2])}]
    evaluator = Collected()
    metrics = evaluate(
        Numpy(),  # type: ignore[arg-type]
        model,
        Descent(model, 1),
        loader,
        predictions=lambda output, host: list(output["y"] + 0 * host["x"]),
        evaluator=evaluator,
    )
    assert evaluator.seen == [(0, 2.0), (1, 4.0), (2, 6.0)]
    assert metrics == {"score": 12.0}
    assert model.training
    assert model.weight == 1.0


def test_one_rank_agrees_with_itself() -> None:
    one = OneRank()
    barrier(one)
    x = np.ones(2)
    y = one.all_reduce(x, "sum")
    y += 1
    assert x.tolist() == [1, 1]
    assert broadcast(one, "a") == "a"
    assert mean(one, {"a": 1.5}) == {"a": 1.5}
    assert mean(one, {}) == {}
    assert differing(one, 3) == []


# ------------------------------------------------------------------------------------------------- agreement of ranks
class Ranks:
    """As many ranks as there are threads: what one gives, all get. A rank that does not come is an error, not a
    hang."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._given: list[Any] = [None] * size
        self._barrier = threading.Barrier(size, timeout=20)

    def gather(self, rank: int, value: Any) -> list[Any]:
        self._given[rank] = value
        self._barrier.wait()
        everyone = list(self._given)
        self._barrier.wait()
        return everyone

    def run(self, work: Callable[[int, "Member"], Any]) -> list[Any]:
        """Return the result or the exception of ``work`` on each rank."""

        def attempt(rank: int) -> Any:
            try:
                return work(rank, Member(self, rank))
            except Exception as error:
                return error

        with ThreadPoolExecutor(self.size) as pool:
            return list(pool.map(attempt, range(self.size)))


class Member:
    """The collective of one of these ranks."""

    def __init__(self, ranks: Ranks, rank: int) -> None:
        self._ranks = ranks
        self.rank = rank
        self.size = ranks.size

    def all_gather(self, value: Any) -> list[Any]:
        return self._ranks.gather(self.rank, value)

    def all_reduce(self, x: np.ndarray, op: str) -> np.ndarray:
        reduce = {"sum": np.sum, "mean": np.mean, "max": np.max}[op]
        return np.asarray(reduce(np.stack(self._ranks.gather(self.rank, x)), axis=0))


def run_on_ranks(setup: Callable[[int, Bench], None], *, size: int = 3, **cadences: Any) -> list[tuple[Bench, Any]]:
    """A bench on each rank after ``setup``, and what its run returned or raised."""
    benches = [Bench(updates=40, **cadences) for _ in range(size)]

    def work(rank: int, collective: Member) -> Progress:
        benches[rank].session.collective = collective
        setup(rank, benches[rank])
        return benches[rank].run(Progress())

    return list(zip(benches, Ranks(size).run(work), strict=True))


@pytest.mark.parametrize("stopping_rank", range(3))
def test_one_rank_that_is_asked_to_end_ends_all_at_the_same_update_saved(stopping_rank: int) -> None:
    def ask_one(rank: int, bench: Bench) -> None:
        if rank == stopping_rank:
            bench.stop_at = 5

    ended = run_on_ranks(ask_one)
    assert [str(error) for _, error in ended] == [
        "ended from outside at update 6, state saved; go on with --resume"
    ] * 3
    assert [bench.log for bench, _ in ended] == [[("save", 6, None)]] * 3


def test_the_clock_of_rank_0_alone_says_when_all_ranks_save() -> None:
    def slow_clocks_but(ticking: int) -> Callable[[int, Bench], None]:
        def setup(rank: int, bench: Bench) -> None:
            if rank != ticking:
                bench.tick = 0.0

        return setup

    minutes = {"evaluate_at_end": False, "saves": Cadence(every_minutes=1.0)}
    logs = [bench.log for bench, _ in run_on_ranks(slow_clocks_but(0), **minutes)]
    assert logs[0] == logs[1] == logs[2]
    assert len(logs[0]) > 2
    ended = run_on_ranks(slow_clocks_but(1), **minutes)
    assert [bench.log for bench, _ in ended] == [[("save", 40, None)]] * 3


@pytest.mark.parametrize("asked_rank", range(3))
def test_one_rank_that_is_asked_to_save_has_all_save_at_the_same_update_and_go_on(asked_rank: int) -> None:
    def ask_one(rank: int, bench: Bench) -> None:
        if rank == asked_rank:
            bench.save_at = 5

    ended = run_on_ranks(ask_one, evaluate_at_end=False)
    assert [progress.update for _, progress in ended] == [40] * 3
    assert [bench.log for bench, _ in ended] == [[("save", 6, None), ("save", 40, None)]] * 3
    assert [bench.reasons for bench, _ in ended] == [["requested", "due"]] * 3


def test_a_rank_that_is_asked_to_save_while_the_clock_says_so_too_saves_once_as_requested() -> None:
    bench = Bench(saves=Cadence(every_minutes=1.0), evaluate_at_end=False)
    bench.tick, bench.save_at = 100.0, 2
    bench.run(Progress())
    assert [update for _, update, _ in bench.log] == list(range(1, 11))
    assert bench.reasons == ["due"] * 2 + ["requested"] + ["due"] * 7


def test_a_requested_save_does_not_wait_for_the_evaluation_that_is_due() -> None:
    bench = Bench(evaluations=Cadence(every_epochs=1), scores=[0.5, 0.4, 0.4], saves=Cadence(every_epochs=2))
    bench.save_at = 3
    bench.run(Progress())
    assert bench.log[:3] == [("save", 4, None), ("evaluate", 4), ("save", 4, 0.5)]
    assert bench.reasons[:2] == ["requested", "best"]


def test_a_request_to_save_during_the_last_update_before_an_end_is_the_save_of_the_end() -> None:
    bench = Bench()
    bench.save_at = bench.stop_at = 5
    with pytest.raises(Interrupted):
        bench.run(Progress())
    assert (bench.log, bench.reasons) == ([("save", 6, None)], ["ending"])


@pytest.mark.parametrize("stopping_rank", range(3))
def test_one_rank_that_is_asked_to_end_ends_the_evaluation_of_all(stopping_rank: int) -> None:
    def evaluate_share(rank: int, collective: Member) -> None:
        calls: list[Any] = []
        calls.extend(interruptible([{}] * 4, collective=collective, stop=lambda: rank == stopping_rank))

    raised = Ranks(3).run(evaluate_share)
    assert [type(error) for error in raised] == [Interrupted] * 3


@pytest.mark.parametrize(("once", "scoring_ranks"), [(True, [0]), (False, [0, 1, 2])])
def test_a_score_that_takes_much_memory_is_computed_on_the_first_rank_and_known_on_all(
    once: bool, scoring_ranks: list[int]
) -> None:
    scored_on: list[int] = []

    class Scored(Collected):
        scores_once = once

        def __init__(self, rank: int) -> None:
            self.seen = [(rank, 10.0**rank)]
            self._rank = rank

        def result(self, partials: Any) -> dict[str, float]:
            scored_on.append(self._rank)
            return super().result(partials)

    metrics = Ranks(3).run(lambda rank, collective: metrics_of(Scored(rank), collective))  # type: ignore[arg-type]
    assert metrics == [{"score": 111.0}] * 3
    assert sorted(scored_on) == scoring_ranks


def test_ranks_that_do_not_score_hold_a_part_of_what_others_predicted_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(collective_module, "PART_BYTES", 100)
    received: list[int] = []

    class Counted(Member):
        def all_gather(self, value: Any) -> list[Any]:
            everyone = super().all_gather(value)
            received.append(sum(len(each) for each in everyone if isinstance(each, bytes)))
            return everyone

    values = [{rank: np.arange(50.0) + rank} for rank in range(3)]
    gathered = Ranks(3).run(lambda rank, member: gather_on_first(Counted(member._ranks, rank), values[rank]))
    assert gathered[1:] == [[], []]
    assert gathered[0][0] is values[0], "the first rank has its own once"
    assert all(
        np.array_equal(each[rank], values[rank][rank]) for rank, each in enumerate(gathered[0]) if each.keys() == {rank}
    )
    assert [list(each) for each in gathered[0]] == [[0], [1], [2]]
    assert max(received) <= 100, "of all others together"
    assert len(received) >= 3 * 4, "in several parts"


def test_an_evaluation_that_is_repeated_behind_the_same_update_does_not_use_up_patience() -> None:
    first = count_score(Progress(update=4, best=0.5), 0.4)
    assert first.epochs_without_gain == 1
    assert count_score(first, 0.4).epochs_without_gain == 1
    assert count_score(replace(first, update=8), 0.4).epochs_without_gain == 2


def test_the_first_of_equal_scores_stays_the_best_of_the_summary() -> None:
    from mtrain.rank.spec.train import Results

    result, evaluator = Results(progress=Progress()), Metrics()
    messages = [
        result.take({"score": score}, Progress(update=update), evaluator)
        for update, score in ((1, 0.2), (2, 0.5), (3, 0.5))
    ]
    assert messages == [True, True, False]
    assert (result.best["update"], result.last["update"]) == (2, 3)


class Metrics:
    """As much of an evaluator as the summary asks for."""

    headline = ("score",)

    def remarks(self) -> list[str]:
        return []
