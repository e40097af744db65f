"""The ranks of one job on Paddle Fleet: connecting them, exchanging gradients, leaving."""

import ctypes
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any, Protocol

import paddle
from paddle import distributed as dist
from paddle.distributed import fleet as paddle_fleet
from paddle.nn import Layer
from typing_extensions import override

from mtrain.backends._paddle import rank_environment, store_port
from mtrain.backends._paddle.channel import Channel, PeerLost
from mtrain.backends._paddle.collective import DistributedCollective
from mtrain.backends._paddle.optimizer import Exchange
from mtrain.backends.waiting import Waits
from mtrain.core.interfaces import Recipe
from mtrain.errors import LaunchError

fleet: Any = paddle_fleet  # its own annotations are partial
HEAD_START_S = 0.4
"""For rank 0 to listen: whom Paddle finds too early it lets try again after 3 s only."""
LINGER_S = 3.0
"""Paddle's launcher looks once a second."""


class Options(Protocol):
    """What ``backends.fleet`` lets a spec choose."""

    timeout_s: float
    bucket_mb: int
    last_bucket_mb: float
    fuse: bool
    find_unused_parameters: bool


class FleetJob:
    """One rank of at least two, connected with the others."""

    def __init__(self, own: rank_environment.Place, target: str, options: Options) -> None:
        """Connect; returns when all ranks are there.

        Raises:
            LaunchError: other ranks did not come, or this Paddle does not fit what is installed beside it.
        """
        rank_environment.announce(
            {
                # Not left to the launcher: it takes any CUDA_VISIBLE_DEVICES, an empty one too, for a GPU.
                "PADDLE_DISTRI_BACKEND": "gloo" if target == "cpu" else "nccl",
                "FLAGS_stop_check_timeout": str(math.ceil(options.timeout_s)),
                "PADDLE_PG_TIMEOUT": str(math.ceil(options.timeout_s * 1000)),
            }
        )
        channel = Channel(own.rank, own.size, address=own.first, timeout_s=options.timeout_s, secret=own.secret)
        channel.all_gather(None)
        if own.rank != 0:
            time.sleep(HEAD_START_S)
        with _one_group(own.size) if target == "cpu" else nullcontext():
            _initialize(_strategy(options))
        _close_door(channel, own.rank)
        self.collective = DistributedCollective(local_rank=own.local_rank, channel=channel)
        if target == "cpu":
            _linger_on_terminate()

    def wrap(self, model: Layer, recipe: Recipe, *, waits: Waits | None) -> tuple[Layer, Exchange]:
        """See ``engine.Wrap``. ``waits``: where to count how long the exchange of gradients takes."""
        del recipe
        optimizer = fleet.distributed_optimizer(_Shell(learning_rate=0.0, parameters=model.parameters()))
        trained = [parameter for parameter in model.parameters() if not parameter.stop_gradient]
        # Fleet exchanges gradients in hooks of its own: one that completes a bucket returns when it is averaged.
        if waits is not None:
            _hook(trained, waits.begin)
        wrapped = fleet.distributed_model(model)
        if waits is not None:
            _hook(trained, waits.end)
        return wrapped, _Exchange(wrapped, optimizer, self.collective)

    def leave(self, error: object) -> None:
        """Let go of the other ranks.

        A rank that fails for the loss of another stays for a moment: the launcher names the first failed rank by number,
        not by time, and must see the other one alone.
        """
        if isinstance(error, PeerLost) or "gloo" in str(error):
            time.sleep(LINGER_S)
        self.collective.close()
        dist.destroy_process_group()


def _hook(parameters: Iterable[Any], call: Callable[..., None]) -> None:
    """Call ``call`` when a gradient is there, in the order in which hooks were made."""
    for parameter in parameters:
        parameter._register_backward_hook(call)


def _strategy(options: Options) -> Any:
    """Every key that data parallel training reads."""
    strategy = fleet.DistributedStrategy()
    strategy.find_unused_parameters = options.find_unused_parameters
    strategy.fuse_grad_size_in_MB = options.bucket_mb if options.fuse else 0
    strategy.last_comm_group_size_MB = options.last_bucket_mb if options.fuse else 1 / (1 << 20)
    return strategy


def _close_door(channel: Channel, rank: int) -> None:
    """Close the port of Paddle's store when all ranks are connected to it. Every rank calls."""
    channel.all_gather(None)
    port = store_port.port_of_store(os.environ)
    if rank == 0 and port is not None:
        store_port.close(port)


def _initialize(strategy: Any) -> None:
    try:
        fleet.init(is_collective=True, strategy=strategy)
    except AttributeError as error:
        if error.name != "label":
            raise
        raise LaunchError(
            f"paddlepaddle {paddle.version.full_version} cannot read its own settings with this protobuf, which has no "
            "`FieldDescriptor.label` any more; install an older one: pip install 'protobuf<7'"
        ) from error


@contextmanager
def _one_group(size: int) -> Iterator[None]:
    """While inside, a further process group of all ranks is the first one.

    Paddle leaves the addresses of every gloo group under the same keys of its store. From three ranks on, one that is ahead
    reads where another one listened for the group before: one start in five hangs, or ends with "Connection refused".
    """
    made = dist.new_group

    def new_group(ranks: Any = None, *args: Any, **named: Any) -> Any:
        return dist.get_group(0) if ranks is None or len(ranks) == size else made(ranks, *args, **named)

    dist.new_group = new_group
    try:
        yield
    finally:
        dist.new_group = made


def _terminate() -> None:
    print("the exchange of gradients failed: another rank has ended, or is unreachable", file=sys.stderr, flush=True)
    time.sleep(LINGER_S)
    os._exit(1)


_TERMINATE = ctypes.CFUNCTYPE(None)(_terminate)  # kept: C++ holds no reference to it


def _linger_on_terminate() -> None:
    """gloo's exceptions cannot pass Paddle's backward pass: C++ aborts. Like any other loss of a rank it is left with ``LINGER_S``."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL("libstdc++.so.6")._ZSt13set_terminatePFvvE(_TERMINATE)


class _Shell(paddle.optimizer.Optimizer):
    """What fleet takes for an optimizer: the step itself is the engine's."""

    @override
    def step(self) -> None:
        """Nothing."""


class _Exchange:
    """DataParallel averages gradients in the backward pass of the last micro batch."""

    def __init__(self, wrapped: Any, optimizer: Any, collective: DistributedCollective) -> None:
        self._wrapped = wrapped
        self._optimizer = optimizer
        self._collective = collective

    @contextmanager
    def during(self, *, last: bool) -> Iterator[None]:
        """No exchange before the last. Ranks come together first: data may have kept one of them for longer than gloo waits."""
        self._collective.meet()
        with nullcontext() if last else self._wrapped.no_sync():
            yield

    def finish(self) -> None:
        """Whatever the strategy still has to exchange; with data parallelism alone the last backward has done it all."""
        self._optimizer.step()
