"""Base classes of backends on any framework: options of a rank's device, and the neutral modules of a framework.

Importing this module imports no framework.
"""

from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Literal, Protocol

from pydantic import Field

from mtrain.core.interfaces import Backend, PluginOptions, Recipe
from mtrain.core.overriding import override
from mtrain.errors import LaunchError
from mtrain.spec import collector, remedies
from mtrain.system.memory import keep_memory, return_memory

EXTRAS = {"torch": "ddp", "paddle": "fleet-cpu"}
"""Maps a framework to the extra of mtrain that installs it."""


class DeviceOptions(PluginOptions):
    """Options that every backend has: those of a rank's device."""

    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: CUDA where there is any")
    tf32: bool = Field(default=True, description="CUDA: fp32 convolutions and products in TensorFloat-32")
    late_figures: bool | Literal["auto"] = Field(
        "auto",
        description="read norm, losses and requests to end one update later, so that no update waits for its device; auto: "
        "on CUDA",
    )
    keep_memory: bool = Field(
        default=True, description="CPU: freed memory is kept for the next update; false: returned, slower (glibc)"
    )


DeviceName = Literal["auto", "cpu", "cuda"]


def uses_cuda(name: DeviceName, *, count: int, local_rank: int, keep: bool, framework: str, advice: str) -> bool:
    """Return whether a rank computes on CUDA; where it does not, freed memory is kept or returned, see ``system.memory``.

    Args:
        name: ``auto`` is CUDA where there is a device, else the CPU.
        count: CUDA devices that the framework sees.
        local_rank: Number of this rank on its host, which is the number of its CUDA device.
        keep: Keep freed memory for the next update.
        framework: Its name, for messages.
        advice: What to check where it sees no device.

    Raises:
        LaunchError: CUDA was requested and is not available, or has fewer devices than this host has ranks.
    """
    if name == "cuda" and not count:
        raise LaunchError(
            f"backend.options.device: 'cuda' was asked for, but {framework} sees no CUDA device; use 'cpu' or 'auto', or "
            f"check {advice}"
        )
    if not count:
        (keep_memory if keep else return_memory)()
    elif local_rank >= count:
        raise LaunchError(
            f"rank {local_rank} of this host has no CUDA device: there are {count}; "
            f"use --nproc-per-node {count} or backend.options.device: cpu"
        )
    return count > 0


class Check(Protocol):
    """A function that refuses a recipe, such as the method ``check`` of a backend."""

    def __call__(self, recipe: Recipe, *, size: int, on_cpu: bool) -> None:
        """See ``core.interfaces.Backend.check``."""
        ...


class EngineBackend(Backend):
    """A backend on one framework, whose session is an engine that its subclass makes in ``__enter__``."""

    def part(self, name: str) -> ModuleType:
        """Import module ``name`` from the folder of this backend's framework (``_torch`` or ``_paddle``).

        Raises:
            LaunchError: The framework is not installed.
        """
        if find_spec(self.framework) is None:
            raise LaunchError(
                f"{type(self).__name__.lower()} on {self.framework} was asked for, but {self.framework} is not installed "
                f"here; install it with: {remedies.install(EXTRAS[self.framework])}"
            )
        with collector.pause():
            return import_module(f"mtrain.backends._{self.framework}.{name}")

    @property
    @override
    def nn(self) -> ModuleType:
        return self.part("nn")

    @property
    @override
    def ops(self) -> ModuleType:
        return self.part("ops")


def tell_version(library: str, version: str, *, tested: Sequence[str]) -> list[dict[str, str]]:
    """Return what ``mtrain doctor`` says of a version that mtrain's tests have not seen; nothing of others.

    Args:
        library: Name of the library.
        version: The version that is installed.
        tested: Versions with which mtrain was tested; their last number does not count.
    """
    minor = version.split(".")[:2]
    if any(each.split(".")[:2] == minor for each in tested):
        return []
    remedy = "it trains; look at `mtrain compare` and docs/versions.md if its results seem wrong"
    text = f"{library} {version} was not tried with mtrain; {', '.join(tested)} were"
    return [{"state": "warning", "text": text, "remedy": remedy}]
