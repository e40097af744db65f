"""Loops around the updates of a script: bodies of `session.range` and whole epochs, killed anywhere and resumed to the same bits."""

import random
import sys
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest
import torch

import mtrain
from mtrain.core.checkpoint import store
from mtrain.errors import Interrupted, ScriptError
from tests.script.in_process import Killed, rank_of
from tests.script.runs import SCRIPTS, done, largest_difference, run, weights

sys.path.insert(0, str(SCRIPTS))
from points import Plain

BODIES, PASSES, PIECES, ROWS = 4, 2, 3, 6
TOTAL = BODIES * PASSES * PIECES


def network():
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Dropout(0.3), torch.nn.Linear(4, 1))


def trained(folder, *overrides, resume=None, at=lambda place, session: None):
    """Train as PPO does: rows that the network itself makes, several passes over them, in pieces; return the newest checkpoint.

    ``at`` is called at each place of the loops. All draws are from the global generators.
    """
    with rank_of(folder, "backend.name=solo", *overrides, resume=resume), suppress(Killed), mtrain.session() as session:
        model, optimizer = session.prepare(network, optimizer=mtrain.Adam(learning_rate=0.05), seed=3)
        for body in session.range(BODIES):
            at(("made", body), session)
            with torch.no_grad():
                rows = torch.rand(PIECES * ROWS, 3, dtype=torch.float64)
                rows += np.random.normal() + random.random() + model(rows)
            for each in range(PASSES):
                order = torch.randperm(len(rows))
                for piece in session.updates(PIECES, global_batch=ROWS, total=TOTAL):
                    at((body, each, piece), session)
                    x = session.share(rows[order[piece * ROWS :][:ROWS]])
                    optimizer.update((model(x) - x.sum(1, keepdim=True)).square().mean())
            at(("done", body), session)
            session.log(body=body)
    newest = store.newest(folder / "checkpoints")
    return None if newest is None else store.load(newest)


PLACES = [("made", 0), (0, 1, 1), ("done", 0), ("made", 1), (1, 0, 0), (1, 1, 2), ("done", 2), ("made", 3), (3, 1, 2)]


@pytest.mark.parametrize("place", PLACES, ids=str)
def test_a_job_that_was_killed_anywhere_goes_on_at_the_begin_of_a_body_to_the_same_bits(place, tmp_path):
    whole = trained(tmp_path / "whole")
    assert whole.progress.update == TOTAL

    def kill(now, session):
        if now == place:
            raise Killed

    begun = []
    saved = trained(tmp_path / "killed", "checkpoint.every_updates=1", at=kill)
    bodies = place[1] if isinstance(place[0], str) else place[0]
    assert (0 if saved is None else saved.progress.update) == bodies * PASSES * PIECES, "saved at ends of bodies alone"
    newest = store.newest(tmp_path / "killed" / "checkpoints")
    ended = trained(tmp_path / "killed", resume=newest, at=lambda now, session: begun.append(now))
    assert begun[0] == ("made", bodies)
    assert ended.progress.update == TOTAL
    for name, x in whole.state.weights.items():
        assert np.array_equal(x, ended.state.weights[name]), name


def test_a_request_to_save_waits_for_the_end_of_the_body(tmp_path):
    saved = []

    def look(now, session):
        if now == (1, 0, 1):
            session.save("warm")
        saved.append((now, (tmp_path / "checkpoints" / "warm").exists()))

    trained(tmp_path, "checkpoint.asynchronous=false", at=look)
    assert next(now for now, there in saved if there) == ("made", 2), "not within the body"


def test_a_checkpoint_that_is_due_within_a_body_is_written_at_its_end(tmp_path):
    def kill(now, session):
        if now == ("made", 1):
            raise Killed

    saved = trained(tmp_path, "checkpoint.every_updates=4", at=kill)
    assert saved.progress.update == PASSES * PIECES, "due after update 4, written after 6"


