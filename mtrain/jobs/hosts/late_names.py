"""Names of a job's hosts that become known late, for which the leader waits."""

import time
from collections.abc import Callable, Mapping, Sequence

from mtrain.jobs.hosts.channel import ask_all
from mtrain.jobs.hosts.hosts import Member
from mtrain.jobs.preflight.partners import EVERYBODY, partners
from mtrain.system import names, placement

ASK_S = 20.0
"""Seconds that an agent may take to look up names once."""
MOST_NOTED = 3
"""Most hosts whose missing names are told."""
AGAIN_S = 0.5
"""Seconds between two questions."""


def await_names(
    members: Mapping[int, Member],
    wanted: Sequence[str],
    *,
    timeout_s: float,
    note: Callable[[str], None],
    stop: Callable[[], bool],
) -> None:
    """Wait until every host in ``members`` knows the names among ``wanted``, or ``timeout_s`` seconds have passed.

    Names that stay unknown are findings of the preflight. ``note`` receives a sentence on what is missing after a few
    seconds; ``stop`` ends the waiting by returning True.
    """
    hosts = _names_for(members, [host for host in wanted if not placement.is_address(host)])
    began, told = time.monotonic(), False
    while any(hosts.values()) and not stop():
        missing = _missing(members, hosts, stop=stop)
        waited = time.monotonic() - began
        if not missing or waited > timeout_s:
            return
        if waited > names.NOTE_S and not told:
            told = True
            waits = [f"waiting until {names.in_words(each)} known on {label}" for label, each in missing.items()]
            more = [f"and {len(waits) - MOST_NOTED:,} other hosts wait for names"] if len(waits) > MOST_NOTED else []
            note("; ".join([*waits[:MOST_NOTED], *more]))
        time.sleep(AGAIN_S)


def _names_for(members: Mapping[int, Member], wanted: Sequence[str]) -> dict[int, list[str]]:
    """Return the names that each host must know: of a few hosts all ``wanted``, of many those of its partners."""
    if len(members) <= EVERYBODY:
        return {node: list(wanted) for node in members}
    hosts = [member.host for member in members.values()]
    named, others = set(wanted), sorted(set(wanted) - set(hosts))
    return {
        node: [hosts[each] for each in (place, *partners(place, len(hosts))) if hosts[each] in named] + others
        for place, node in enumerate(members)
    }


def _missing(
    members: Mapping[int, Member], hosts: Mapping[int, Sequence[str]], *, stop: Callable[[], bool]
) -> dict[str, list[str]]:
    """Return the names that a host does not know, by its label; a host that does not answer is left out."""
    channels = [member.channel for member in members.values()]
    each_asked = [{"hosts": list(hosts[node])} for node in members]
    answers = ask_all(channels, "resolve", timeout_s=ASK_S, stop=stop, each=each_asked)
    unknown = {
        member.label: [host for host, addresses in answer.get("addresses", {}).items() if not addresses]
        for member, answer in zip(members.values(), answers, strict=True)
    }
    return {label: each for label, each in unknown.items() if each}
