"""Everything that mtrain uses of torch without a promise of torch: private names, and changes of its behaviour.

``tests/backends/test_torch_internals.py`` checks each of them, so that a new version of torch that differs is noticed
there and not in a job.
"""

import inspect
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import TCPStore as TCPStore  # listening_store names it
from torch.distributed import distributed_c10d
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode  # the mode of spread is one
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from mtrain.core.overriding import override

TESTED = ("2.6.0", "2.7.1", "2.8.0", "2.9.1", "2.10.0", "2.13.0", "2.14.1", "2.15.0")
"""Versions of torch with which these internals were tested; see docs/versions.md."""
AnyBatchNorm = nn.modules.batchnorm._BatchNorm
"""The base of all of torch's BatchNorm layers."""


# ------------------------------------------------------------------------------ one kernel for a whole list of tensors
# The public functions take one tensor each. With hundreds of parameters their calls cost more than the arithmetic.
def scale_(tensors: list[Tensor], factor: float) -> None:
    """Multiply all ``tensors`` by ``factor``."""
    torch._foreach_mul_(tensors, factor)


def scale_by_(tensors: list[Tensor], factor: Tensor) -> None:
    """Multiply all ``tensors`` by ``factor``, a number of their type on their device."""
    torch._foreach_mul_(tensors, factor)


def add_scaled_(tensors: list[Tensor], others: list[Tensor], factor: float) -> None:
    """Add ``factor * other`` to each tensor."""
    torch._foreach_add_(tensors, others, alpha=factor)


def mix_(tensors: list[Tensor], others: list[Tensor], share: float) -> None:
    """Move each tensor towards its other: ``tensor += share * (other - tensor)``."""
    torch._foreach_lerp_(tensors, others, share)


def copy_(tensors: list[Tensor], others: list[Tensor]) -> None:
    """Overwrite each tensor with its other."""
    torch._foreach_copy_(tensors, others)


def copies(tensors: list[Tensor]) -> list[Tensor]:
    """Return a copy of each tensor, with its strides."""
    new = [torch.empty_like(tensor) for tensor in tensors]
    torch._foreach_copy_(new, [tensor.detach() for tensor in tensors])
    return new


def copy_if_(tensors: list[Tensor], others: list[Tensor], flag: Tensor) -> None:
    """Overwrite each tensor with its other where ``flag``, a float32 number on the device, is 1; ``others`` are finite."""
    # No public function overwrites a list of tensors under a condition that only the device knows. The kernel of SGD
    # changes nothing where its last argument is 1, and its first step copies the gradient into the velocity; at a learning rate of
    # 0 it leaves the weights, for which the others themselves stand.
    torch._fused_sgd_(
        others,
        others,
        [tensor.detach() for tensor in tensors],
        weight_decay=0.0,
        momentum=1.0,
        lr=0.0,
        dampening=0.0,
        nesterov=False,
        maximize=False,
        is_first_step=True,
        found_inf=1 - flag,
    )


def products(tensors: Sequence[Tensor], factor: float | Sequence[Tensor]) -> list[Tensor]:
    """Return each tensor times ``factor``, or times its own factor; new tensors."""
    return list(torch._foreach_mul(list(tensors), factor if isinstance(factor, float) else list(factor)))


def quotients(tensors: list[Tensor], divisors: list[Tensor]) -> list[Tensor]:
    """Return each tensor divided by its divisor."""
    return list(torch._foreach_div(tensors, divisors))


def roots(tensors: list[Tensor]) -> list[Tensor]:
    """Return the square roots of each tensor."""
    return list(torch._foreach_sqrt(tensors))


def signs(tensors: list[Tensor]) -> list[Tensor]:
    """Return -1, 0 or 1 for each element of each tensor."""
    return list(torch._foreach_sign(tensors))


def shift_(tensors: list[Tensor], by: float) -> None:
    """Add a number to each tensor."""
    torch._foreach_add_(tensors, by)


def norms(tensors: list[Tensor]) -> tuple[Tensor, ...]:
    """Return the L2 norm of each tensor."""
    return torch._foreach_norm(tensors)


