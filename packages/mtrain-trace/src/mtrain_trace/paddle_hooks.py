"""Listen to Paddle through functions that are wrapped; the script stays as it is."""

from __future__ import annotations

import functools
from typing import Any, Callable

import paddle

from mtrain_trace import naming, wrapping
from mtrain_trace.paddle_listener import PaddleListener
from mtrain_trace.recorder import Recorder
from mtrain_trace.wrapping import argument

TARGET_LOSSES = (
    "cross_entropy",
    "softmax_with_cross_entropy",
    "nll_loss",
    "mse_loss",
    "l1_loss",
    "smooth_l1_loss",
    "square_error_cost",
    "binary_cross_entropy",
    "binary_cross_entropy_with_logits",
    "sigmoid_focal_loss",
    "kl_div",
    "ctc_loss",
)
"""Losses of ``paddle.nn.functional`` whose second argument is the target."""


def install(out: Recorder) -> PaddleListener:
    """Connect a recorder to Paddle."""
    listener = PaddleListener(out)
    _wrap_calls(listener)
    _wrap_backward(listener, paddle.Tensor, lambda arguments: [arguments[0]])
    _wrap_backward(listener, paddle.autograd, lambda arguments: list(naming.tensors_in(arguments[0], paddle.Tensor)))
    for name in TARGET_LOSSES:
        if hasattr(paddle.nn.functional, name):
            wrap(paddle.nn.functional, name, before=functools.partial(_note_target, listener))
    _wrap_clipping(listener)
    _wrap_apply(listener)
    # GradScaler inherits `scale` from AmpScaler; scripts may use either.
    scaler = paddle.amp.GradScaler.__mro__[1]
    wrap(scaler, "scale", after=lambda arguments, _, __: listener.see_scale(getattr(arguments[0], "_scale", None)))
    for name in ("step", "minimize"):
        _wrap_scaler_step(listener, paddle.amp.GradScaler, name)
    return listener


def _wrap_calls(listener: PaddleListener) -> None:
    """Wrap the call of every layer."""
    original = paddle.nn.Layer.__call__

    @functools.wraps(original)
    def call(self: Any, *arguments: Any, **keywords: Any) -> Any:
        if not listener.depth and paddle.is_grad_enabled():  # evaluation shows no samples of the training
            attempt(listener.enter_layer, self, arguments, keywords)
        listener.depth += 1
        try:
            return original(self, *arguments, **keywords)
        finally:
            listener.depth -= 1

    paddle.nn.Layer.__call__ = call  # type: ignore[method-assign]


def _wrap_backward(listener: PaddleListener, owner: Any, losses_of: Callable[[Any], list[Any]]) -> None:
    """Wrap a backward pass; layers that it calls again (recomputation) show no further samples."""
    original = owner.backward

    @functools.wraps(original)
    def backward(*arguments: Any, **keywords: Any) -> Any:
        if arguments:
            attempt(listener.see_backward, losses_of(arguments))
        listener.depth += 1
        try:
            return original(*arguments, **keywords)
        finally:
            listener.depth -= 1

    owner.backward = backward


def _wrap_clipping(listener: PaddleListener) -> None:
    """Wrap clipping by the optimizer, by Fleet around it, and by the script."""
    from paddle.distributed.fleet.meta_optimizers.dygraph_optimizer import hybrid_parallel_optimizer
    from paddle.nn import clip

    for owner in (clip.ClipGradBase, hybrid_parallel_optimizer.HybridParallelClipGrad):
        wrapping.wrap(
            attempt,
            owner,
            "__call__",
            before=lambda given, named: listener.before_clip(given[0], argument(given, named, 1, "params_grads")),
            after=lambda _, __, clipped: listener.after_clip(clipped),
        )
    if hasattr(paddle.nn.utils, "clip_grad_norm_"):
        wrap(paddle.nn.utils, "clip_grad_norm_", after=functools.partial(_note_norm, listener))


def _wrap_apply(listener: PaddleListener) -> None:
    """Wrap what every way of stepping calls with the gradients: step, minimize, and Fleet's optimizers."""
    wrapping.wrap(
        attempt,
        paddle.optimizer.Optimizer,
        "_apply_optimize",
        before=lambda given, named: listener.before_apply(given[0], argument(given, named, 3, "params_grads")),
        after=lambda given, _, __: listener.after_apply(given[0]),
    )


def _wrap_scaler_step(listener: PaddleListener, owner: Any, name: str) -> None:
    """Wrap a step of gradient scalers, which calls that of the optimizer only where all gradients are finite."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def step(*arguments: Any, **keywords: Any) -> Any:
        optimizer = _inner(argument(arguments, keywords, 1, "optimizer"))
        before = listener.updates_of(optimizer)
        result = original(*arguments, **keywords)
        attempt(listener.note_skip, optimizer, before)
        return result

    setattr(owner, name, step)


def _inner(optimizer: Any) -> Any:
    """Return the optimizer that Fleet's wrappers hold."""
    while not isinstance(optimizer, paddle.optimizer.Optimizer) and hasattr(optimizer, "_inner_opt"):
        optimizer = optimizer._inner_opt
    return optimizer


def attempt(note: Callable[..., None], *arguments: Any) -> None:
    """Call ``note`` as ``wrapping.attempt``; a graph that is being made has no values, and shows nothing."""
    if paddle.in_dynamic_mode():
        with paddle.no_grad():
            wrapping.attempt(note, *arguments)


wrap = functools.partial(wrapping.wrap, attempt, is_training=paddle.is_grad_enabled)


def _note_target(listener: PaddleListener, arguments: Any, keywords: Any) -> None:
    listener.see_target(argument(arguments, keywords, 1, "label"))


def _note_norm(listener: PaddleListener, arguments: Any, keywords: Any, norm: Any) -> None:
    listener.see_norm(norm, argument(arguments, keywords, 1, "max_norm", default=float("inf")))
