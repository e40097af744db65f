"""A plan of many hosts writes out the commands of some."""

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
    assert "--json" not in text


def test_of_a_thousand_hosts_the_first_two_and_the_last_are_written_out():
    lines = command_lines([started(node) for node in range(1000)])
    assert [line for line in lines if line.startswith("host")] == [
        "host 0: 10.0.0.1",
        "host 1: 10.0.0.2",
        "hosts 2 to 998: 10.0.0.3 ... 10.0.0.999; --json prints every command",
        "host 999: 10.0.0.1000",
    ]
    assert any("--node-rank=999 --log logs/host-999" in line for line in lines)
