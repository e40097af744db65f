"""Exchange after an update, in one small vector, what the ranks must know of one another: requests, places and metrics.

All ranks reduce the vector by its mean, because metrics are means over ranks and one collective must do. A request counts
if any rank has it: two flags are digits of one number, so that their sums over ranks can be told apart. Checksums are sent as
bytes and their squares, which have no variance if and only if all ranks sent the same.
"""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mtrain.core.interfaces import Array, Collective, Why
from mtrain.errors import TrainingError


@dataclass(frozen=True, kw_only=True, slots=True)
class RankPlace:
    """The place of a rank in its training. All ranks must be at the same one, which a user's script can prevent."""

    update: int
    leaves: bool = False
    """This rank leaves the loop after the update."""
    order: int = 0
    """Checksum of the order of the epoch's samples."""
    names: tuple[str, ...] = ()
    """Names of the metrics of the update, in the order in which they are sent; empty where none are reported."""
    models: tuple[str, ...] = ()
    """Names of the models that were updated, where a job has several."""
    skips: tuple[str, ...] = ()
    """Names of the models whose update the script has left out; empty for that of an only one."""
    learning_rates: tuple[float, ...] = ()
    """Learning rates of the update, which a script may set from a value of its own rank."""
    momenta: tuple[float | None, ...] = ()
    """Momentum of each model in the update, which a scheduler may set as well."""

    def checksum(self) -> bytes:
        """Return four bytes that are equal at equal places."""
        own = (
            self.update,
            self.leaves,
            self.order,
            self.names,
            self.models,
            self.skips,
            self.learning_rates,
            self.momenta,
        )
        return zlib.crc32(repr(own).encode()).to_bytes(4, "big")


@dataclass(frozen=True, kw_only=True, slots=True)
class Requests:
    """The requests of one rank after an update, or what all ranks do because one of them asked for it."""

    stop: bool = False
    """End the job."""
    save: bool = False
    """Write a checkpoint because somebody outside asked for it."""
    save_due: bool = False
    """Write a checkpoint because the script or the clock of rank 0 says so."""
    epoch_ends: bool = False
    """The update was the last one of its epoch."""

    @property
    def why(self) -> Why | None:
        """Return why to save; None: there is no reason."""
        return "requested" if self.save else "due" if self.save_due else None

    def __or__(self, other: "Requests") -> "Requests":
        """Return the requests of either."""
        return Requests(
            stop=self.stop or other.stop,
            save=self.save or other.save,
            save_due=self.save_due or other.save_due,
            epoch_ends=self.epoch_ends or other.epoch_ends,
        )


NO_REQUESTS = Requests()
FLAG_BITS = 26
"""Bits of a digit that counts the ranks with a flag; two digits are exact in a float64."""
HEAD = 2 + 2 * 4
"""Numbers in front of the metrics: four flags in two numbers, and four bytes of a checksum with their squares."""


def head(requests: Requests, place: RankPlace) -> list[float]:
    """Return the first ``HEAD`` numbers that a rank sends."""
    high = float(1 << FLAG_BITS)
    flags = (requests.stop + requests.save * high, requests.save_due + requests.epoch_ends * high)
    own_bytes = place.checksum()
    return [*flags, *map(float, own_bytes), *(float(x * x) for x in own_bytes)]


def read_head(means: Array, *, size: int) -> Requests | None:
    """Return the requests of all ``size`` ranks from the means of what they sent; None: they are not at the same place."""
    numbers = means[:HEAD].tolist()  # arithmetic with so few numbers is faster without numpy
    # One rank of n that differs by 1 makes a variance of at least 1 / (2 n), and means of such small integers are exact
    # to 1e-11.
    if any(square - byte * byte > 0.25 / size for byte, square in zip(numbers[2:6], numbers[6:], strict=True)):
        return None
    (save, stop), (epoch_ends, save_due) = (divmod(round(mean * size), 1 << FLAG_BITS) for mean in numbers[:2])
    return Requests(stop=stop > 0, save=save > 0, save_due=save_due > 0, epoch_ends=epoch_ends > 0)


class RanksDisagree(TrainingError):
    """The ranks are at different places after an update; raised on every rank."""

    def __init__(self, places: Sequence[RankPlace]) -> None:
        """``places``: those of the ranks, by rank."""
        super().__init__(f"the ranks are at different places after an update: {', '.join(map(str, places))}")
        self.places = places


class Agreement:
    """One agreement per update. Every rank makes one, and calls its methods equally often.

    The length of a vector must be equal on all ranks, so metrics are part of it from the update on after which all ranks
    have agreed on their names; for new names there is a second vector once.
    """

    def __init__(self, collective: Collective) -> None:
        self._collective = collective
        self._names: tuple[str, ...] | None = None

    def agree(self, requests: Requests, place: RankPlace, metrics: Sequence[float]) -> tuple[Requests, list[float]]:
        """Exchange requests, place and metrics.

        Args:
            requests: Those of this rank.
            place: That of this rank.
            metrics: One for each of ``place.names`` and one more; empty: none are reported after this update.

        Returns:
            The requests of all ranks, and the means of the metrics.

        Raises:
            RanksDisagree: The ranks are at different places.
        """
        if self._collective.size == 1:
            return requests, list(metrics)
        is_known = place.names == self._names
        length = len(self._names) + 1 if metrics and self._names is not None else 0
        tail = metrics if is_known else [0.0] * length
        first = head(requests, place)
        means = self._collective.all_reduce(np.array([*first, *tail]), "mean")
        agreed = self.read_requests(means, place)
        if metrics and not is_known:
            self._names = place.names
            # The whole vector again: a job that begins again here must record the bits of one that does not.
            means = self._collective.all_reduce(np.array([*first, *metrics]), "mean")
        return agreed, means[HEAD:].tolist()

    def read_requests(self, means: Array, place: RankPlace) -> Requests:
        """Return the requests in the means of all ranks' vectors.

        Raises:
            RanksDisagree: The ranks are at different places.
        """
        agreed = read_head(means, size=self._collective.size)
        if agreed is None:
            raise RanksDisagree(self._collective.all_gather(place))
        return agreed
