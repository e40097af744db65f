"""Preflight of a job on several hosts: what keeps it from starting, or from being one job, before any rank is there.

``preflight`` asks all agents at once what ``wanted`` says that each host must have, lets the hosts connect to one another, and
compares what they say (``judging``). The first host is the measure: what another one has differently is told of that one.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from mtrain.cluster.channel import Channel, Message, ask_all
from mtrain.cluster.preflight.comparison import Seen, judged
from mtrain.cluster.preflight.findings import Finding
from mtrain.cluster.preflight.folder_listing import first_difference
from mtrain.cluster.preflight.requirements import wanted

__all__ = ["preflight", "wanted"]

ASK_S = 20.0
"""For one round of questions; none takes as long unless a host is in trouble."""


def preflight(
    channels: Sequence[Channel | None],
    wanted: Sequence[Mapping[str, Any]],
    *,
    known: Sequence[Finding] = (),
    now: Callable[[], float] = time.time,
) -> list[Finding]:
    """Look at all hosts at once. Nothing is started; nothing is left behind but listeners, which agents close.

    Args:
        channels: to the agent of each host; None for one that was not reached.
        wanted: what each must have: the value of the function of that name.
        known: what was found before, for example why a host was not reached; it stands in front.
        now: this machine's wall clock.
    """
    there = {index: channel for index, channel in enumerate(channels) if channel is not None}
    questions = [{"wanted": dict(wanted[index])} for index in there]
    answers = ask_all(list(there.values()), "facts", timeout_s=ASK_S, each=questions)
    findings = list(known)
    seen, heard = [], []
    for (index, channel), answer in zip(there.items(), answers, strict=True):
        if "error" in answer:
            findings.append(_silent(str(wanted[index]["address"]), str(answer["error"])))
        else:
            seen.append(Seen(index=index, wanted=wanted[index], facts=answer["facts"]))
            heard.append(channel)
    between = _between(seen, heard, now)
    _compare_data(seen, heard)
    compared = [*judged(seen), *between]
    if len(seen) < len(wanted):  # what is well is so on those that answered
        heard_of = tuple(host.address for host in seen)
        compared = [finding if finding.hosts else replace(finding, hosts=heard_of) for finding in compared]
    return [*findings, *compared]


def _silent(address: str, reason: str) -> Finding:
    remedy = "look at that host, then start again"
    return Finding(
        check="agent", state="bad", hosts=(address,), text=f"tells nothing of itself: {reason}", remedy=remedy
    )


# --------------------------------------------------------------------------------------------------------- between hosts
def _between(seen: Sequence[Seen], channels: Sequence[Channel], now: Callable[[], float]) -> list[Finding]:
    """Both-way reachability of every pair. The answers tell the time as well."""
    sent = now()
    listening = [{"address": host.meeting_address or host.address} for host in seen]
    answers = ask_all(channels, "listen", timeout_s=ASK_S, each=listening)
    back = now()
    places: dict[int, Message] = {}
    for host, answer in zip(seen, answers, strict=True):
        if "clock" in answer:
            host.skew_s = (answer["clock"] - back, answer["clock"] - sent)
        if "port" in answer and host.meeting_address is not None:
            places[host.index] = {"address": host.meeting_address, "port": answer["port"], "word": answer["word"]}
    targets = [[other for other in seen if other is not host and other.index in places] for host in seen]
    questions = [
        {"targets": [places[other.index] for other in others], "source": host.meeting_address}
        for host, others in zip(seen, targets, strict=True)
    ]
    answers = ask_all(channels, "connect", timeout_s=ASK_S, each=questions)
    findings = []
    for host, others, answer in zip(seen, targets, answers, strict=True):
        reached = answer.get("reached", [answer.get("error")] * len(others))
        findings += [
            _unreached(host, other, problem) for other, problem in zip(others, reached, strict=True) if problem
        ]
    ways = sum(map(len, targets))
    if ways and not findings:
        findings = [Finding(check="reach", state="ok", text=f"all {ways} ways between {len(seen)} hosts, over TCP")]
    return findings


def _unreached(source: Seen, target: Seen, problem: str) -> Finding:
    return Finding(
        check="reach",
        state="bad",
        hosts=(source.label,),
        text=f"does not reach {target.label} over TCP: {problem}",
        remedy="let firewalls pass all TCP between the hosts, mend the route, or name addresses of another network in cluster.ips",
    )


# ------------------------------------------------------------------------------------------------------------------ data
def _compare_data(seen: Sequence[Seen], channels: Sequence[Channel]) -> None:
    """Find the first file in which the data of a host differs from the first host's: one more question to both."""
    listed = [host for host in seen if (host.facts["data"] or {}).get("complete")]
    for host in listed[1:]:
        bucket = _first_bucket(listed[0].facts["data"]["digests"], host.facts["data"]["digests"])
        if bucket is None:
            continue
        both = [channels[seen.index(each)] for each in (listed[0], host)]
        expected, given = (answer.get("files", []) for answer in ask_all(both, "files", timeout_s=ASK_S, bucket=bucket))
        difference = first_difference([tuple(each) for each in expected], [tuple(each) for each in given])
        if difference is not None:
            host.first_difference = _in_words(*difference)


def _first_bucket(one: Sequence[str], other: Sequence[str]) -> int | None:
    return next((number for number, pair in enumerate(zip(one, other, strict=True)) if pair[0] != pair[1]), None)


def _in_words(name: str, expected: int | None, given: int | None) -> str:
    if given == -1:
        return f"{name} is missing"
    if expected == -1:
        return f"{name} is one too many"
    return f"{name} has {given} bytes, expected {expected}"
