"""Notice gradients that the script computes itself: they would be added to those of ``optimizer.update``, in silence."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

OWN_BACKWARD = (
    "loss.backward(): leave it out: optimizer.update(loss) computes the gradient, averages it over the ranks, clips and steps, "
    "and would add this one to it. Add up several losses, and call optimizer.update(loss) once per batch"
)


def watch(module: Any, saw: Callable[[], None]) -> None:
    """Call ``saw`` at each backward pass into the parameters of ``module``.

    Args:
        module: A native module of torch or Paddle, prepared by the backend.
        saw: Is called while gradients are computed; it must not raise.
    """

    # It only notes: other hooks of a backend may have begun to exchange gradients, so an error here would leave ranks waiting.
    def hook(_: Any) -> None:
        saw()

    trained = [parameter for parameter in module.parameters() if not getattr(parameter, "stop_gradient", False)]
    trained = [parameter for parameter in trained if getattr(parameter, "requires_grad", True)]
    # The first and the last one: a call for each parameter would cost time in every update.
    for parameter in trained[:1] + trained[1:][-1:]:
        # torch's other hook is called by torch.autograd.grad as well, which changes no gradient.
        register = getattr(parameter, "register_post_accumulate_grad_hook", None) or parameter.register_hook
        with suppress(RuntimeError):  # a backend that splits arrays may have replaced the parameter
            register(hook)
