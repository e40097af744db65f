"""The devices of a job: which ones its plan may use, and how they are described to people.

Nothing here looks at hardware or imports a framework: the number of GPUs of a machine is a parameter.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from mtrain.errors import SpecError

CPU = "cpu"
CUDA = "cuda"
HIDING = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True, kw_only=True, slots=True)
class Devices:
    """The devices on which the ranks of each host compute."""

    option: str
    """Value of ``backend.options.device``: "cpu", "cuda" or "auto"."""
    numbers: Sequence[int] | None
    """Device numbers from ``cluster.devices``; None: all devices of a host."""
    present: Sequence[int] | None
    """Number of GPUs of each host; None: the hosts have not been asked yet."""
    hidden: bool = False
    """Whether the environment of this machine hides all its GPUs."""

    @property
    def visible(self) -> tuple[int, ...] | None:
        """Device numbers that ranks may see; () for the CPU alone, None for all devices of a host."""
        if self.option == CPU or (self.hidden and self.numbers is None):
            return ()
        return None if self.numbers is None else tuple(self.numbers)

    @property
    def on_cpu(self) -> bool:
        """True if it is certain that ranks compute on the CPU."""
        return self.visible == () or (self.present is not None and not any(self.present))

    def check(self) -> None:
        """Refuse a job on one host that requests a GPU which the host does not have.

        On several hosts, preflight checks each of them.

        Raises:
            SpecError: a GPU is requested that does not exist.
        """
        if self.present is None or len(self.present) != 1 or self.option == CPU:
            return
        count = self.present[0]
        if self.numbers and max(self.numbers) >= count:
            raise SpecError(
                f"cluster.devices: {list(self.numbers)} given, but {self._there(count)}; "
                f"{'give their numbers, or ' if count else ''}train on the CPU with --devices cpu"
            )
        if self.option == CUDA and not count:
            raise SpecError(
                f"backend.options.device: 'cuda' given, but {self._there(count)}; train on the CPU with --devices cpu"
            )

    def _there(self, count: int) -> str:
        """Describe the GPUs of this host, for an error message."""
        if count:
            return f"this host has {_gpus(range(count), ' and ')}"
        return f"{HIDING} hides all GPUs of this host" if self.hidden else "no GPU was found on this host"

    def words(self) -> str:
        """Describe the devices for the text of a plan, for example ``GPU 0, 1``."""
        if self.option == CPU or self.numbers == []:
            return "CPU"
        if self.numbers:
            return _gpus(self.numbers, ", ") + ("" if self._one_host else " of each host")
        if self.hidden and self._one_host:
            return f"CPU: {HIDING} hides all GPUs"
        if self.present is None:
            return "the GPUs of each host" + ("" if self.option == CUDA else ", or its CPU")
        if not any(self.present):
            return "CPU: no GPU was found"
        if self._one_host:
            return _gpus(range(self.present[0]), ", ")
        return "GPUs of each host: " + ", ".join(map(str, self.present))

    @property
    def _one_host(self) -> bool:
        return self.present is not None and len(self.present) == 1


def _gpus(numbers: Sequence[int], between: str) -> str:
    return "GPU " + between.join(map(str, numbers))


def device_words(devices: Sequence[str]) -> str:
    """Summarise the devices of all ranks, for example ``cpu`` or ``4 x cuda (NVIDIA H100 80GB HBM3)``.

    ``devices`` holds the device of each rank as ``RankSession.device`` names it (``cuda:1 (NVIDIA H100 80GB HBM3)``).
    """
    kinds: dict[str, int] = {}
    for device in devices:
        place, blank, model = device.partition(" ")
        kind = place.partition(":")[0] + blank + model
        kinds[kind] = kinds.get(kind, 0) + 1
    return ", ".join(kind if kind == CPU else f"{count} x {kind}" for kind, count in kinds.items())
