"""Between which hosts of a job the preflight tests names and connections: all of a few, enough of many."""

EVERYBODY = 32
"""Largest number of hosts of which every one tests every other."""


def partners(node: int, count: int) -> list[int]:
    """Return the hosts that host number ``node`` of ``count`` tests, in order; each of them tests it, too.

    Among many, these are the first host, at which all ranks meet, and those at a distance of 1, 2, 4, 8 and so on in the
    list in both directions, so that neighbours, groups of neighbours and far ones are among them. The first host tests all.
    """
    # Every host of a thousand testing every other is a million connections. What these tests find, a firewall, a wrong route
    # or name, shows from a few other hosts as well.
    if count <= EVERYBODY or node == 0:
        return [other for other in range(count) if other != node]
    steps = [1 << power for power in range((count - 1).bit_length())]
    chosen = {0, *((node + sign * step) % count for step in steps for sign in (-1, 1))}
    return sorted(chosen - {node})
