"""Which hosts may take part in a job that is started by hand: decided from a hello and what the first host knows.

Every hello contains the whole spec, the hosts in order and the version of mtrain. A host that would train something else is
refused, and both hosts print the first difference. A caller is taken for a host of the job only if it calls from that host's
address or has proved the secret of the cluster. Every other caller is refused, learns nothing about the job, and does not
end it.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import mtrain
from mtrain.jobs.hosts.connections import printable
from mtrain.jobs.hosts.handshake import HANDSHAKE_EVENT, REMEDY
from mtrain.jobs.hosts.messages import Message
from mtrain.system.job_secret import CLUSTER_VARIABLE

MAX_REASON = 2000
"""Most characters shown of the reason for which another first host refuses this one."""
OWN_KEYS = ("cluster.node_rank", "report.display")
"""Keys of the spec whose values may differ between hosts."""


@dataclass(frozen=True, kw_only=True)
class Party:
    """One host's view of the job; only ``node`` differs between hosts."""

    hosts: Sequence[str]
    """Addresses, the first host's first."""
    node: int
    """Index of this host in ``hosts``."""
    port: int
    """``cluster.control_port``."""
    mode: str
    """The command: "train", "evaluate" ..."""
    values: Mapping[str, Any]
    """The whole spec as plain values."""
    line: Callable[[int], str]
    """Returns the command to type on a host, for its index."""
    secret: str = ""
    """The secret that hosts prove to each other; empty: a caller's address is enough."""

    def job(self) -> dict[str, Any]:
        """Return the description of the job that goes into the hello, where the first host compares it with its own."""
        return {"node": self.node, "hosts": list(self.hosts), "mode": self.mode, "spec": _flat(self.values)}

    @property
    def first(self) -> str:
        """Return the address of the first host, where the hosts meet."""
        return self.hosts[0]


@dataclass(frozen=True, kw_only=True, slots=True)
class Knowledge:
    """What the first host knows when a hello arrives."""

    party: Party
    wanted: Collection[int]
    """The hosts for which it waits."""
    taken: Callable[[int], str | None]
    """Returns the label of a host that is connected; None: it is not."""
    parting: Collection[int] = ()
    """Hosts that were asked to end, and whose ranks may still save."""
    complete: bool = False
    """Whether all hosts have been here. From then on, no host that comes can end the job."""
    has_address: Callable[[str, str], bool]
    """Whether a host of the job has an address."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """What becomes of a caller. One that is neither accepted nor refused is cut off without a word."""

    accepted: int | None = None
    """The index that it has in the list of hosts."""
    refusal: str = ""
    """The reason that it is told."""
    note: str = ""
    """A sentence that is shown on the first host."""
    ends_job: str = ""
    """Why the whole job ends here."""


def admit(known: Knowledge, message: Message, *, address: str, called: bool) -> Decision:
    """Decide on a caller from its first message.

    A host that belongs to this job but disagrees with it ends the whole job, unless training has started.

    Args:
        known: what the first host knows.
        message: what the caller has sent, which nobody has checked.
        address: where it calls from.
        called: whether the first host itself has opened the connection, because the host there may lead the same job.
    """
    if message.get("do") == "bye" and called:  # another first host, which refuses this one
        return Decision(ends_job=printable(message.get("refusal", message.get("text", "")), MAX_REASON))
    if message.get("event") == HANDSHAKE_EVENT:
        return Decision(note=f"a host with a {CLUSTER_VARIABLE} asked to take part; this one has none: {REMEDY}")
    job = message.get("job")
    if message.get("event") != "hello" or not is_job(job):
        return Decision()
    node, own = job["node"], claimed_host(job)
    # Before anything of the job is compared: a stranger that sends descriptions of jobs must not learn this one by trial.
    if not _is_host(known, own, address):
        return _impostor(known.party, printable(own), address)
    if node in known.parting:  # Typed again before the former command there has ended: it tries again.
        return Decision()
    problem = _problem(known, message, job)
    if problem is not None:
        label = f"{own} ({printable(message.get('host'))})"
        text = f"host {label} does not fit this job: {problem}; give the same command on every host"
        # A host with index 0 may belong to another job whose list has the same first host, and must not end this one.
        of_this_job = node != 0 or sorted(job["hosts"]) == sorted(known.party.hosts)
        return Decision(refusal=text, ends_job=text if of_this_job and not known.complete else "")
    return Decision(accepted=node) if node in known.wanted else Decision()


def _is_host(known: Knowledge, host: str, address: str) -> bool:
    """Return whether a caller is taken for ``host``: it knows the secret, or calls from that host's address."""
    if host not in known.party.hosts:
        return False
    return bool(known.party.secret) or known.has_address(host, address)