def test_a_job_that_is_asked_to_end_makes_its_body_whole(tmp_path, monkeypatch):
    seen = []

    def look(now, session):
        seen.append(now)
        if now == (1, 0, 0):
            loop = session._training.loop.loop
            monkeypatch.setattr(loop, "hooks", replace(loop.hooks, stop=lambda: True))

    with pytest.raises(Interrupted, match="update 12, state saved"):
        trained(tmp_path, at=look)
    assert seen[-1] == ("done", 1)
    assert store.load(store.newest(tmp_path / "checkpoints")).progress.update == 2 * PASSES * PIECES


def test_a_loop_that_the_script_leaves_goes_on_with_the_next_body(tmp_path):
    with rank_of(tmp_path, "backend.name=solo"), mtrain.session() as session:
        model, optimizer = session.prepare(network, optimizer=mtrain.SGD(learning_rate=0.1))
        for body in session.range(5):
            for _ in session.updates(2, global_batch=4, total=10):
                optimizer.update(model(session.share(torch.ones(4, 3))).square().mean())
            if body == 1:
                break
    begun = []
    newest = store.newest(tmp_path / "checkpoints")
    assert store.load(newest).progress.update == 4
    with rank_of(tmp_path, "backend.name=solo", resume=newest), mtrain.session() as session:
        model, optimizer = session.prepare(network, optimizer=mtrain.SGD(learning_rate=0.1))
        for body in session.range(5):
            begun.append(body)
            for _ in session.updates(2, global_batch=4, total=10):
                optimizer.update(model(session.share(torch.ones(4, 3))).square().mean())
        assert session.progress.update == 10
    assert begun == [2, 3, 4]


# ------------------------------------------------------------------------------------------------------- whole epochs
LOADER = torch.utils.data.DataLoader(Plain(24, 0), batch_size=8)


def trained_by_epochs(folder, *overrides, resume=None, killed_at=None):
    """Train on targets that the network makes at the begin of each epoch, as in clustering; return the newest checkpoint."""
    with rank_of(folder, "backend.name=solo", *overrides, resume=resume), suppress(Killed), mtrain.session() as session:
        model, optimizer = session.prepare(
            lambda: torch.nn.Linear(8, 2), optimizer=mtrain.SGD(learning_rate=0.1), seed=3
        )
        for epoch in session.epochs(3, whole=True):
            with torch.no_grad():
                target = model(torch.rand(5, 8, dtype=torch.float64)).mean(0) + np.random.normal()
            for number, (x, _) in enumerate(session.batches(LOADER)):
                if (epoch, number) == killed_at:
                    raise Killed
                optimizer.update((model(x) - target).square().mean())
            session.log(target=target.sum())
    newest = store.newest(folder / "checkpoints")
    return None if newest is None else store.load(newest)


@pytest.mark.parametrize("killed_at", [(0, 2), (1, 0), (1, 2), (2, 1)])
def test_what_comes_before_the_batches_of_a_whole_epoch_is_made_again_with_it(killed_at, tmp_path):
    whole = trained_by_epochs(tmp_path / "whole")
    saved = trained_by_epochs(tmp_path / "killed", "checkpoint.every_updates=1", killed_at=killed_at)
    assert (0 if saved is None else saved.progress.update) == killed_at[0] * 3
    ended = trained_by_epochs(tmp_path / "killed", resume=store.newest(tmp_path / "killed" / "checkpoints"))
    assert ended.progress.update == 9
    assert np.array_equal(whole.state.weights["weight"], ended.state.weights["weight"])


# ------------------------------------------------------------------------------------------------------------ misuses
def body(session, model, optimizer, *, count=2, **further):
    for _ in session.updates(count, **{"global_batch": 4, "total": 4, **further}):
        optimizer.update(model(session.share(torch.ones(4, 3))).square().mean())


def in_body(misuse, bodies=2):
    def loop(session, model, optimizer):
        for number in session.range(bodies):
            misuse(session, model, optimizer, number)

    return loop


