"""Listen to torch through its own global hooks and a few functions that are wrapped; the script stays as it is."""

from __future__ import annotations

import functools
import math
from typing import Any, Callable

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from mtrain_trace import torch_facts, wrapping
from mtrain_trace.recorder import Recorder
from mtrain_trace.torch_listener import TorchListener
from mtrain_trace.wrapping import argument

TARGET_LOSSES = (
    "cross_entropy",
    "nll_loss",
    "mse_loss",
    "l1_loss",
    "smooth_l1_loss",
    "huber_loss",
    "binary_cross_entropy",
    "binary_cross_entropy_with_logits",
    "kl_div",
    "ctc_loss",
)
"""Losses of ``torch.nn.functional`` whose second argument is the target."""
RECURRENT = (torch.nn.RNNBase, torch.nn.RNNCellBase)
"""Layers that take a state beside their inputs, as the second argument or as ``hx``."""
TIME_FIRST = (*RECURRENT, torch.nn.MultiheadAttention)
"""Layers whose inputs have the samples along the second axis unless they are told ``batch_first``; those of cells have them along
the first one, and no time."""


def install(out: Recorder) -> TorchListener:
    """Connect a recorder to torch: hooks of all optimizers, and the functions that are wrapped."""
    listener = TorchListener(out)
    register_optimizer_step_pre_hook(lambda optimizer, *_: attempt(listener.before_step, optimizer))
    register_optimizer_step_post_hook(lambda optimizer, *_: attempt(listener.after_step, optimizer))
    _wrap_calls(listener)
    wrap(torch.autograd, "backward", before=lambda arguments, _: listener.see_backward(arguments[0]))
    # Scripts import the function from both, and each module has a reference of its own.
    for owner in (torch.nn.utils, torch.nn.utils.clip_grad):
        wrap(owner, "clip_grad_norm_", after=functools.partial(_note_clip, listener))
    for name in TARGET_LOSSES:
        wrap(torch.nn.functional, name, before=functools.partial(_note_target, listener))
    scaler = getattr(torch.amp, "GradScaler", None) or torch.cuda.amp.GradScaler  # torch before 2.3 has the latter only
    # Loops clear gradients through either, and a model may hold more of them than its optimizer.
    for kind in (torch.optim.Optimizer, torch.nn.Module):
        wrap(kind, "zero_grad", before=lambda *_: listener.see_cleared())
    wrap(scaler, "scale", after=lambda arguments, _, __: listener.see_scale(getattr(arguments[0], "_scale", None)))
    _wrap_scaler_step(listener, scaler)
    return listener


def _wrap_calls(listener: TorchListener) -> None:
    """Wrap the call of every module: torch's global hooks are not given keyword arguments, with which many are called."""
    original = torch.nn.Module.__call__

    @functools.wraps(original)
    def call(self: Any, *arguments: Any, **keywords: Any) -> Any:
        if not listener.depth and torch.is_grad_enabled():  # evaluation shows no samples of the training
            attempt(listener.enter_module, self, arguments, keywords)
        elif listener.wants_autocast and torch_facts.autocast_format():
            attempt(listener.see_autocast)
        if isinstance(self, TIME_FIRST) and torch.is_grad_enabled():
            attempt(_note_batch, listener, self, arguments, keywords)
        if isinstance(self, RECURRENT) and torch.is_grad_enabled():
            attempt(listener.see_state, argument(arguments, keywords, 1, "hx"))
        listener.depth += 1
        try:
            return original(self, *arguments, **keywords)
        finally:
            listener.depth -= 1

    torch.nn.Module.__call__ = call  # type: ignore[method-assign]


def _wrap_scaler_step(listener: TorchListener, scaler: Any) -> None:
    """Wrap the step of gradient scalers, which calls that of the optimizer only where all gradients are finite."""
    original = scaler.step

    @functools.wraps(original)
    def step(self: Any, optimizer: Any, *arguments: Any, **keywords: Any) -> Any:
        before = listener.updates_of(optimizer)
        result = original(self, optimizer, *arguments, **keywords)
        attempt(listener.note_skip, optimizer, before)
        return result

    scaler.step = step


def attempt(note: Callable[..., None], *arguments: Any) -> None:
    """Call ``note``; a failure is printed once, and never ends the training that is being recorded."""
    _attempt[0](note, *arguments)


def keep_from(dynamo: Any) -> None:
    """Keep the recorder out of what torch compiles: a compiled step of an optimizer calls its hooks as they are."""
    # A graph break in each hook, or a recorder that is compiled, would change the program that is observed.
    _attempt[0] = dynamo.disable(_attempt_eagerly)


def _attempt_eagerly(note: Callable[..., None], *arguments: Any) -> None:
    with torch.no_grad():
        wrapping.attempt(note, *arguments)


_attempt: list[Callable[..., None]] = [_attempt_eagerly]
wrap = functools.partial(wrapping.wrap, attempt, is_training=torch.is_grad_enabled)


def _note_target(listener: TorchListener, arguments: Any, keywords: Any) -> None:
    target = argument(arguments, keywords, 1, "target")
    listener.see_target(target, summed=keywords.get("reduction") == "sum")


def _note_batch(listener: TorchListener, layer: Any, arguments: Any, keywords: Any) -> None:
    """Note how many samples a layer of ``TIME_FIRST`` is given."""
    given = argument(arguments, keywords, 0, "input", "query")
    is_cell = isinstance(layer, torch.nn.RNNCellBase)
    axis = 0 if is_cell or layer.batch_first else 1
    if isinstance(given, torch.nn.utils.rnn.PackedSequence):
        listener.see_batch(int(given.batch_sizes[0]), is_time_first=not layer.batch_first)
    elif isinstance(given, torch.Tensor) and given.dim() == (2 if is_cell else 3):
        listener.see_batch(given.shape[axis], is_time_first=bool(axis) or is_cell)


def _note_clip(listener: TorchListener, arguments: Any, keywords: Any, norm: Any) -> None:
    listener.see_clip(norm, argument(arguments, keywords, 1, "max_norm", default=math.inf))
