"""Load the DeepSpeed library, silence it, start it on torch's process group, and stop it."""

import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from pydantic import ValidationError

from mtrain.errors import PluginError, SpecError
from mtrain.spec import remedies

CHOICE = "DS_ACCELERATOR"
"""Environment variable that selects DeepSpeed's device. DeepSpeed reads it at import, and nothing else."""

UNUSED = ("mlflow",)
"""Libraries that DeepSpeed's autotuner imports where they are installed. mtrain does not use the autotuner. MLflow takes a
second, starts a thread that stays, and writes into the home folder."""


def load(device: str) -> ModuleType:
    """Import ``deepspeed`` for the device type ``device`` ("cpu", "cuda"), logging errors only.

    Raises:
        PluginError: DeepSpeed is missing or cannot be imported.
    """
    if find_spec("deepspeed") is None:
        raise PluginError(
            "backend deepspeed: DeepSpeed is not installed here",
            remedy=f"install it with: {remedies.install('deepspeed')}",
        )
    with _device_variable(device), _without(*UNUSED), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _silence()
        try:
            import deepspeed
        except (ImportError, OSError, RuntimeError) as error:
            raise PluginError(
                f"backend deepspeed: DeepSpeed cannot be imported ({error})",
                remedy=f"install the version that fits with: {remedies.install('deepspeed')}",
            ) from error
    _silence()
    module: ModuleType = deepspeed
    return module


def start(*, backend: str, timeout: timedelta) -> None:
    """Make DeepSpeed communicate over torch's default process group, which must exist."""
    from deepspeed import comm

    from mtrain.backends._deepspeed import internals

    internals.prepare_start()
    comm.init_distributed(dist_backend=backend, timeout=timeout, auto_mpi_discovery=False, verbose=False)


def check(config: dict[str, Any]) -> None:
    """Refuse a configuration that DeepSpeed cannot read.

    Raises:
        SpecError: A value of ``config`` has the wrong type, or is not among those that DeepSpeed accepts.
    """
    import deepspeed

    try:
        deepspeed.DeepSpeedConfig(config)
    except Exception as error:  # DeepSpeed computes with some values before it validates them, so any error is possible
        messages = "; ".join(
            f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}"
            for problem in (error.errors() if isinstance(error, ValidationError) else ())
        )
        raise SpecError(
            f"backend.options.config: DeepSpeed refuses a value: {messages or error}; give a value that DeepSpeed's "
            "documentation of its JSON lists"
        ) from error


def split_weights(model: Any, fill: Callable[[Any], None], config: dict[str, Any]) -> None:
    """Let DeepSpeed split the weights of ``model`` as in stage 3, one after the other; every rank must call.

    Args:
        model: A module.
        fill: Makes a weight whole.
        config: DeepSpeed's configuration.
    """
    import deepspeed
    from torch import nn

    first = None
    for weight in model.parameters():
        fill(weight)
        if first is None:
            deepspeed.zero.Init(module=nn.ParameterList([weight]), config_dict_or_path=config)
            first = weight
        else:
            first.convert_to_zero_parameters(param_list=[weight])


def stop() -> None:
    """Make DeepSpeed forget all process groups, so that the next job of this process starts anew."""
    if "deepspeed" not in sys.modules:
        return
    from mtrain.backends._deepspeed import internals

    internals.forget_groups()


def _silence() -> None:
    log = logging.getLogger("DeepSpeed")
    log.setLevel(logging.ERROR)
    # DeepSpeed's factory sets the level when it creates its logger, which overrides ours; a filter stays.
    if not any(isinstance(each, _OnlyErrors) for each in log.filters):
        log.addFilter(_OnlyErrors())


class _OnlyErrors(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether the record reports an error."""
        return record.levelno >= logging.ERROR


@contextmanager
def _without(*names: str) -> Iterator[None]:
    """Have libraries appear as not installed while inside, unless they are imported already."""
    hidden = [name for name in names if name not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]  # None makes an import fail
    try:
        yield
    finally:
        for name in hidden:
            sys.modules.pop(name, None)


@contextmanager
def _device_variable(device: str) -> Iterator[None]:
    """Set DeepSpeed's device variable while inside, and restore it afterwards."""
    before = os.environ.get(CHOICE)
    os.environ[CHOICE] = device
    try:
        yield
    finally:
        if before is None:
            del os.environ[CHOICE]
        else:
            os.environ[CHOICE] = before
