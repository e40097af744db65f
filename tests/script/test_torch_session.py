"""`mtrain.session` in one process: what a script may do, and the sentence for what it may not."""

import os
import signal
import sys

import numpy as np
import pytest

import mtrain
from mtrain.commands.run import run as run_command
from mtrain.commands.run import split_at_script
from mtrain.core.checkpoint import store
from mtrain.core.collective import OneRank
from mtrain.data import trees
from mtrain.errors import CheckpointError, ScriptError, UsageError
from mtrain.jobs.run import script_job
from mtrain.rank.script import evaluation, kept
from mtrain.rank.script.reading.loaders import Selection
from mtrain.rank.script.reading.samples import Samples
from mtrain.rank.script.schedulers import make_scheduler
from mtrain.rank.script.settings import PLAIN, change_values
from mtrain.spec import config
from tests.script.runs import SCRIPTS

sys.path.insert(0, str(SCRIPTS))
from points import Plain, Points, accuracy

LOOP = {"global_batch": 8, "epochs": 1}


@pytest.fixture
def torch(monkeypatch, tmp_path):
    """torch, in an empty folder."""
    import torch

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["script.py"])
    return torch


def prepared(torch, session, **settings):
    settings = {"optimizer": mtrain.SGD(learning_rate=0.1), **settings}
    return session.prepare(lambda: torch.nn.Linear(8, 2), **settings)


def loss_of(torch, model, batch):
    inputs, targets = batch
    return torch.nn.functional.cross_entropy(model(inputs), targets)


def nested(torch, session):
    with mtrain.session():
        pass


def update_twice(torch, session):
    model, optimizer = prepared(torch, session)
    for batch in session.batches(Points(64, 0), **LOOP):
        optimizer.update(loss_of(torch, model, batch))
        optimizer.update(loss_of(torch, model, batch))


def update_never(torch, session):
    prepared(torch, session)
    for _ in session.batches(Points(64, 0), **LOOP):
        pass


def updated_with(make):
    def misuse(torch, session):
        model, optimizer = prepared(torch, session)
        for batch in session.batches(Points(64, 0), **LOOP):
            optimizer.update(make(torch, loss_of(torch, model, batch)))

    return misuse


def in_loop(calls, *, only_first=False, **settings):
    def misuse(torch, session):
        model, optimizer = prepared(torch, session, **settings)
        for number, batch in enumerate(session.batches(Points(64, 0), **LOOP)):
            if number == 0 or not only_first:
                calls(torch, optimizer, loss_of(torch, model, batch))

    return misuse


def trained_on(data, **settings):
    def misuse(torch, session):
        model, optimizer = prepared(torch, session)
        for batch in session.batches(data, **({**LOOP, **settings})):
            optimizer.update(loss_of(torch, model, batch))

    return misuse


def evaluated(**settings):
    def misuse(torch, session):
        model, _ = prepared(torch, session)
        session.evaluate(model, Plain(20, 1), **({"metric": accuracy, **settings}))

    return misuse


def rate_set_twice(torch, session):
    made = []

    def make(model):
        made.append(torch.optim.SGD(model.parameters(), lr=0.1))
        return made[0]

    model, optimizer = prepared(torch, session, optimizer=make)
    scheduler = torch.optim.lr_scheduler.StepLR(made[0], 1)
    for batch in session.batches(Points(64, 0), **LOOP):
        optimizer.update(loss_of(torch, model, batch))
        scheduler.step()


class Unrepeatable(Points):
    def __getitem__(self, index):
        own = np.random.Generator(np.random.PCG64())
        return self.inputs[index] + own.normal(size=8).astype(np.float32), self.targets[index]


class Shrinking(Points):
    def __init__(self, length, seed):
        super().__init__(length, seed)
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return len(self.inputs) - self.epoch


class Stream:
    def __init__(self, length):
        self.points = Plain(length, 0)

    def __iter__(self):
        return (self.points[index] for index in range(len(self.points)))