def _problem(known: Knowledge, message: Message, job: Mapping[str, Any]) -> str | None:
    """Return why a host of this job cannot have the index that it asks for, or None."""
    mismatch = difference(known.party.job(), job, version=str(message.get("version")))
    node = job["node"]
    if mismatch is None and node == 0:
        return "--node-rank: it has 0, which this host has, too"
    if mismatch is None and (label := known.taken(node)) is not None:
        return f"--node-rank: it has {node}, which {label} has, too"
    return mismatch


def _impostor(party: Party, own: str, address: str) -> Decision:
    """Refuse a caller that is not taken for host ``own``, which it says it is; it learns nothing about the job."""
    remedy = f"give the same --ips on every host, or set the same {CLUSTER_VARIABLE} on all of them"
    why = f"it is not the address of that host; {remedy}" if own in party.hosts else "no such host is in --ips"
    return Decision(
        refusal=f"the first host does not take {address}, where this call comes from, for host {own} of its job; {remedy}",
        note=f"{address} asked to take part as host {own}, and was refused: {why}",
    )


def difference(mine: Mapping[str, Any], theirs: Mapping[str, Any], *, version: str) -> str | None:
    """Return the first difference between two descriptions of a job, in words; None: there is none.

    ``mine`` is that of the first host, ``theirs`` and ``version`` are those of the host that calls.
    """
    if version != mtrain.__version__:
        return f"it has mtrain {version}, the first host {mtrain.__version__}"
    for key, flag in (("hosts", "--ips"), ("mode", "the command")):
        if mine[key] != theirs.get(key):
            return f"{flag}: it has {_display(theirs.get(key))}, the first host {_display(mine[key])}"
    here, there = mine["spec"], theirs.get("spec") or {}
    for key in [*here, *(key for key in there if key not in here)]:
        if key not in OWN_KEYS and here.get(key, _ABSENT) != there.get(key, _ABSENT):
            return f"{key}: it has {_display(there.get(key))}, the first host {_display(here.get(key))}"
    return None


def is_job(job: Any) -> TypeGuard[dict[str, Any]]:
    """Return whether an untrusted value has the form that ``Party.job`` returns."""
    # ``bool`` is an ``int`` for ``isinstance``, and True would be the index 1.
    return (
        isinstance(job, dict)
        and type(job.get("node")) is int
        and isinstance(job.get("spec"), dict)
        and isinstance(job.get("hosts"), list)
        and all(isinstance(host, str) for host in job["hosts"])
    )


def claimed_host(job: Mapping[str, Any]) -> str:
    """Return the host of its list that the sender of a hello claims to be."""
    hosts, node = job["hosts"], job["node"]
    return str(hosts[node]) if 0 <= node < len(hosts) else "?"


_ABSENT = object()


def _display(value: Any) -> str:
    text = ",".join(map(str, value)) if isinstance(value, list) else repr(value)
    return printable(text, MAX_REASON)


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested ``values`` as one mapping: dotted path -> value."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        path = f"{prefix}{key}"
        flat |= _flat(value, f"{path}.") if isinstance(value, Mapping) and value else {path: value}
    return flat
