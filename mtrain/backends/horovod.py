"""Backend ``horovod``: many ranks with Horovod, over gloo or MPI on the CPU, and NCCL on CUDA if built with it."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from mtrain.backends._torch.backend import TorchBackend, TorchOptions
from mtrain.core.overriding import override
from mtrain.errors import LaunchError

if TYPE_CHECKING:
    from mtrain.backends._horovod.engine import HorovodEngine

NAMES_CACHED = 4096
"""Capacity of Horovod's response cache, in tensor names.

Ranks negotiate a cached tensor once instead of in every update. A detector has up to a thousand trained arrays.
"""


def check_own_name() -> None:
    """Refuse a host that knows no address for its own name: Horovod looks it up when ranks meet, and crashes without one.

    Raises:
        LaunchError: it knows none.
    """
    name = socket.gethostname()
    try:
        socket.getaddrinfo(name, None)
    except OSError as error:
        raise LaunchError(
            f"this host's own name, {name}, has no address ({error.strerror}), and Horovod needs one; add the line "
            f"`127.0.1.1 {name}` to /etc/hosts"
        ) from error


class Horovod(TorchBackend):
    """``core.interfaces.Backend`` over Horovod; started by horovodrun, or mpirun where Horovod was built with MPI."""

    class Options(TorchOptions):
        """Options of backend ``horovod``."""

        framework: Literal["torch", "tensorflow"] = Field(
            "torch",
            description="with tensorflow, `mtrain run` starts a script of Horovod's own form; a script that imports TensorFlow and "
            "not torch sets it",
        )
        compression: Literal["none", "fp16"] = Field(
            "none",
            description="how gradients are sent (Horovod 0.28 knows no bfloat16); fp16 rounds them and changes the bits of the "
            "weights",
        )
        fusion_mb: float = Field(
            25.0, ge=0, description="gradients are exchanged in groups of this size, and in eight of them at least"
        )
        timeline: Path | None = Field(
            None,
            description="file to which rank 0 writes when each gradient was negotiated and sent, for chrome://tracing; it changes "
            "no bit of the weights",
        )
        cycle_ms: float = Field(1.0, gt=0, description="how often Horovod looks for gradients that are ready")
        timeout_s: int = Field(600, ge=4, description="a collective that waits longer for a rank ends the job")
        silence_s: int = Field(
            60,
            ge=1,
            description="a host that is silent for longer ends the job; ranks wait as long for each other at the start",
        )

        @property
        def fusion_bytes(self) -> float:
            """Size of a group of gradients in bytes."""
            return self.fusion_mb * (1 << 20)

    rendezvous = "horovod"
    waits_asleep = False

    def __init__(self, options: Options) -> None:
        self.options = options
        self.framework = options.framework

    @override
    def __enter__(self) -> HorovodEngine:
        if self.framework != "torch":
            raise LaunchError(
                f"backend.options.framework: {self.framework} given, whose scripts train with Horovod themselves; use "
                "mtrain_tensorflow.keras in the place of mtrain.session, or take the framework torch"
            )
        from mtrain.backends._horovod import library
        from mtrain.backends._torch import device

        check_own_name()
        hvd = library.load()
        library.start(hvd, self._settings())
        from mtrain.backends._horovod.collective import HorovodCollective
        from mtrain.backends._horovod.engine import HorovodEngine

        collective = HorovodCollective()
        target = device.choose(
            self.options.device, local_rank=collective.local_rank, tf32=self.options.tf32, keep=self.options.keep_memory
        )
        engine = HorovodEngine(collective, target, options=self.options, check=self.check)
        engine.late_figures = self.options.late_figures
        return engine

    @override
    def __exit__(self, *error: object) -> None:
        import horovod.torch as hvd

        hvd.shutdown()

    @override
    def before_script(self) -> None:
        """Set Horovod's own variables for the options that are about waiting, and not about how mtrain sends gradients.

        A script that joins the ranks itself reads them. A variable that is set already is kept.
        """
        check_own_name()
        if self.framework == "torch":
            super().before_script()
        own = ("HOROVOD_FUSION_THRESHOLD", "HOROVOD_DISABLE_GROUP_FUSION", "HOROVOD_CACHE_CAPACITY")
        for name, value in self._settings().items():
            if name not in own:
                os.environ.setdefault(name, value)

    def _settings(self) -> dict[str, str]:
        """Return the environment variables that configure Horovod."""
        options = self.options
        traced = {} if options.timeline is None else {"HOROVOD_TIMELINE": str(options.timeline.absolute())}
        return traced | {
            # Each group is sent as one message, and Horovod must not fuse two groups into one.
            "HOROVOD_FUSION_THRESHOLD": str(int(options.fusion_bytes)),
            "HOROVOD_DISABLE_GROUP_FUSION": "1",
            "HOROVOD_CYCLE_TIME": str(options.cycle_ms),
            "HOROVOD_CACHE_CAPACITY": str(NAMES_CACHED),
            # Horovod looks for ranks that others wait for, and warns, once per interval, which must be shorter than the
            # timeout.
            "HOROVOD_STALL_CHECK_TIME_SECONDS": str(min(60, options.timeout_s // 4)),
            "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": str(options.timeout_s),
            "HOROVOD_GLOO_TIMEOUT_SECONDS": str(options.silence_s),
        }
