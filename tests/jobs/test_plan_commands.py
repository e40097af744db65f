"""A plan of many hosts writes out what differs, and nothing else twice."""

import pytest

from mtrain.core.interfaces import Command
from mtrain.jobs.plan.plan import WRITTEN_OUT, HostCommand, command_lines

HOSTS = [f"10.0.0.{number}" for number in range(1, 1001)]


def started(node: int, *further: str, **variables: str) -> HostCommand:
    """Return the command of a host in a job of torchrun."""
    words = ("torchrun", "--master-addr=10.0.0.1", f"--node-rank={node}", "--log", f"logs/host-{node}", *further)
    return HostCommand(node=node, command=Command(host=HOSTS[node], argv=words, env={"THREADS": "8", **variables}))


def test_few_hosts_are_written_out_each():
    text = "\n".join(command_lines([started(node) for node in range(WRITTEN_OUT)]))
    assert all(f"--node-rank={node} --log logs/host-{node}" in text for node in range(WRITTEN_OUT))
    assert "as host" not in text


def test_a_thousand_hosts_are_a_few_lines_which_say_what_differs():
    lines = command_lines([started(node) for node in range(1000)])
    assert lines[-2:] == [
        "hosts 1 to 999: 10.0.0.2 ... 10.0.0.1000",
        "  as host 0, but for --node-rank=1 ... --node-rank=999, --log logs/host-1 ... logs/host-999; --json prints every command",
    ]
    assert len(lines) == 7


@pytest.mark.parametrize(
    "odd",
    [
        started(8, "--verbose"),
        started(8, THREADS="4"),
        # 8 is the number of this host, and the other hosts have another number at this place that is not theirs
        started(8, "--port=8"),
    ],
    ids=["a word more", "another variable", "another number"],
)
def test_a_host_whose_command_is_another_one_is_written_out(odd):
    others = [started(node, "--port=9") if "--port=8" in odd.words else started(node) for node in range(13)]
    lines = command_lines([*others[:8], odd, *others[9:]])
    # After the odd one with a number, host 9 has by chance what host 8 would have there; two alike hosts are no list.
    by_chance = ["host 9: 10.0.0.10", "host 10: 10.0.0.11", "hosts 11 to 12: 10.0.0.12 ... 10.0.0.13"]
    written_out = (
        by_chance if "--port=8" in odd.words else ["host 9: 10.0.0.10", "hosts 10 to 12: 10.0.0.11 ... 10.0.0.13"]
    )
    assert [line for line in lines if line.startswith("host")] == [
        "host 0: 10.0.0.1",
        "hosts 1 to 7: 10.0.0.2 ... 10.0.0.8",
        "host 8: 10.0.0.9",
        *written_out,
    ]


def test_an_address_that_begins_like_another_one_is_not_taken_for_it():
    one = HostCommand(node=0, command=Command(host="10.0.0.1", argv=("run", "10.0.0.12"), env={}))
    other = HostCommand(node=1, command=Command(host="10.0.0.2", argv=("run", "10.0.0.22"), env={}))
    assert not one.is_alike(other)
    same = HostCommand(node=1, command=Command(host="10.0.0.2", argv=("run", "10.0.0.12"), env={}))
    assert one.is_alike(same)
