"""The loops of examples/ports train what their plain scripts train, with about as few changed lines as with other libraries."""

from functools import cache

import pytest

from benchmarks.ports import loops, loops_table
from mtrain.core.state.digest import digest

NAMES = [script.name for script in loops.SCRIPTS]
QUICK = ("dcgan", "dqn")
"""The others take the same ways through mtrain, and are trained by the slow tests alone."""


@cache
def plain(name):
    """The weights of a plain script; one run serves several tests."""
    return loops.plain(loops.by_name(name), "--fp64")


def quick(name):
    return pytest.param(name, marks=() if name in QUICK else pytest.mark.slow)


@pytest.mark.job
@pytest.mark.parametrize("name", [quick(name) for name in NAMES])
def test_one_rank_trains_the_bits_of_the_plain_script(name):
    assert loops.between(plain(name), loops.ours(loops.by_name(name), "solo", 1)) == 0


@pytest.mark.job
@pytest.mark.parametrize(
    ("name", "backend", "size"),
    [
        pytest.param(
            name, backend, size, marks=() if (name, backend, size) == ("mean_teacher", "ddp", 2) else pytest.mark.slow
        )
        for name in NAMES
        for backend, size in (("ddp", 2), ("ddp", 3), ("horovod", 2), ("horovod", 3))
    ],
)
def test_several_ranks_train_what_the_plain_script_trains(name, backend, size):
    difference = loops.between(plain(name), loops.ours(loops.by_name(name), backend, size))
    print(f"{name} on {size} ranks of {backend}: largest difference to the plain script {difference:.1e}")
    # Not 0: a model that does not train at all would have no difference either.
    assert 0 < difference <= 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["ZeRO 1", "ZeRO 3"])
@pytest.mark.parametrize("name", [name for name in NAMES if name != "surgery"])
def test_backends_that_split_arrays_train_what_the_plain_script_trains(name, stage):
    assert 0 < loops.between(plain(name), loops.ours(loops.by_name(name), stage, 2)) <= 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_job_that_was_killed_goes_on_to_the_same_bits(name):
    script = loops.by_name(name)
    updates, weights = loops.killed(script, "ddp", 2)
    assert updates > 0
    assert digest(weights) == digest(loops.ours(script, "ddp", 2))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "library"), [(script.name, one) for script in loops.SCRIPTS for one in script.peers])
def test_a_peer_trains_what_the_plain_script_trains(name, library):
    script = loops.by_name(name)
    assert loops.between(plain(name), loops.peer(script, library, 1, "--fp64")) == 0


def test_a_loop_changes_at_most_one_line_more_than_with_fabric():
    for script in loops.SCRIPTS:
        ours = loops_table.changed(script, "port")
        assert ours.written > 0
        if "fabric" in script.peers:
            assert ours.written <= loops_table.changed(script, "peer_fabric").written + 1


def test_the_readme_holds_the_lines_that_are_counted_now():
    text = loops_table.README.read_text()
    for row in loops_table.tables({}).split("\n\n")[-1].splitlines():
        assert row in text


def test_the_table_shows_differences_refusals_and_other_bits():
    row = {
        "solo 1": {"difference": 0.0},
        "ddp 2": {"difference": 2.2e-16, "digest": "a"},
        "ZeRO 1 2": {"refused": "not here"},
        "fsdp 2": {"refused": "not here"},
        "killed": {"after": 3, "digest": "b"},
    }
    text = loops_table.tables({"dcgan": row})
    assert "| [DCGAN](dcgan) | 0 | 2e-16 / - | - / - | (1) | - | (1) | - | **other bits** |" in text
    assert "\n1. not here\n" in text
    same = {**row, "killed": {"after": 3, "digest": "a"}}
    assert "| same bits |" in loops_table.tables({"dcgan": same})


def test_the_sentence_of_a_refusal_is_found_in_the_last_words_of_a_job():
    assert loops_table.sentence("end: failed\nerror: optimizer.gradients: no\nlog: x\n") == "optimizer.gradients: no"
    assert loops_table.sentence("something\nelse\n") == "else"