def sgd_(  # noqa: PLR0913 - the rule has as many settings
    weights: list[Tensor],
    grads: list[Tensor],
    velocities: list[Tensor],
    *,
    learning_rate: float,
    momentum: float,
    decay: float,
    nesterov: bool,
    skip: Tensor | None = None,
) -> None:
    """Do one step of SGD with coupled weight decay on all ``weights``; without momentum, velocity = gradient.

    ``skip``: a float32 number on the device; 1: nothing is changed.
    """
    # torch.optim.SGD runs the same kernel, but constructing it imports torch's compiler. The kernel refuses velocities
    # with a momentum of 0; its first step overwrites them with the gradient, whatever the momentum.
    without_momentum = momentum == 0
    torch._fused_sgd_(
        weights,
        grads,
        velocities,
        weight_decay=decay,
        momentum=1.0 if without_momentum else momentum,
        lr=learning_rate,
        dampening=0.0,
        nesterov=nesterov and not without_momentum,
        maximize=False,
        is_first_step=without_momentum,
        found_inf=skip,
    )


def adam_(  # noqa: PLR0913 - the rule has as many settings
    weights: list[Tensor],
    grads: list[Tensor],
    means: list[Tensor],
    squares: list[Tensor],
    updates: Tensor,
    *,
    learning_rate: float,
    betas: tuple[float, float],
    decay: float,
    eps: float,
    decoupled: bool,
    skip: Tensor | None = None,
) -> None:
    """Do one step of Adam, or of AdamW if the decay is ``decoupled``; ``updates``: number of updates, this one included.

    ``skip``: a float32 number on the device; 1: nothing is changed.
    """
    # torch.optim.Adam runs the same kernels, but constructing it imports torch's compiler.
    kernel = torch._fused_adamw_ if decoupled else torch._fused_adam_
    kernel(
        weights,
        grads,
        means,
        squares,
        [],
        [updates] * len(weights),
        lr=learning_rate,
        beta1=betas[0],
        beta2=betas[1],
        weight_decay=decay,
        eps=eps,
        amsgrad=False,
        maximize=False,
        found_inf=skip,
    )


# ------------------------------------------------------------------------------------------------------------- layers
def convolve(layer: nn.Conv2d, x: Tensor, weight: Tensor) -> Tensor:
    """Return what ``layer`` computes for ``x``, with ``weight`` in place of its own."""
    # The public F.conv2d has no padding modes; the layer's own forward takes its own weight only.
    return layer._conv_forward(x, weight, layer.bias)


def is_traced() -> bool:
    """Tell whether torch looks at operations instead of computing: ``torch.compile``, or a transform of ``torch.func``."""
    return torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()


def convolution_gradients(
    dy: Tensor, x: Tensor, weight: Tensor, stride: Any, padding: Any, mask: Sequence[bool]
) -> Sequence[Tensor | None]:
    """Return the gradients of input and weight of ``F.conv2d`` without bias; ``mask``: which ones are asked for."""
    # torch.nn.grad.conv2d_input knows only the shape of x, and so takes the kernel of contiguous layout.
    settings = {"dilation": [1, 1], "transposed": False, "output_padding": [0, 0], "groups": 1, "bias_sizes": None}
    gradients: Sequence[Tensor | None] = torch.ops.aten.convolution_backward(
        dy, x, weight, stride=stride, padding=padding, output_mask=[*mask, False], **settings
    )[:2]
    return gradients


