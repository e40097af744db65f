"""The requirements on each host that comes to an elastic job, from as few plans of the whole job as possible."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mtrain.errors import MtrainError
from mtrain.jobs.hosts.hosts import Member

# The requirements on a host follow from a plan of the whole job, and hundreds of hosts may come back together. A plan of
# all hosts for each of them would be the square of their number, so hosts that are alike share one.
Required = Mapping[str, Any]
"""The requirements on one host, as ``preflight.requirements`` returns them."""


REFUSAL_S = 5.0
"""Seconds for which no other plan is tried where there is none: a host that does not answer, or a name that is not known, may be
the reason, and both may pass."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Refusal:
    """Why there is no plan, and until when that counts."""

    error: MtrainError
    until: float


@dataclass(kw_only=True)
class ExpectedHosts:
    """Knows the requirements on each host of the job; threads may ask."""

    required: Callable[[Mapping[int, Member], Member], Sequence[Required]]
    """Makes a plan of all hosts from those that take part and one that has come; returns the requirements on each. Hosts that
    are missing are taken to be like the one that has come."""
    address_of: Callable[[Member], str] = lambda member: member.host
    """Returns the address by which ranks know a host, which the plan of another does not know; raises ``MtrainError`` where
    nobody knows it."""
    clock: Callable[[], float] = time.monotonic
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _taking_part: frozenset[int] = frozenset()
    """The hosts that took part when ``_known`` was found."""
    _known: dict[Any, Sequence[Required] | _Refusal] = field(default_factory=dict)
    """By what a plan uses of a host: the requirements on all, or why there is no plan."""

    def of(self, member: Member, *, among: Mapping[int, Member]) -> Required:
        """Return the requirements on a host that has come to those that take part.

        Raises:
            MtrainError: there is no plan with this host.
        """
        address = self.address_of(member)
        members = dict(among)
        with self._lock:  # Those that come together wait for the one plan that all of them need.
            if self._taking_part != members.keys():
                self._taking_part = frozenset(members)
                self._known.clear()
            kind = _what_a_plan_uses(member)
            known = self._known.get(kind)
            if known is None or (isinstance(known, _Refusal) and self.clock() >= known.until):
                known = self._known[kind] = self._require(members, member)
        if isinstance(known, _Refusal):
            raise known.error
        here = {member.host, *(each.host for each in members.values())}
        required = known[member.node]
        # Names of hosts that are not there may mean nothing at present, and the host would wait for them.
        names = [name for name in required["names"] if name in here]
        return {**required, "address": address, "names": list(dict.fromkeys([*names, address]))}

    def _require(self, members: Mapping[int, Member], member: Member) -> Sequence[Required] | _Refusal:
        try:
            return self.required(members, member)
        except MtrainError as error:
            return _Refusal(error=error, until=self.clock() + REFUSAL_S)


def _what_a_plan_uses(member: Member) -> Any:
    """Return what a plan of all hosts uses of what one of them has told, beside its addresses."""
    return int(member.hello["devices"]), bool(member.hello["hidden"])
