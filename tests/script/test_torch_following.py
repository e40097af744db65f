"""Target networks and teachers: models that no update trains, and that follow another one."""

import sys

import pytest
import torch

import mtrain
from mtrain.errors import MtrainError
from tests.script.runs import SCRIPTS, done, largest_difference, run, summary, weights

sys.path.insert(0, str(SCRIPTS))
import train_several
from points import Plain

SCRIPT = str(SCRIPTS / "train_several.py")
FP64 = ("-o", "train.precision=fp64")


def plain(loop):
    """Return the weights of a loop as a plain script trains them."""
    session = train_several.PlainSession()
    length = {"updates": 10, "global_batch": 12}
    train_several.LOOPS[loop](session, length)
    return session.weights()


BACKENDS = {
    "zero 1": ("-b", "deepspeed", "-o", "backend.options.stage=1"),
    "zero 3": ("-b", "deepspeed", "-o", "backend.options.stage=3"),
    "fsdp": ("-b", "fsdp"),
}


@pytest.mark.job
@pytest.mark.parametrize(
    ("backend", "size", "loop"),
    [
        ("zero 3", 2, "target"),
        ("fsdp", 3, "dqn"),
        *(
            pytest.param(backend, size, loop, marks=pytest.mark.slow)
            for backend, size in [("zero 1", 2), ("zero 1", 3), ("zero 3", 3), ("fsdp", 2)]
            for loop in ("target", "dqn")
        ),
    ],
)
def test_a_target_follows_a_model_whose_arrays_are_split_and_goes_on_after_a_kill(backend, size, loop, tmp_path):
    words = (*BACKENDS[backend], "--nproc-per-node", str(size), *FP64)
    saving = ("-o", "checkpoint.every_updates=2")
    assert run(tmp_path, "--name", "one", *words, *saving, SCRIPT, loop, environ={"KILLED_IN": "6"}).returncode
    done(tmp_path, "--resume", "runs/one", *words, SCRIPT, loop)
    assert summary(tmp_path, "one")["updates"] == 10
    difference = largest_difference(weights(tmp_path, "one"), plain(loop))
    print(f"{loop} on {size} ranks of {backend}: largest difference to the plain script {difference:.1e}")
    assert difference <= 1e-12


class Net(torch.nn.Module):
    """A layer, random numbers and running statistics."""

    def __init__(self, width=8):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(width, 2), torch.nn.BatchNorm1d(2), torch.nn.Dropout(0.5))

    def forward(self, inputs):
        return self.layers(inputs)


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["script.py"])


SGD = mtrain.SGD(learning_rate=0.1)


def trained(step=lambda *_: None, *, before=lambda *_: None, accumulate=1, target=None, **settings):
    """Make two updates of a student beside a teacher; ``step(session, student, teacher)`` after each batch."""
    with mtrain.session() as session:
        student, optimizer = session.prepare(Net, optimizer=SGD, name="student", accumulate=accumulate)
        teacher, of_teacher = session.prepare(target or Net, name="teacher", **settings)
        before(session, student, teacher, of_teacher)
        batches = session.batches(Plain(16, 0), global_batch=8, updates=2)
        for inputs, targets in batches:
            optimizer.update(torch.nn.functional.cross_entropy(student(inputs), targets))
            step(session, student, teacher, of_teacher)
        return student, teacher


def test_a_teacher_is_not_trained_and_keeps_its_mode(here):
    began = []

    def before(session, student, teacher, _):
        began.append({name: x.clone() for name, x in teacher.state_dict().items()})
        assert not any(x.requires_grad for x in teacher.parameters())
        assert teacher.training
        assert teacher(torch.ones(2, 8)).grad_fn is None
        teacher.layers[2].eval()
        began[0] = {name: x.clone() for name, x in teacher.state_dict().items()}

    def step(session, student, teacher, _):
        session.evaluate(teacher, Plain(4, 1), metric=lambda p, t: 0.0)
        assert (teacher.training, teacher.layers[1].training, teacher.layers[2].training) == (True, True, False)
        assert student.training

    _, teacher = trained(step, before=before)
    assert all(torch.equal(x, began[0][name]) for name, x in teacher.state_dict().items())


