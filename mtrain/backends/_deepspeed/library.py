"""DeepSpeed itself: found or refused, silenced, started on torch's process group, ended."""

import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from pydantic import ValidationError

from mtrain.errors import PluginError, SpecError
from mtrain.spec import remedies

CHOICE = "DS_ACCELERATOR"
"""The variable from which DeepSpeed learns its device, at import and from nowhere else."""


def load(device: str) -> ModuleType:
    """``deepspeed`` for the device type ``device`` ("cpu", "cuda"), with its log at errors only.

    Raises:
        PluginError: it is missing or cannot be imported.
    """
    if find_spec("deepspeed") is None:
        raise PluginError(
            f"backend deepspeed: DeepSpeed is not installed here; install it with: {remedies.install('deepspeed')}"
        )
    with _chosen(device), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _silence()
        try:
            import deepspeed
        except (ImportError, OSError, RuntimeError) as error:
            raise PluginError(
                f"backend deepspeed: DeepSpeed cannot be imported ({error}); install the version that fits with: "
                f"{remedies.install('deepspeed')}"
            ) from error
    _silence()
    module: ModuleType = deepspeed
    return module


def start(*, backend: str, timeout: timedelta) -> None:
    """Let DeepSpeed talk over torch's default process group, which must be there."""
    import deepspeed
    from deepspeed import comm
    from deepspeed.runtime.zero import parameter_offload

    # On CPU it would compile an operator for inference, for minutes, at the first start on each machine.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

    # In stage 3 it looks for weights among what a layer returns, with vars(), which dataclasses with slots refuse.
    vars(parameter_offload)["vars"] = attributes
    # DeepSpeed calls torch's collectives by their old names.
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    comm.init_distributed(dist_backend=backend, timeout=timeout, auto_mpi_discovery=False, verbose=False)


def check(config: dict[str, Any]) -> None:
    """Refuse what DeepSpeed cannot read.

    Raises:
        SpecError: a value of ``config`` has the wrong type, or is none of those that there are.
    """
    import deepspeed

    try:
        deepspeed.DeepSpeedConfig(config)
    except Exception as error:  # it computes with some values before it has looked at them
        told = "; ".join(
            f"{'.'.join(map(str, one['loc']))}: {one['msg']}"
            for one in (error.errors() if isinstance(error, ValidationError) else ())
        )
        raise SpecError(
            f"backend.options.config: DeepSpeed refuses a value: {told or error}; give what its documentation of the JSON says"
        ) from error


def stop() -> None:
    """Make DeepSpeed forget all process groups, so that the next job of this process starts anew."""
    if "deepspeed" not in sys.modules:
        return
    from deepspeed.comm import comm
    from deepspeed.runtime.zero import parameter_offload
    from deepspeed.utils import groups

    groups._release_process_group_references()
    comm.cdb = None
    parameter_offload.FWD_MODULE_STACK.clear()


def attributes(value: object) -> dict[str, Any]:
    """What ``vars`` gives, also of an object with slots."""
    if hasattr(value, "__dict__"):
        return vars(value)
    names = (name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ()))
    return {name: getattr(value, name) for name in names if hasattr(value, name)}


def _silence() -> None:
    log = logging.getLogger("DeepSpeed")
    log.setLevel(logging.ERROR)
    # Its factory sets the level of a new logger once; a filter stays.
    if not any(isinstance(one, _OnlyErrors) for one in log.filters):
        log.addFilter(_OnlyErrors())


class _OnlyErrors(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the record is one of an error."""
        return record.levelno >= logging.ERROR


@contextmanager
def _chosen(device: str) -> Iterator[None]:
    before = os.environ.get(CHOICE)
    os.environ[CHOICE] = device
    try:
        yield
    finally:
        if before is None:
            del os.environ[CHOICE]
        else:
            os.environ[CHOICE] = before