class Promising(Stream):
    def __init__(self, length):
        super().__init__(length // 2)

    def __len__(self):
        return 2 * len(self.points)


class Ragged(Points):
    def __getitem__(self, index):
        return self.inputs[index][: 4 + index % 3], self.targets[index]


class Texts:
    def __len__(self):
        return 64

    def __getitem__(self, index):
        return "text"


MISUSES = {
    "a second session": (nested, "has a session already"),
    "a module": (lambda torch, s: s.prepare(torch.nn.Linear(8, 2)), "give a function that builds it"),
    "a model without values": (
        lambda torch, s: s.prepare(lambda: torch.nn.Linear(8, 2, device="meta")),
        "on the device meta and has no values",
    ),
    "a model without shapes": (lambda torch, s: s.prepare(lambda: torch.nn.LazyLinear(2)), "weight has no shape yet"),
    "a model without parameters": (
        lambda torch, s: s.prepare(torch.nn.Identity),
        "the model has no parameter that takes a gradient",
    ),
    "sparse gradients": (
        lambda torch, s: [
            pair := s.prepare(lambda: torch.nn.Embedding(9, 2, sparse=True)),
            [pair[1].update(pair[0](b[1]).sum()) for b in s.batches(Points(64, 0), **LOOP)],
        ],
        "the gradient of weight is sparse",
    ),
    "no module": (lambda torch, s: s.prepare(lambda: 3), "`build` returned a int"),
    "a native optimizer": (
        lambda torch, s: prepared(torch, s, optimizer=torch.optim.SGD([torch.zeros(1)], lr=1.0)),
        "expected a rule such as mtrain.AdamW",
    ),
    "the class of an optimizer": (
        lambda torch, s: prepared(torch, s, optimizer=torch.optim.SGD),
        "optimizer is a SGD; expected a rule",
    ),
    "a function that makes no optimizer": (
        lambda torch, s: prepared(torch, s, optimizer=lambda model: 3),
        "`optimizer` returned a int without a learning rate",
    ),
    "an optimizer of other parameters": (
        lambda torch, s: prepared(torch, s, optimizer=lambda model: torch.optim.SGD([torch.zeros(1)], lr=0.1)),
        "parameters that are not those of the model",
    ),
    "an optimizer whose learning rate is set twice": (rate_set_twice, "was changed from outside"),
    "prepare twice": (lambda torch, s: [prepared(torch, s), prepared(torch, s)], "without a name"),
    "a name after none": (lambda torch, s: [prepared(torch, s), prepared(torch, s, name="G")], "name each of several"),
    "a name twice": (lambda torch, s: [prepared(torch, s, name="G"), prepared(torch, s, name="G")], "'G' is taken"),
    "a name with a slash": (lambda torch, s: prepared(torch, s, name="a/b"), "expected letters, digits and _"),
    "another seed for the second": (
        lambda torch, s: [prepared(torch, s, name="G", seed=1), prepared(torch, s, name="D", seed=2)],
        "seed=2 given, but 1 for the first model",
    ),
    "step without backward": (
        in_loop(lambda torch, optimizer, loss: optimizer.step()),
        "where there is no gradient; call optimizer.backward(loss) before",
    ),
    "gradients without backward": (
        in_loop(lambda torch, optimizer, loss: optimizer.gradients()),
        "there is no gradient",
    ),
    "two losses with overlap": (
        in_loop(lambda torch, optimizer, loss: [optimizer.backward(loss, retain_graph=True), optimizer.backward(loss)]),
        "(update 0, micro batch 0 of 1): called twice for one batch; call it once, with the sum of the losses",
    ),
    "no step": (
        in_loop(lambda torch, optimizer, loss: optimizer.backward(loss)),
        "optimizer.step() was not called for",
    ),
    "step twice": (
        in_loop(lambda torch, optimizer, loss: [optimizer.backward(loss), optimizer.step(), optimizer.step()]),
        "optimizer.step (update 0, micro batch 0 of 1): called after the step of this batch; there is no gradient any more",
    ),
    "gradients in mid-update": (
        in_loop(lambda torch, optimizer, loss: [optimizer.backward(loss), optimizer.gradients()], accumulate=2),
        "they are there after the last micro batch",
    ),
    "some micro batches of an update": (
        in_loop(lambda torch, optimizer, loss: optimizer.backward(loss), accumulate=2, only_first=True),
        "optimizer.update(loss) was not called for the batch of update 0, micro batch 1 of 2",
    ),
    "a negative limit": (lambda torch, s: prepared(torch, s, clip_norm=-1.0), "session.prepare: train.clip_norm"),
    "an unknown precision": (lambda torch, s: prepared(torch, s, precision="fp8"), "'fp16', 'fp64' or 'auto'"),
    "a number as schedule": (lambda torch, s: prepared(torch, s, schedule=0.1), "expected a curve"),
    "a schedule that is no learning rate": (
        lambda torch, s: [
            pair := prepared(torch, s, schedule=lambda update: -1.0),
            [pair[1].update(loss_of(torch, pair[0], b)) for b in s.batches(Points(64, 0), **LOOP)],
        ],
        "the schedule returned -1.0 for update 0",
    ),
    "batches before prepare": (lambda torch, s: s.batches(Points(64, 0), **LOOP), "called before session.prepare"),
    "update outside": (lambda torch, s: prepared(torch, s)[1].update(torch.zeros(())), "outside of"),
    "log outside": (lambda torch, s: s.log(a=1), "outside of the loop"),
    "update twice": (
        update_twice,
        "optimizer.update (update 0, micro batch 0 of 1): called after the step of this batch; a batch has one step",
    ),
    "no update": (update_never, "was not called for the batch of update 0"),
    "a loss per sample": (updated_with(lambda torch, loss: loss.expand(3)), "expected a single number"),
    "a dict as loss": (updated_with(lambda torch, loss: {"total": loss}), "the loss is a dict with total"),
    "a float as loss": (updated_with(lambda torch, loss: loss.item()), "the loss is a float"),
    "a detached loss": (updated_with(lambda torch, loss: loss.detach()), "carries no gradient"),
    "no batch size": (trained_on(Points(64, 0), global_batch=None), "no global_batch given"),
    "no length": (trained_on(Points(64, 0), epochs=None), "no length given"),
    "two lengths": (trained_on(Points(64, 0), updates=3), "epochs and updates are both given"),
    "a batch too large": (trained_on(Points(64, 0), global_batch=65), "use at most 64"),
    "a short order": (trained_on(Points(64, 0), order=lambda epoch: [1, 2]), "gave 2 numbers for epoch 0"),
    "an iterator": (trained_on(iter([1, 2])), "is an iterator, a list_iterator, which can be read once"),
    "a stream and epochs": (trained_on(Stream(64)), "epochs= given with a stream that has no length"),
    "a stream and an order": (trained_on(Stream(64), order=range), "order= given with a stream"),
    "a stream and a shuffle": (trained_on(Stream(64), shuffle=True), "shuffle= given with a stream"),
    "an order and a shuffle": (trained_on(Points(64, 0), order=range, shuffle=False), "order= and shuffle= given"),
    "a stream too short": (
        trained_on(Stream(7), epochs=None, updates=2),
        "the stream ended before 8 samples in epoch 0",
    ),
    "a stream shorter than its length": (
        trained_on(Promising(64)),
        "has a length of 64 samples, but it ended in epoch 0",
    ),
    "a schedule by epochs and a stream": (
        lambda torch, s: [
            prepared(torch, s, schedule=mtrain.Step(milestones=[1])),
            s.batches(Stream(64), global_batch=8, updates=3),
        ],
        "counts epochs, but the stream has no length",
    ),
    "nothing to read": (trained_on(3), "has neither __getitem__ nor __iter__"),
    "no arrays": (trained_on(Texts()), "holds no array and no tensor"),
    "samples of different shapes": (trained_on(Ragged(64, 0)), "different shapes"),
    "samples that cannot be repeated": (trained_on(Unrepeatable(64, 0)), "differs when it is read twice"),
    "a length that changes": (trained_on(Shrinking(65, 0), epochs=2), "has 64 in epoch 1"),
    "a metric that returns text": (evaluated(metric=lambda p, t: "good"), "expected a number"),
    "a metric that fails": (evaluated(metric=lambda p, t: 1 / 0), "ZeroDivisionError"),
    "no pair": (evaluated(step=lambda model, batch: model(batch[0])), "expected the pair"),
    "a number for a batch": (evaluated(step=lambda m, b: (m(b[0]).sum(), b[1])), "one prediction per sample"),
    "an unknown score": (evaluated(score="f1"), "the metric has accuracy"),
    "an object without state": (lambda torch, s: s.keep("x", object()), "expected an object with state_dict()"),
}


@pytest.mark.parametrize(
    ("member", "remedy"),
    [
        ("minimize", "optimizer.update(loss)"),
        ("zero_grad", "optimizer.update(loss)"),
        ("clear_grad", "optimizer.update(loss)"),
        ("setlr", "session.prepare(schedule="),
        ("set_lr", "session.prepare(schedule="),
        ("param_groups", "session.prepare(schedule="),
        ("state_dict", "checkpoints"),
    ],
)
def test_a_member_of_the_frameworks_optimizers_is_refused_with_what_to_call(member, remedy, torch):
    with mtrain.session() as session:
        _, optimizer = prepared(torch, session)
        assert not hasattr(optimizer, member), "what asks for it is told that it is not there"
        with pytest.raises(UsageError) as caught:
            getattr(optimizer, member)
    assert f"optimizer.{member}" in str(caught.value)
    assert remedy in str(caught.value)


@pytest.mark.parametrize("when", ["before", "instead", "after", "second micro batch"])
def test_a_backward_of_the_script_is_refused(when, torch):
    """Its gradients would be added to those of ``optimizer.update``: with ``retain_graph`` in silence."""
    refused = pytest.raises(ScriptError, match=r"loss.backward\(\): leave it out: optimizer.update\(loss\)")
    with refused, mtrain.session() as session:
        model, optimizer = prepared(torch, session, accumulate=2)
        for number, batch in enumerate(session.batches(Points(64, 0), **LOOP)):
            assert number < 2, "the next update is not reached"
            loss = loss_of(torch, model, batch)
            if when in ("before", "instead") or (when == "second micro batch" and number == 1):
                loss.backward(retain_graph=True)
            if when != "instead":
                optimizer.update(loss)
            if when == "after":
                loss_of(torch, model, batch).backward()


def test_gradients_that_are_not_added_to_those_of_the_model_are_the_scripts_own_matter(torch):
    """A penalty on gradients, another network with an optimizer of its own, and a backward outside of the loop."""
    other = torch.nn.Linear(8, 2)
    with mtrain.session() as session:
        model, optimizer = prepared(torch, session)
        for batch in session.batches(Points(64, 0), **LOOP):
            inputs = batch[0].requires_grad_()
            loss = loss_of(torch, model, (inputs, batch[1]))
            (slope,) = torch.autograd.grad(loss, inputs, create_graph=True)
            torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
            loss_of(torch, other, batch).backward()
            optimizer.update(loss + slope.square().sum())
    assert other.weight.grad is not None


@pytest.mark.parametrize("name", MISUSES)
def test_misuse_is_one_sentence_that_says_what_to_do(name, torch):
    misuse, sentence = MISUSES[name]
    with pytest.raises(UsageError) as caught, mtrain.session() as session:
        misuse(torch, session)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_loss_that_does_not_depend_on_the_model_is_warned_of_once(torch, capsys):
    with mtrain.session() as session:
        _, optimizer = prepared(torch, session)
        for _ in session.batches(Points(64, 0), **LOOP):
            optimizer.update(3 * torch.ones(1, requires_grad=True))
    assert capsys.readouterr().out.count("the gradient is zero") == 1


def test_a_batch_can_be_left_out_by_a_loss_times_zero(torch):
    with mtrain.session() as session:
        model, optimizer = prepared(torch, session)
        start = model.weight.detach().clone()
        for batch in session.batches(Points(64, 0), **LOOP):
            optimizer.update(0.0 * loss_of(torch, model, batch))
        assert torch.equal(model.weight, start)


class Counted(Stream):
    """A stream whose state is one object, which it goes on to change."""

    def __init__(self, length):
        super().__init__(length)
        self.state = {"next": 0}

    def __iter__(self):
        while self.state["next"] < len(self.points):
            self.state["next"] += 1
            yield self.points[self.state["next"] - 1]

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


def test_the_saved_state_of_a_stream_is_that_of_before_the_next_update(torch, tmp_path):
    with mtrain.session() as session:
        model, optimizer = prepared(torch, session)
        for batch in session.batches(Counted(64), global_batch=8, updates=6):
            optimizer.update(loss_of(torch, model, batch))
            if session.progress.update == 2:
                session.save()
    saved = store.load(tmp_path / "runs/script/checkpoints/step-00000003")
    assert kept.from_plain(saved.meta["extra"]["stream"], tensor=None) == {"next": 24}


def test_a_script_may_set_the_seed(torch):
    starts = []
    for seed in (None, 0, 1):
        with mtrain.session() as session:
            model, optimizer = prepared(torch, session, seed=seed)
            starts.append(model.weight.detach().clone())
            inputs, _ = next(iter(session.batches(Plain(64, 0), **LOOP)))
            optimizer.update(model(inputs).mean())
            starts.append(inputs.clone())
    assert torch.equal(starts[0], starts[2])
    assert torch.equal(starts[1], starts[3])
    assert not torch.equal(starts[0], starts[4])
    assert not torch.equal(starts[1], starts[5])


def test_a_class_can_be_given_in_the_place_of_a_function_that_builds_the_model(torch):
    class Net(torch.nn.Linear):
        def __init__(self):
            super().__init__(8, 2)

    with mtrain.session() as session:
        model, _ = session.prepare(Net)
        assert isinstance(model, Net)
        assert model.weight.to(session.device).shape == (2, 8)


def test_a_session_can_follow_another_one(torch):
    for _ in range(2):
        with mtrain.session() as session:
            model, optimizer = prepared(torch, session)
            for batch in session.batches(Points(64, 0), **LOOP):
                optimizer.update(loss_of(torch, model, batch))
            assert session.progress.update == 8


def test_a_plain_loop_of_torch_is_repeated_bit_for_bit(torch):
    data = Plain(64, 0)
    order = np.random.default_rng(0).permutation(64)
    torch.manual_seed(0)
    own = torch.nn.Linear(8, 2)
    # mtrain uses torch's fused kernels. The others round the last elements of an array differently on some processors.
    native = torch.optim.SGD(own.parameters(), lr=0.1, momentum=0.9, fused=True)
    for update in range(8):
        batch = [torch.from_numpy(x) for x in trees.collate([data[i] for i in order[update * 8 :][:8]])]
        native.zero_grad()
        loss_of(torch, own, batch).backward()
        native.step()
    with mtrain.session() as session:
        model, optimizer = prepared(torch, session, optimizer=mtrain.SGD(learning_rate=0.1, momentum=0.9))
        for batch in session.batches(data, order=lambda epoch: order, **LOOP):
            optimizer.update(loss_of(torch, model, batch))
        assert torch.equal(model.weight, own.weight)
        assert torch.equal(model.bias, own.bias)


class Accuracy:
    """A metric as an object, fed batch by batch or at once."""

    def __init__(self):
        self.reset()

    def reset(self):
        self.right = self.seen = 0

    def update(self, predictions, targets):
        self.right += int((predictions.argmax(1) == targets).sum())
        self.seen += len(targets)

    def compute(self):
        return self.right / self.seen


def test_a_metric_can_be_an_object_with_update_and_compute(torch):
    metric = Accuracy()
    metric.seen = 5  # it is reset before each evaluation
    with mtrain.session() as session:
        model, _ = prepared(torch, session)
        metrics = [session.evaluate(model, Plain(20, 1), metric=metric)["Accuracy"] for _ in range(2)]
        assert metrics == [session.evaluate(model, Plain(20, 1), metric=accuracy)["accuracy"]] * 2


def test_evaluation_takes_the_samples_of_a_micro_batch_at_a_time(torch):
    sizes = []

    def step(model, batch):
        sizes.append(len(batch[1]))
        return model(batch[0]), batch[1]

    with mtrain.session() as session:
        model, optimizer = prepared(torch, session, accumulate=2)
        for number, batch in enumerate(session.batches(Points(64, 0), **LOOP)):
            optimizer.update(loss_of(torch, model, batch))
            if number == 1:
                session.evaluate(model, Plain(8, 1), metric=accuracy, step=step)
    assert sizes == [4, 4]


@pytest.mark.parametrize("place", ["in the loop", "in the middle of an update", "after the loop"])
def test_a_request_to_end_during_evaluation_saves_the_updates_that_were_made(place, torch, tmp_path):
    def step(model, batch):
        os.kill(os.getpid(), signal.SIGTERM)
        return model(batch[0]), batch[1]

    def script():
        with mtrain.session() as session:
            model, optimizer = prepared(torch, session, accumulate=2)
            for number, batch in enumerate(session.batches(Points(64, 0), **LOOP)):
                optimizer.update(loss_of(torch, model, batch))
                if number == {"in the loop": 5, "in the middle of an update": 6}.get(place):
                    session.evaluate(model, Plain(8, 1), metric=accuracy, step=step, batch_size=2)
            session.evaluate(model, Plain(8, 1), metric=accuracy, step=step, batch_size=2)

    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as left:
        script()
    assert left.value.code == 143
    (folder,) = tmp_path.glob("runs/script/checkpoints")
    assert store.load(store.newest(folder)).progress.update == (8 if place == "after the loop" else 3)
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_second_signal_ends_a_script_at_once(torch):
    def script():
        with mtrain.session() as session:
            model, optimizer = prepared(torch, session)
            for batch in session.batches(Points(64, 0), **LOOP):
                signal.raise_signal(signal.SIGINT)  # in this thread: two of `os.kill` may arrive as one
                signal.raise_signal(signal.SIGINT)
                optimizer.update(loss_of(torch, model, batch))

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        script()
    assert signal.getsignal(signal.SIGINT) == before


def test_a_users_own_file_of_the_name_of_the_shipped_one_counts_as_set(torch, tmp_path):
    (tmp_path / "script.yml").write_text("train: {clip_norm: 5.0}\n")
    (tmp_path / "own.py").write_text("")
    loaded = script_job.with_script(config.load("script.yml", environ={}), tmp_path / "own.py", [])
    assert loaded.spec.train.clip_norm == 5.0
    assert "train.clip_norm" in loaded.script.outside_paths


def test_an_optimizer_of_torch_with_groups_of_its_own_follows_the_schedule(torch):
    def make(model):
        groups = [{"params": [model.weight]}, {"params": [model.bias], "lr": 0.2}]
        return torch.optim.RMSprop(groups, lr=0.1)

    data = Plain(64, 0)
    torch.manual_seed(0)
    own = torch.nn.Linear(8, 2)
    native = make(own)
    for update in range(8):
        for group, learning_rate in zip(native.param_groups, (0.1, 0.2), strict=True):
            group["lr"] = learning_rate * (1 - update / 8)
        batch = [torch.from_numpy(x) for x in trees.collate([data[i] for i in range(update * 8, update * 8 + 8)])]
        native.zero_grad()
        loss_of(torch, own, batch).backward()
        native.step()
    with mtrain.session() as session:
        model, optimizer = prepared(torch, session, optimizer=make, schedule=mtrain.Linear())
        for batch in session.batches(data, order=lambda epoch: range(64), **LOOP):
            optimizer.update(loss_of(torch, model, batch))
        assert torch.equal(model.weight, own.weight)
        assert torch.equal(model.bias, own.bias)


def test_a_rate_can_be_a_function_of_the_update(torch):
    with mtrain.session() as session:
        model, optimizer = prepared(torch, session, schedule=lambda update: 0.0 if update < 4 else 0.1)
        start = model.weight.detach().clone()
        for batch in session.batches(Points(64, 0), **LOOP):
            optimizer.update(loss_of(torch, model, batch))
            assert torch.equal(start, model.weight) == (session.progress.update < 4)


def test_predictions_are_joined_in_the_order_of_the_samples_and_count_once():
    class Gathered:
        rank, size = 0, 2

        def all_gather(self, value):
            other = [([2, 3], (np.array([[2.0], [3.0]]), {"t": np.array([2, 3])})), ([0, 1], value[0][1])]
            return [value, other]

    own = [([0, 1], (np.array([[0.0], [1.0]]), {"t": np.array([0, 1])}))]
    predictions, targets = evaluation.gather(Gathered(), own)
    assert predictions.tolist() == [[0.0], [1.0], [2.0], [3.0]]
    assert targets["t"].tolist() == [0, 1, 2, 3]


def test_kept_state_comes_back_as_it_was():
    state = {"n": 3, "f": 0.1, 7: [np.arange(6, dtype=np.int16).reshape(2, 3), (None, "text", True)]}
    plain = kept.as_plain(state, name="x")
    import json

    back = kept.from_plain(json.loads(json.dumps(plain)), tensor=lambda array: array)
    assert back["n"] == 3
    assert back["f"] == 0.1
    assert back[7][0].dtype == np.int16
    assert back[7][0].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert back[7][1] == (None, "text", True)
    with pytest.raises(ScriptError, match="holds a set"):
        kept.as_plain({1: {2}}, name="x")


def test_the_decay_of_an_average_is_constant_from_the_first_update_on(torch):
    with mtrain.session() as session:
        model, optimizer = prepared(torch, session, ema=0.9, precision="fp64")
        expected = {name: x.clone() for name, x in model.state_dict().items()}
        for batch in session.batches(Points(64, 0), **LOOP):
            optimizer.update(loss_of(torch, model, batch))
            expected = {name: 0.9 * expected[name] + 0.1 * x for name, x in model.state_dict().items()}
        averages = optimizer.native.ema()
        for name, x in expected.items():
            assert torch.allclose(averages[name], x, rtol=1e-12, atol=0), name


def test_an_unknown_kept_name_is_refused_when_a_job_is_resumed():
    objects = kept.KeptObjects(OneRank(), {"a": {"dict": []}}, np.asarray, warn=print)
    with pytest.raises(CheckpointError, match="it has a"):
        objects.keep("b", {})


def test_batches_of_any_shape_are_taken_apart_and_joined_again():
    batch = {"x": np.ones((2, 3), np.float32), "more": [np.zeros(2, np.int64), ("text", 5)]}
    arrays, structure = trees.flatten(batch, floats=np.float64)
    assert {name: array.dtype.str for name, array in arrays.items()} == {"x": "<f8", "more.0": "<i8"}
    back = trees.rebuilt(structure, arrays)
    assert back["more"][1] == ("text", 5)
    assert back["x"] is arrays["x"]


def test_samples_do_not_depend_on_what_was_read_before():
    def samples():
        return Samples(Selection(dataset=Points(16, 0), batch=4), seed=1, seed_framework=lambda seed: None)

    one, other = samples(), samples()
    for index in (3, 1, 2):
        other.sample(0, index)
    assert trees.equal(one.sample(2, 5), other.sample(2, 5))
    assert not trees.equal(one.sample(2, 5), one.sample(3, 5))


def test_a_script_does_not_silently_win_over_a_flag():
    spec = change_values(config.load(PLAIN, environ={}).spec, {"train.clip_norm": 5.0})
    outside = frozenset({"train.clip_norm"})
    change_values(spec, {"train.clip_norm": 5}, outside_paths=outside, call="session.prepare")
    change_values(spec, {"train.clip_norm": 1.0}, call="session.prepare")
    with pytest.raises(ScriptError, match=r"sets train.clip_norm to 1.0, but this job was started with .* 5.0"):
        change_values(spec, {"train.clip_norm": 1.0}, outside_paths=outside, call="session.prepare")


@pytest.mark.parametrize(("typed", "said"), [("train.updates", "train.epochs"), ("train.epochs", "train.updates")])
def test_another_kind_of_length_than_the_script_has_is_refused_with_what_to_do(typed, said):
    spec = change_values(config.load(PLAIN, environ={}).spec, {typed: 1, said: None})
    changes = {said: 3, typed: None}
    with pytest.raises(ScriptError) as refused:
        change_values(spec, changes, outside_paths=frozenset({typed}), call="session.batches")
    keyword = said.partition(".")[2]
    expected = f"session.batches sets {said} to 3 in place of {typed}, but this job was started with {typed} 1; start it without"
    assert str(refused.value).startswith(expected), refused.value
    assert f"or leave {keyword}= out of the script" in str(refused.value)
    assert "None" not in str(refused.value)


def test_one_value_in_two_forms_is_no_contradiction():
    groups = {"optimizer.groups": [{"match": "bias", "weight_decay": 0.0, "learning_rate_factor": 1.0}, {"match": ""}]}
    spec = change_values(
        config.load(PLAIN, environ={}).spec, {"optimizer.groups": [{"match": "bias", "weight_decay": 0}, {"match": ""}]}
    )
    change_values(spec, groups, outside_paths=frozenset({"optimizer.groups"}))
    with pytest.raises(ScriptError, match=r"optimizer\.groups"):
        change_values(spec, {"optimizer.groups": [{"match": ""}]}, outside_paths=frozenset({"optimizer.groups"}))


@pytest.mark.parametrize(
    ("line", "own", "rest"),
    [
        (["a.py", "-o", "x=1"], [], ["a.py", "-o", "x=1"]),
        (["--backend", "solo", "a.py", "--epochs", "3"], ["--backend", "solo"], ["a.py", "--epochs", "3"]),
        (["-o", "a=1", "b=2", "a.py"], ["-o", "a=1", "b=2"], ["a.py"]),
        (["--resume", "a.py"], ["--resume=auto"], ["a.py"]),
        (["--resume", "runs/x", "a.py"], ["--resume", "runs/x"], ["a.py"]),
        (
            ["--nproc_per_node=2", "--dry-run", "a.py", "--", "b"],
            ["--nproc_per_node=2", "--dry-run"],
            ["a.py", "--", "b"],
        ),
        (["--", "a.py"], [], ["a.py"]),
    ],
)
def test_the_first_word_that_is_no_flag_is_the_script(line, own, rest):
    assert split_at_script(line, run_command.params) == (own, rest)


@pytest.mark.parametrize(
    ("scheduler", "sentence"),
    [
        (lambda optimizer: 3, "`scheduler` gave a int; expected a function that makes a scheduler"),
        (lambda optimizer: other_scheduler(), "`scheduler` has an optimizer of its own"),
    ],
)
def test_what_is_no_scheduler_of_the_given_optimizer_is_refused(scheduler, sentence):
    with pytest.raises(ScriptError, match=sentence):
        make_scheduler(scheduler, [{"lr": 0.1}], framework="torch", ratios_stay=False)


def other_scheduler():
    import torch

    return torch.optim.lr_scheduler.StepLR(torch.optim.SGD([torch.zeros(1)], lr=1.0), 1)