def test_it_follows_weights_by_a_share_and_copies_buffers(here):
    starts = []

    def before(session, student, teacher, _):
        session.follow(teacher, student)
        assert all(torch.equal(a, b) for a, b in zip(teacher.parameters(), student.parameters(), strict=True))
        starts.append([x.detach().clone() for x in teacher.parameters()])

    def step(session, student, teacher, _):
        starts.append([x.detach().clone() for x in student.parameters()])
        session.follow(teacher, student, 0.25, buffers=session.progress.update == 0)
        starts.append([x.clone() for x in teacher.buffers()])

    student, teacher = trained(step, before=before)
    start, first, buffers, second, later_buffers = starts
    for own, a, b, c in zip(teacher.parameters(), start, first, second, strict=True):
        assert torch.equal(own, torch.lerp(torch.lerp(a, b, 0.25), c, 0.25))
    # Not each of them: the bias before a BatchNorm has no gradient but rounding, which may be exactly zero.
    assert not torch.equal(start[0], first[0])
    assert all(torch.equal(a, b) for a, b in zip(buffers, later_buffers, strict=True))
    assert int(teacher.layers[1].num_batches_tracked) == 1
    assert int(student.layers[1].num_batches_tracked) == 2


def test_with_accumulation_it_follows_once_per_update(here):
    seen = []

    def before(session, student, teacher, _):
        session.follow(teacher, student)

    def step(session, student, teacher, _):
        session.follow(teacher, student, 0.5)
        seen.append((next(teacher.parameters()).detach().clone(), next(student.parameters()).detach().clone()))

    trained(step, before=before, accumulate=2)
    (start, begun), (after, updated), (later, _), _ = seen
    assert torch.equal(start, begun)
    assert torch.equal(after, torch.lerp(start, updated, 0.5))
    assert not torch.equal(after, start)
    assert torch.equal(later, after), "the next update has another micro batch"


class Wide(Net):
    """Arrays of other shapes."""

    def __init__(self):
        super().__init__(9)


WRONG = {
    "the target is trained": (lambda s, student, teacher, o: s.follow(student, teacher), {}, "'student' has an optimizer, which trains it"),
    "the same model": (lambda s, student, teacher, o: s.follow(teacher, teacher), {}, "the same model"),
    "no model": (lambda s, student, teacher, o: s.follow(teacher, Net()), {}, "model that session.prepare returned, given a Net"),
    "no share": (lambda s, student, teacher, o: s.follow(teacher, student, 1.5), {}, "tau=1.5 given; expected a number above 0"),
    "zero": (lambda s, student, teacher, o: s.follow(teacher, student, 0), {}, "tau=0 given"),
    "other shapes": (
        lambda s, student, teacher, o: s.follow(teacher, student), {"target": Wide},
        "layers.0.weight is (2, 9) in the one and (2, 8) in the other",
    ),
    "a teacher's loss": (
        lambda s, student, teacher, o: o.update(teacher(torch.ones(2, 8)).sum()), {}, "the model teacher was prepared without an optimizer",
    ),
    "a teacher's step": (lambda s, student, teacher, o: o.step(), {}, "optimizer.step: the model teacher was prepared without"),
    "a schedule": (lambda *_: None, {"schedule": mtrain.Cosine()}, "schedule= given for 'teacher', which has no optimizer"),
    "an average": (lambda *_: None, {"ema": 0.9}, "ema= given for 'teacher'"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_calls_are_refused_in_one_sentence(name, here):
    step, settings, message = WRONG[name]
    with pytest.raises(MtrainError) as error:
        trained(step, **settings)
    assert message in str(error.value), error.value


def test_a_session_in_which_nothing_is_trained_is_refused(here):
    with mtrain.session() as session:
        session.prepare(Net, name="teacher")
        with pytest.raises(MtrainError, match="no model has an optimizer"):
            session.batches(Plain(16, 0), global_batch=8, updates=2)
