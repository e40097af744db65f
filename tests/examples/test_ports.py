"""The ports of examples/ports train what their originals train, with about as few changed lines."""

from dataclasses import replace
from functools import cache

import pytest

from benchmarks.ports import __main__ as table
from benchmarks.ports import jobs, lines

PORTS = [port.name for port in jobs.PORTS]
QUICK = [name for name in PORTS if name not in ("accelerate_text", "accelerate_vision", "fabric_mnist")]


@cache
def plain(name, *flags):
    """The weights of a plain script; one run serves several tests."""
    return jobs.plain(jobs.by_name(name), *flags)


@pytest.mark.parametrize("name", PORTS)
def test_a_port_changes_at_most_two_lines_more_than_the_peer(name):
    folder = jobs.by_name(name).folder
    peer = lines.changes(folder / "plain.py", folder / "peer.py")
    port = lines.changes(folder / "plain.py", folder / "port.py")
    assert 0 < port.written <= peer.written + 2
    assert "mtrain.train(" not in (folder / "port.py").read_text()


def test_lines_are_counted_whatever_their_indentation_and_wrapping(tmp_path):
    before, after = tmp_path / "before.py", tmp_path / "after.py"
    before.write_text('"""Text."""\nx = f(1, 2)\nfor a in x:\n    print(a)\ny = 1\nz = 2\n')
    after.write_text(
        '"""Other."""\n# why\nwith g():\n    x = f(\n        1, 2\n    )\n    for a in x:\n        print(a)\nz = 3\n'
    )
    assert lines.changes(before, after) == lines.Changes(written=2, deleted=1)
    assert lines.changes(before, before) == lines.Changes(written=0, deleted=0)


@pytest.mark.job
@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in PORTS])
def test_one_rank_trains_the_bits_of_the_plain_script(name):
    port = jobs.by_name(name)
    assert jobs.same_bits(plain(name), jobs.ours(port, "solo", 1, fp64=False))


@pytest.mark.job
@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("ddp_tutorial", 2),
        pytest.param("ddp_tutorial", 3, marks=pytest.mark.slow),
        pytest.param("accelerate_vision", 3, marks=pytest.mark.slow),
        pytest.param("paddle_fleet", 2, marks=pytest.mark.slow),
    ],
)
def test_several_ranks_train_what_the_plain_script_trains(name, size):
    port = jobs.by_name(name)
    assert jobs.difference(plain(name, "--fp64"), jobs.ours(port, port.backend, size)) <= 1e-12


@pytest.mark.job
def test_the_peer_trains_what_the_plain_script_trains():
    port = jobs.by_name("ddp_tutorial")
    assert jobs.difference(plain(port.name, "--fp64"), jobs.peer(port, 2, "--fp64")) <= 1e-12


@pytest.mark.job
def test_a_script_that_fails_is_reported_with_its_last_words():
    port = replace(jobs.by_name("ddp_tutorial"), backends={"solo": ("--no-such-flag",)})
    with pytest.raises(jobs.JobError, match="no-such-flag"):
        jobs.ours(port, "solo", 1)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", PORTS)
def test_every_metric_of_the_table_is_within_1e_12(name):
    metrics = {cell: table.tried(cell, run) for cell, run in table.cells(jobs.by_name(name)).items()}
    print(table.tables({name: metrics}))
    assert metrics.pop("bits") is True
    assert "failed" not in metrics.values()
    assert max(metrics.values()) <= 1e-12


def test_the_table_shows_metrics_failures_and_what_does_not_run():
    row = {
        "bits": True,
        "A 1": 0.0,
        "A 2": 2.8e-17,
        "A 3": "failed",
        "peer 2": 1e-15,
        "peer 3": 1e-15,
        "B fleet 1": 0.0,
    }
    first, second = table.tables({"paddle_fleet": row}).split("\n\n")
    assert "| same bits | 0 / 3e-17 / failed | - / 1e-15 / 1e-15 |" in first
    assert second.endswith("|  |  |  |  |  | 0 / - / - |")


def test_the_readme_holds_the_lines_that_are_counted_now():
    text = table.README.read_text()
    for port in jobs.PORTS:
        ours = lines.changes(port.folder / "plain.py", port.folder / "port.py")
        peer = lines.changes(port.folder / "plain.py", port.folder / "peer.py")
        row = f"| [{port.title}]({port.name}) | {ours.written} | {peer.written} | {ours.deleted} | same bits |"
        assert row in text
