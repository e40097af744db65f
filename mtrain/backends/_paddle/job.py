"""Connect the ranks of a job on Paddle Fleet, exchange their gradients, and leave."""

import math
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Protocol

import paddle
from paddle import distributed as dist
from paddle.distributed import fleet as paddle_fleet
from paddle.nn import Layer

from mtrain.backends._paddle import internals, rank_environment
from mtrain.backends._paddle.channel import Channel, PeerLost
from mtrain.backends._paddle.collective import DistributedCollective
from mtrain.backends.waiting import Waits
from mtrain.core.overriding import override
from mtrain.core.update.order import Exchange
from mtrain.errors import LaunchError

fleet: Any = paddle_fleet  # Paddle annotates it only partially
HEAD_START_S = 0.4
"""How long other ranks let rank 0 start to listen: a rank that connects too early would retry only after 3 s."""
LINGER_S = 3.0
"""How long a rank stays after it lost another one; Paddle's launcher looks for failed ranks once a second."""


class Options(Protocol):
    """The options of backend ``fleet`` that are used here."""

    timeout_s: float
    bucket_mb: int
    last_bucket_mb: float
    fuse: bool
    find_unused_parameters: bool


class FleetJob:
    """One rank of a job of at least two, connected to the others."""

    def __init__(self, own: rank_environment.OwnRank, target: str, options: Options) -> None:
        """Connect this rank; returns when all ranks are connected.

        Args:
            own: This rank's number and the address of rank 0.
            target: The device, ``cpu`` or Paddle's name of a GPU.
            options: Options of backend ``fleet``.

        Raises:
            LaunchError: Other ranks did not come, or this Paddle does not fit the installed protobuf.
        """
        rank_environment.announce(
            {
                # Set here, because Paddle's launcher takes any CUDA_VISIBLE_DEVICES, even an empty one, for a GPU.
                "PADDLE_DISTRI_BACKEND": "gloo" if target == "cpu" else "nccl",
                "FLAGS_stop_check_timeout": str(math.ceil(options.timeout_s)),
                "PADDLE_PG_TIMEOUT": str(math.ceil(options.timeout_s * 1000)),
            }
        )
        channel = Channel(own.rank, own.size, address=own.first, timeout_s=options.timeout_s, secret=own.secret)
        channel.all_gather(None)
        if own.rank != 0:
            time.sleep(HEAD_START_S)
        with internals.one_group(own.size) if target == "cpu" else nullcontext():
            _initialize(_strategy(options))
        _close_store_port(channel, own.rank)
        self.collective = DistributedCollective(channel=channel)
        if target == "cpu":
            internals.on_terminate(_terminate)

    def wrap(self, model: Layer, *, waits: Waits | None) -> tuple[Layer, Exchange]:
        """See ``PaddleEngine.wrap``. If ``waits`` is set, it counts how long the exchange of gradients takes."""
        optimizer = fleet.distributed_optimizer(_OptimizerShell(learning_rate=0.0, parameters=model.parameters()))
        trained = [parameter for parameter in model.parameters() if not parameter.stop_gradient]
        # Fleet exchanges gradients in its own hooks: the hook that completes a bucket returns when the bucket is
        # averaged. Our hooks are registered before and after Fleet's, so they surround the exchange.
        if waits is not None:
            internals.on_gradients(trained, waits.begin)
        wrapped = fleet.distributed_model(model)
        if waits is not None:
            internals.on_gradients(trained, waits.end)
        return wrapped, _Exchange(wrapped, optimizer, self.collective)

    def leave(self, error: object) -> None:
        """Leave the job; ``error`` is the exception that ends it, if any.

        A rank that fails because it lost another one stays for ``LINGER_S``. Among several failed ranks Paddle's
        launcher names the one with the lowest number, not the first to fail, so it must see the lost rank fail alone.
        """
        if isinstance(error, PeerLost) or "gloo" in str(error):
            time.sleep(LINGER_S)
        self.collective.close()
        dist.destroy_process_group()
        internals.keep_kernels()


def _strategy(options: Options) -> Any:
    """Return Fleet's strategy, with every key set that data parallel training reads."""
    strategy = fleet.DistributedStrategy()
    strategy.find_unused_parameters = options.find_unused_parameters
    strategy.fuse_grad_size_in_MB = options.bucket_mb if options.fuse else 0
    strategy.last_comm_group_size_MB = options.last_bucket_mb if options.fuse else 1 / (1 << 20)
    return strategy


def _close_store_port(channel: Channel, rank: int) -> None:
    """Close the port of Paddle's store once all ranks are connected to it; every rank must call."""
    channel.all_gather(None)
    port = internals.port_of_store(os.environ)
    if rank == 0 and port is not None:
        internals.close_port(port)


def _initialize(strategy: Any) -> None:
    """Call ``fleet.init``; explains the error that a protobuf too new for Paddle causes."""
    try:
        fleet.init(is_collective=True, strategy=strategy)
    except AttributeError as error:
        if error.name != "label":
            raise
        raise LaunchError(
            f"paddlepaddle {paddle.version.full_version} cannot read its own settings with this protobuf, which has no "
            "`FieldDescriptor.label` any more; install an older one: pip install 'protobuf<7'"
        ) from error


def _terminate() -> None:
    """Report that gloo lost another rank, and linger, as ``FleetJob.leave`` does for losses that Python sees."""
    print("the exchange of gradients failed: another rank has ended, or is unreachable", file=sys.stderr, flush=True)
    time.sleep(LINGER_S)
    os._exit(1)


class _OptimizerShell(paddle.optimizer.Optimizer):
    """An optimizer for Fleet to wrap, without a step: the engine makes the update itself."""

    @override
    def step(self) -> None:
        """Do nothing: the engine makes the update."""


class _Exchange:
    """The exchange of Paddle's DataParallel, which averages gradients in the backward pass of the last micro batch."""

    def __init__(self, wrapped: Any, optimizer: Any, collective: DistributedCollective) -> None:
        self._wrapped = wrapped
        self._optimizer = optimizer
        self._collective = collective

    @contextmanager
    def during(self, *, last: bool) -> Iterator[None]:
        """Wait for all ranks, then suppress the exchange before the last micro batch.

        The ranks meet over the channel first, because loading data may delay one of them for longer than gloo waits.
        """
        self._collective.meet()
        with nullcontext() if last else self._wrapped.no_sync():
            yield

    def finish(self) -> None:
        """Exchange what the strategy leaves; with data parallelism alone, the last backward pass left nothing."""
        self._optimizer.step()
