"""The driver of the training loop for the job of a spec: the model returns its losses by name."""

from contextlib import closing

from mtrain.core.interfaces import Module, Progress
from mtrain.core.update.loop import Loop


def train(loop: Loop, model: Module) -> Progress:
    """Train ``model``, whose optimizer is the only one of ``loop``, to the end of the job. Every rank must call.

    Returns:
        The progress at the end.

    Raises:
        NonFiniteError: the gradient was not finite in too many updates in a row.
        Interrupted: some rank was asked to end; the state is saved.
    """
    (stepper,) = loop.job.steppers
    model.train()
    with closing(loop):
        for micro in loop:
            losses = model(micro.batch)
            loop.use(stepper, losses["total"], losses)
    loop.finish()
    return loop.progress
