"""Resolve the names of hosts that become known late, such as those of the pods of a headless service."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence

from mtrain.errors import UsageError
from mtrain.spec.hostnames import few
from mtrain.system import placement

AGAIN_S = 0.5
"""Seconds between two look-ups of a name."""
NOTE_S = 3.0
"""Seconds of waiting before the user is told which names are missing."""
FIRST_ROUND_S = 3.0
"""Seconds that the first look-up of every name may take before the names that are known count."""
POLL_S = 0.02
Found = Mapping[str, Sequence[str]]
"""Name -> addresses; empty: not known yet."""


def resolve(
    hosts: Sequence[str],
    *,
    limit_s: float,
    enough: Callable[[Found], bool] = lambda found: all(found.values()),
    late: Callable[[list[str]], None] = lambda missing: None,
    resolver: Callable[[str], Sequence[str]] | None = None,
) -> dict[str, list[str]]:
    """Look up names again and again until each has an address, or ``limit_s`` seconds have passed.

    Each name is looked up in a thread of its own because, where no name server answers, one look-up takes up to half a
    minute and cannot be stopped.

    Args:
        hosts: names and IP addresses.
        limit_s: seconds after which names without an address are given up.
        enough: whether these addresses are enough, once every name was looked up.
        late: called once, with the names that are still missing after a few seconds.
        resolver: looks up one name; None: the system.

    Returns:
        The addresses of each host; empty: it was not resolved.
    """
    look_up_one = resolver or placement.resolve
    found: dict[str, list[str]] = {host: [host] if placement.is_address(host) else [] for host in hosts}
    tried = {host for host in found if found[host]}
    given_up = threading.Event()

    def keep_looking(host: str) -> None:
        while not given_up.is_set():
            found[host] = list(look_up_one(host))
            tried.add(host)
            if found[host]:
                return
            given_up.wait(AGAIN_S)

    for host in found:
        if host not in tried:
            threading.Thread(target=keep_looking, args=(host,), daemon=True).start()
    began = time.monotonic()
    told = False
    while (waited := time.monotonic() - began) < limit_s:
        if (len(tried) == len(found) or waited > FIRST_ROUND_S) and enough(found):
            break
        if waited > NOTE_S and not told:
            told = True
            late([host for host in found if not found[host]])
        time.sleep(POLL_S)
    given_up.set()
    return {host: list(addresses) for host, addresses in found.items()}


def look_up(hosts: Sequence[str], *, limit_s: float) -> dict[str, list[str]]:
    """Return the addresses of each host, looked up once; empty: it has none, or none within ``limit_s`` seconds."""
    return resolve(hosts, limit_s=limit_s, enough=lambda found: True)


def find_node_rank(
    ips: Sequence[str],
    addresses: Sequence[tuple[str, str]],
    *,
    timeout_s: float,
    note: Callable[[str], None],
    resolver: Callable[[str], Sequence[str]] | None = None,
) -> int:
    """Return the index of this machine in ``ips``; names that are not known yet are looked up again.

    ``addresses``: (interface, address) of this machine. ``note`` receives a sentence on names that are missing.

    Raises:
        UsageError: none or several of ``ips`` are addresses of this machine, or that is not known after ``timeout_s``.
    """
    mine = {address for _, address in addresses}

    def is_decided(found: Found) -> bool:
        return all(found.values()) or any(mine.intersection(each) for each in found.values())

    found = resolve(
        ips,
        limit_s=timeout_s,
        enough=is_decided,
        late=lambda missing: note(f"waiting until {in_words(missing)} known here, to find which of the hosts this is"),
        resolver=resolver,
    )
    if not is_decided(found):
        raise UsageError(
            f"{never([host for host in ips if not found[host]], timeout_s)}, so it is not known which of the hosts "
            f"{', '.join(ips)} this is; correct --ips, enter the names into /etc/hosts, or say which one this is with "
            "--node-rank N"
        )
    return placement.find_node_rank(ips, addresses, resolver=lambda host: found[host])


def in_words(missing: Sequence[str]) -> str:
    """Return ``the name a is`` or ``the names a, b are``, for a sentence."""
    return f"the name{'s' if len(missing) > 1 else ''} {few(missing)} {'are' if len(missing) > 1 else 'is'}"


def never(missing: Sequence[str], waited_s: float) -> str:
    """Return that names were not resolved, for a message."""
    names = f"the name{'s' if len(missing) > 1 else ''} {few(missing)}"
    return f"{names} did not resolve to an address within {waited_s:.0f} s"
