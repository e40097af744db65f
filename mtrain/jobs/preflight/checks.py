"""Preflight of a job on several hosts: find what would keep it from running, before any rank is started.

``preflight`` asks all agents at once for the facts that ``requirements`` lists, lets the hosts connect to one another
(many hosts: to some others, ``partners.py``), and compares the answers (``comparison.py``). What most hosts have is the
reference, that of the first host where there is no majority: a finding about a difference names the odd host.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from mtrain.jobs.hosts.channel import Channel, ask_all
from mtrain.jobs.hosts.messages import Message
from mtrain.jobs.preflight.comparison import HostFacts, compare
from mtrain.jobs.preflight.findings import Finding, merge_findings
from mtrain.jobs.preflight.partners import partners
from mtrain.jobs.preflight.requirements import requirements

__all__ = ["preflight", "requirements"]

ASK_S = 20.0
"""Seconds for one round of questions. The answers take far less unless a host is in trouble."""


def preflight(
    channels: Sequence[Channel | None],
    required: Sequence[Mapping[str, Any]],
    *,
    earlier: Sequence[Finding] = (),
    now: Callable[[], float] = time.time,
) -> list[Finding]:
    """Check all hosts at once. Nothing is started except listeners for the test of reachability, which agents close.

    Args:
        channels: one to the agent of each host; None for a host that was not reached.
        required: the requirements for each host, see ``requirements``.
        earlier: findings from before, for example why a host was not reached; they come first in the result.
        now: this machine's wall clock.
    """
    reached = {index: channel for index, channel in enumerate(channels) if channel is not None}
    questions = [{"wanted": dict(required[index])} for index in reached]
    answers = ask_all(list(reached.values()), "facts", timeout_s=ASK_S, each=questions)
    findings = list(earlier)
    hosts, host_channels = [], []
    for (index, channel), answer in zip(reached.items(), answers, strict=True):
        if "error" in answer:
            findings.append(_no_answer(str(required[index]["address"]), str(answer["error"])))
        else:
            hosts.append(HostFacts(index=index, required=required[index], facts=answer["facts"]))
            host_channels.append(channel)
    # It sets the clocks of the hosts, which are compared with the facts.
    between = _between(hosts, host_channels, now)
    compared = [*compare(hosts), *between]
    if len(hosts) < len(required):  # Without names, "ok" would be claimed for the hosts that did not answer, too.
        addresses = tuple(host.address for host in hosts)
        compared = [finding if finding.hosts else replace(finding, hosts=addresses) for finding in compared]
    return merge_findings([*findings, *compared])


def _no_answer(address: str, reason: str) -> Finding:
    remedy = "look at that host, then start again"
    return Finding(
        check="agent", state="bad", hosts=(address,), text=f"tells nothing of itself: {reason}", remedy=remedy
    )


# -------------------------------------------------------------------------------------------------------- between hosts
def _between(hosts: Sequence[HostFacts], channels: Sequence[Channel], now: Callable[[], float]) -> list[Finding]:
    """Test whether every host reaches every other, and set each host's ``skew_s`` from the clocks in the answers."""
    asked_at = now()
    listening = [{"address": host.meeting_address or host.address} for host in hosts]
    answers = ask_all(channels, "listen", timeout_s=ASK_S, each=listening)
    answered_at = now()
    listeners: dict[int, Message] = {}
    for host, answer in zip(hosts, answers, strict=True):
        if "clock" in answer:
            # The host read its clock at an unknown moment between the two, which bounds the difference from both sides.
            host.skew_s = (answer["clock"] - answered_at, answer["clock"] - asked_at)
        if "port" in answer and host.meeting_address is not None:
            listeners[host.index] = {"address": host.meeting_address, "port": answer["port"], "word": answer["word"]}
    targets = [
        [hosts[place] for place in partners(own, len(hosts)) if hosts[place].index in listeners]
        for own in range(len(hosts))
    ]
    questions = [
        {"targets": [listeners[other.index] for other in others], "source": host.meeting_address}
        for host, others in zip(hosts, targets, strict=True)
    ]
    answers = ask_all(channels, "connect", timeout_s=ASK_S, each=questions)
    findings = []
    for host, others, answer in zip(hosts, targets, answers, strict=True):
        problems = answer.get("reached", [answer.get("error")] * len(others))
        findings += [
            _explain_unreached(host, other, problem) for other, problem in zip(others, problems, strict=True) if problem
        ]
    ways = sum(map(len, targets))
    if ways and not findings:
        which = "all" if ways == len(hosts) * (len(hosts) - 1) else "a choice of"
        text = f"{which} {ways:,} ways between {len(hosts):,} hosts, over TCP"
        findings = [Finding(check="reach", state="ok", text=text)]
    return findings


def _explain_unreached(source: HostFacts, target: HostFacts, problem: str) -> Finding:
    return Finding(
        check="reach",
        state="bad",
        hosts=(source.label,),
        text=f"does not reach {target.label} over TCP: {problem}",
        remedy=(
            "let firewalls pass all TCP between the hosts, mend the route, or name addresses of another network in "
            "cluster.ips"
        ),
    )