def channel_statistics(x_BCHW: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and biased variance of each channel, float32 at least; on the CPU."""
    # torch.var_mean over three axes takes several passes over the memory, this kernel one. Nobody reads the running
    # statistics: passing them makes the kernel compute half precision's statistics in float32.
    unread = x_BCHW.new_zeros(x_BCHW.shape[1], dtype=torch.promote_types(x_BCHW.dtype, torch.float32))
    mean, variance = torch.batch_norm_update_stats(x_BCHW, unread, unread.clone(), 0.0)
    return mean, variance


def channel_gradient_sums(dy_BCHW: Tensor, x_BCHW: Tensor, mean_C: Tensor, inverse_C: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sums of ``dy`` and of ``dy * (x - mean) * inverse`` over each channel, on the CPU."""
    # The public F.batch_norm takes statistics that it computed itself. This kernel of its backward pass takes any, and
    # returns the sums as the gradients of bias and weight; output_mask skips the gradient of the input.
    _, weight_sums, bias_sums = torch.ops.aten.native_batch_norm_backward(
        dy_BCHW, x_BCHW, None, None, None, mean_C, inverse_C, train=True, eps=0.0, output_mask=[False, True, True]
    )
    return bias_sums, weight_sums


# ------------------------------------------------------------------------------------------- how ranks find each other
def store_at(listener: socket.socket, address: str, port: int, *, size: int, timeout: timedelta) -> TCPStore:
    """Make the store of ``size`` ranks on a socket bound to ``address`` and ``port``; the store takes the socket over."""
    # TCPStore has no argument for the address to bind and would listen on every interface. It does accept a socket that
    # is bound already, up to torch 2.7 only without libuv.
    return TCPStore(
        address,
        port,
        size,
        is_master=True,
        timeout=timeout,
        wait_for_workers=False,
        multi_tenant=True,
        master_listen_fd=listener.detach(),
        use_libuv=torch_version() > (2, 7),
    )


def store_of_default_group(store: distributed_c10d.Store) -> distributed_c10d.Store:
    """Return ``store`` as ``init_process_group`` uses it on ranks that torch itself connects."""
    # "default_pg" is torch's own prefix. A rank without it would look for the others under other keys.
    return distributed_c10d.PrefixStore("default_pg", store)


def replace_static_rendezvous(listening_store: Any) -> None:
    """Make torchrun's static rendezvous use ``listening_store(address, port, size=, timeout=)`` as its store."""
    # torchrun's own store listens on every interface of the machine and, having no password, answers anyone. The
    # rendezvous keeps its store in `_store`, and makes none if there is one. `create_rdzv_handler` looks the class up
    # in its module when it is called, so replacing it there suffices.
    from torch.distributed.elastic.rendezvous import static_tcp_rendezvous

    class BoundRendezvous(static_tcp_rendezvous.StaticTCPRendezvous):
        """A static rendezvous whose store listens at the rendezvous address only."""

        def next_rendezvous(self) -> Any:
            """Make the store before the base class does."""
            if self._store is None and self.rank == 0:
                self._store = listening_store(
                    self.master_addr, self.master_port, size=self.world_size, timeout=self.timeout
                )
            return super().next_rendezvous()

    static_tcp_rendezvous.StaticTCPRendezvous = BoundRendezvous  # type: ignore[misc]


# ------------------------------------------------------------------------------------------- leaving the process group
def import_before_joining() -> None:
    """Import the module that must not be imported between joining and leaving the default process group."""
    # The functions of this module bind the default group that exists when it is imported as a default argument. DDP and
    # DeepSpeed import it; if that happened after the group is made, the group and its threads would outlive the job.
    import torch.distributed.nn.functional  # noqa: F401


_kept: list[Any] = []
"""Process groups that were left under torch up to 2.7."""


def destroy_groups() -> None:
    """Leave all process groups, once the collectives that are under way have ended."""
    # Up to torch 2.7, whoever gives up the last reference to a group waits with Python's lock for gloo's thread, which needs the
    # lock to free the last tensor: two of eight ranks hung after their last update, on a busy machine. Kept groups are
    # given up when the next one is joined; a process that ends does not take them apart (`system.ending`).
    if torch_version() < (2, 8):
        _kept.extend(distributed_c10d._world.pg_map)
    distributed_c10d.destroy_process_group()


def release_groups() -> None:
    """Give up the groups that were left before, whose threads have long finished; before the next one is joined."""
    _kept.clear()


def abort_default_group() -> None:
    """Leave the default process group without waiting for collectives that are under way."""
    # destroy_process_group waits for them, also for those to which lost ranks will never come.
    distributed_c10d._abort_process_group()


def count_groups_from(module: Any, number: int) -> None:
    """Have ``torch.distributed.distributed_c10d`` give the next group at least this number, which is part of its name."""
    # A public name of the group (`group_name`) does not reach the group of all ranks in each version.
    module._world.group_count = max(number, module._world.group_count)


COMPILED_CALL = "_compiled_call_impl"
"""The attribute in which ``Module.compile`` leaves what is called in place of ``forward``."""


def torch_version() -> tuple[int, ...]:
    """Return the first two numbers of torch's version."""
    return tuple(map(int, torch.__version__.partition("+")[0].split(".")[:2]))


# ------------------------------------------------------------------------------------------------------------------ DDP
class LightDDP(DistributedDataParallel):
    """A DDP that does not load torch's compiler, exchanges no buffers, and can be cut off from its process group."""

    def __init__(self, *inputs: Any, **kwargs: Any) -> None:
        # mtrain broadcasts buffers before evaluations and saves, so DDP must not do it in each forward pass. torch 2.13
        # renamed the argument.
        renamed = "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
        kwargs["forward_sync_buffers" if renamed else "broadcast_buffers"] = False
        with without_compiler():
            super().__init__(*inputs, **kwargs)

    @override
    @contextmanager
    def _inside_ddp_forward(self) -> Iterator[None]:
        # The base class tells the compiler which module runs, and imports it for that.
        with super()._inside_ddp_forward() if compiler_is_loaded() else nullcontext():
            yield

    def expect(self, loss: torch.Tensor) -> None:
        """Exchange the gradients of ``loss`` in its backward pass, whatever calls it was computed by."""
        # As the forward method does at its end, with the outputs of that one call.
        reducer: Any = self.reducer
        reducer.prepare_for_forward()
        reducer.prepare_for_backward([loss])

    def release(self) -> None:
        """Drop the process group, so that destroying it ends its threads. The module cannot train afterwards."""
        # A gloo thread that outlives the destruction of the group aborts the process if it frees its last tensor while
        # Python shuts down. The module, which the caller may keep, holds the group in these attributes.
        for name in ("reducer", "logger", "process_group"):
            self.__dict__[name] = None

    def time_every_update(self) -> None:
        """Measure the exchange of every update for ``exposed_exchange_s``."""
        # By default DDP times only a sample of the updates.
        self._set_ddp_runtime_logging_sample_rate(1)

    def exposed_exchange_s(self) -> float:
        """Return the seconds from the last gradient of the last backward pass to the end of its exchange."""
        # Nothing public tells when the exchange, which runs during the backward pass, ends.
        logger: Any = self.logger
        logger.set_runtime_stats_and_log()
        times_ns = self._get_ddp_logging_data()
        return max(0.0, 1e-9 * (times_ns["backward_comm_time_end"] - times_ns["backward_compute_time_end"]))


def compiler_is_loaded() -> bool:
    """Return whether this process has imported torch's compiler."""
    return "torch._dynamo" in sys.modules


@contextmanager
def without_compiler() -> Iterator[None]:
    """Keep DDP's constructor from importing torch's compiler, which takes as long as importing torch itself."""
    # The constructor reads one setting of torch._dynamo, and the attribute `torch._dynamo` imports that module. Inside
    # this context a stand-in answers with the setting's default. Nothing is replaced where the compiler is loaded.
    if compiler_is_loaded():
        yield
        return
    # The setting is read through `utils` from torch 2.7 on, and through `config` before.
    stand_in = SimpleNamespace(
        utils=SimpleNamespace(get_optimize_ddp_mode=lambda: "ddp_optimizer"),
        config=SimpleNamespace(_get_optimize_ddp_mode=lambda: "ddp_optimizer"),
    )
    torch.__dict__["_dynamo"] = stand_in
    try:
        yield
    finally:
        if torch.__dict__.get("_dynamo") is stand_in:
            del torch.__dict__["_dynamo"]


# -------------------------------------------------------------------------------------------- operations that are watched
_OVERWRITING = {getattr(torch.ops.aten, name) for name in ("copy_", "fill_", "normal_", "random_", "uniform_", "zero_")}


def overwrites(operation: Any) -> bool:
    """Return whether an operation, as a dispatch mode gets it, overwrites its first argument whatever that was."""
    return operation.overloadpacket in _OVERWRITING


_ALIASES = {getattr(torch.ops.aten, name) for name in ("alias", "detach")}


def only_aliases(operation: Any) -> bool:
    """Return whether an operation, as a dispatch mode gets it, returns its argument's memory and reads nothing of it."""
    return operation.overloadpacket in _ALIASES


def changes_something(operation: Any) -> bool:
    """Return whether an operation, as a dispatch mode gets it, changes one of its arguments."""
    return bool(operation._schema.is_mutable)


def storage_key(tensor: Tensor) -> int:
    """Return what tells the memory of a tensor from that of others as long as it lives, also where it is empty."""
    with torch._C.DisableTorchFunction():
        return int(tensor.untyped_storage()._cdata)


def tensors_in(value: object) -> list[Tensor]:
    """Return the tensors in a nested structure of containers."""
    return [x for x in tree_leaves(value) if isinstance(x, Tensor)]


@contextmanager
def without_modes() -> Iterator[None]:
    """Let no mode see the operations of this thread, while inside."""
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        yield