MISUSES = {
    "no updates": (in_body(lambda s, m, o, n: None), "a body without a loop over session.updates"),
    "no total": (in_body(lambda s, m, o, n: body(s, m, o, total=None)), r"without total=; give the number of updates"),
    "too few in all": (in_body(lambda s, m, o, n: body(s, m, o), 3), "total=4 updates were made, and the script goes on"),
    "another total": (in_body(lambda s, m, o, n: body(s, m, o, total=4 + n)), "another global_batch= or total= given"),
    "another batch": (in_body(lambda s, m, o, n: body(s, m, o, global_batch=4 + n)), "another global_batch= or total="),
    "no count": (in_body(lambda s, m, o, n: body(s, m, o, count=None)), "session.updates: None given; expected a number"),
    "batches": (in_body(lambda s, m, o, n: s.batches(LOADER)), "session.batches: called in the body of a loop over session.range"),
    "epochs": (in_body(lambda s, m, o, n: s.epochs(3)), "session.epochs: called after a loop"),
    "range in range": (in_body(lambda s, m, o, n: s.range(3)), "it is the outermost one"),
    "no number": (lambda s, m, o: s.range(0), "session.range: 0 given; expected a number of at least 1"),
    "a truth": (lambda s, m, o: s.range(True), "session.range: True given"),
    "total in a flat loop": (lambda s, m, o: s.updates(3, global_batch=4, total=3), "where the count is the total"),
    "not used": (
        in_body(lambda s, m, o, n: list(s.updates(2, global_batch=4, total=4))), r"optimizer.update\(loss\) was not called"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MISUSES)
def test_a_loop_that_cannot_be_followed_is_one_sentence(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    misuse, sentence = MISUSES[name]
    with (
        pytest.raises(ScriptError, match=sentence),
        rank_of(tmp_path / "run", "backend.name=solo"),
        mtrain.session() as session,
    ):
        misuse(session, *session.prepare(network, optimizer=mtrain.SGD(learning_rate=0.1), seed=3))


# ------------------------------------------------------------------------------------------------------ several ranks
@pytest.mark.job
def test_ranks_that_were_killed_in_a_body_go_on_to_the_same_bits_and_each_with_its_own_state(tmp_path):
    script = str(SCRIPTS / "train_nested.py")
    options = ("-o", "train.precision=fp64", "checkpoint.every_updates=1")
    alone = done(tmp_path, *options, "-b", "solo", "--name", "alone", script)
    whole = done(tmp_path, *options, "-b", "ddp", "--nproc-per-node", "2", "--name", "whole", script, "own")
    assert largest_difference(weights(tmp_path, "alone"), weights(tmp_path, "whole")) < 1e-12
    (tmp_path / "kill").write_text("2 0 1")
    result = run(tmp_path, *options, "-b", "ddp", "--nproc-per-node", "2", "--name", "killed", script, "own")
    assert result.returncode not in (0, 2), result.stdout + result.stderr
    assert newest_update(tmp_path, "killed") == 2 * PASSES * PIECES
    other = run(tmp_path, "--resume", "runs/killed", "-b", "ddp", "--nproc-per-node", "3", script, "own")
    assert other.returncode == 2
    assert "a state for each of 2 ranks, which differ, and this job has 3 ranks; resume it with" in other.stderr
    resumed = done(tmp_path, "--resume", "runs/killed", "-b", "ddp", "--nproc-per-node", "2", script, "own")
    assert largest_difference(weights(tmp_path, "killed"), weights(tmp_path, "whole")) == 0
    own = [line for line in whole.stdout.splitlines() if "own " in line]
    assert own
    assert own == [line for line in resumed.stdout.splitlines() if "own " in line]
    assert "the state of 'own' differs between ranks" in whole.stdout + whole.stderr
    assert alone.returncode == 0


def newest_update(here, name):
    return store.load(store.newest(here / "runs" / name / "checkpoints")).progress.update
