"""The driver of the training loop for a script: ``session.batches`` yields micro batches, ``optimizer.update`` uses each of them."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

from mtrain.core.agreement import Place, RanksDisagree
from mtrain.core.interfaces import Optimizer, Progress, Rates
from mtrain.core.loop import Loop
from mtrain.core.losses import problem_of
from mtrain.core.stepping import Stepper
from mtrain.errors import ScriptError
from mtrain.rank.script.gradients import OWN_BACKWARD
from mtrain.spec.calls import explained


class NotOfUpdater(ScriptError, AttributeError):
    """A member that optimizers of frameworks have, and that of a script does not need."""


RATE_WORDS = (
    "the learning rate is the rule's times the schedule's factor: session.prepare(schedule=mtrain.Cosine()), or a function from the "
    "number of the update to the learning rate, schedule=lambda update: 0.1 * 0.99**update"
)
INSTEAD: Mapping[str, str] = {
    **dict.fromkeys(
        ("step", "minimize"),
        "call optimizer.update(loss) once per batch: it computes the gradient, averages it over the ranks, clips and steps. "
        "Leave out loss.backward() and optimizer.zero_grad()",
    ),
    **dict.fromkeys(
        ("zerograd", "cleargrad", "backward"),
        "leave it out: optimizer.update(loss) computes the gradient anew for each update",
    ),
    **dict.fromkeys(("setlr", "getlr", "lr", "learningrate", "paramgroups", "setlrscheduler"), RATE_WORDS),
    **dict.fromkeys(
        ("statedict", "setstatedict", "loadstatedict"), "leave it out: checkpoints hold the optimizer's state"
    ),
}
"""What to write in the place of members of torch's and Paddle's optimizers, by their names without ``_`` in lower case."""


@explained
class Updater:
    """The optimizer of a script: one call of ``update`` for each micro batch."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.native = optimizer
        """The backend's own optimizer object."""
        self.loop: ScriptLoop | None = None
        self.stepper: Stepper | None = None
        """Set once the training loop exists."""

    @property
    def norm(self) -> float:
        """Norm of the last update's gradient, before clipping."""
        return math.nan if self.stepper is None else self.stepper.norm

    @property
    def rates(self) -> Rates | None:
        """Rates of the last update."""
        return None if self.stepper is None or not self.stepper.rates.learning_rates else self.stepper.rates

    def __getattr__(self, name: str) -> Any:
        """Refuse members of the framework's optimizers, and say what to write in their place."""
        instead = INSTEAD.get(name.replace("_", "").lower())
        if instead is None:
            raise AttributeError(f"mtrain's optimizer has no {name!r}; it has update(loss), norm and rates")
        raise NotOfUpdater(f"optimizer.{name}: {instead}")

    def update(self, loss: Any) -> None:
        """Use the loss of the current micro batch; the last one of an update changes the weights.

        Args:
            loss: A single number with a gradient: the mean over the micro batch.

        Raises:
            ScriptError: there is no batch in hands, it was used already, or the loss is not a number with a gradient.
        """
        if self.loop is None or self.stepper is None:
            raise ScriptError("optimizer.update: called outside of `for batch in session.batches(...)`")
        self.loop.use(self.stepper, loss)


class ScriptLoop(Iterator[Any]):
    """The batches of this rank, each of which the script must use once."""

    def __init__(self, loop: Loop, updater: Updater) -> None:
        self.loop = loop
        self._updater = updater
        (updater.stepper,) = loop.job.steppers
        updater.loop = self
        self._is_using = False
        self._own_backward = False
        """Whether the script has computed gradients of the model itself, for the micro batch in hands."""

    @property
    def progress(self) -> Progress:
        """Return the progress of the job."""
        return self.loop.progress

    def saw_gradients(self) -> None:
        """Note a backward pass into the model: while no loss is used, it is one of the script itself."""
        if self.loop.micro is not None and not self._is_using:
            self._own_backward = True

    @property
    def in_loss(self) -> bool:
        """Tell whether a micro batch is in hands whose loss has not been used yet."""
        return self.loop.micro is not None and not all(stepper.used for stepper in self.loop.job.steppers)

    def __next__(self) -> Any:
        """Finish the micro batch before, and return the next one.

        Raises:
            StopIteration: the last update of the job was made.
            ScriptError: the micro batch before was not used.
            Interrupted: some rank was asked to end; the state is saved.
        """
        self._check_used()
        try:
            return next(self.loop).batch
        except StopIteration:
            self._updater.loop = None
            raise
        except RanksDisagree as error:
            raise_difference(error.places, own=error.places[self.loop.job.shares.rank])

    def leave(self) -> None:
        """End the loop before its last update, after ``break``; every rank must call, after the same update.

        Raises:
            ScriptError: the loop was left in the middle of an update, or other ranks go on.
        """
        self._updater.loop = None
        in_middle = self.loop.micro is not None and not self.loop.has_updated
        place = self._place
        try:
            self.loop.leave()
        except RanksDisagree as error:
            raise_difference(error.places, own=error.places[self.loop.job.shares.rank])
        if in_middle:
            raise ScriptError(
                f"session.batches: the loop was left in the middle of {place}; leave it after the optimizer.update(loss) that "
                "completes an update, on all ranks at the same one"
            )

    @property
    def _place(self) -> str:
        number = 0 if self.loop.micro is None else self.loop.micro.number
        return f"update {self.progress.update}, micro batch {number} of {self.loop.job.shares.passes}"

    def use(self, stepper: Stepper, loss: Any) -> None:
        """Use the loss of the micro batch in hands, see ``Updater.update``."""
        if self.loop.micro is None:
            raise ScriptError("optimizer.update: called before the first batch of the loop")
        if self._own_backward:
            raise ScriptError(OWN_BACKWARD)
        if stepper.used:
            raise ScriptError(f"optimizer.update: called twice for one batch ({self._place}); call it once")
        check_loss(loss, self._place)
        self._is_using = True
        try:
            self.loop.use(stepper, loss, {"loss": loss})
        finally:
            self._is_using = False

    def log(self, values: Mapping[str, Any]) -> None:
        """Add values to the record of the current update."""
        if self.loop.micro is None:
            raise ScriptError("session.log: called before the first batch of the loop")
        # ``update`` reports the loss itself.
        self.loop.log({name: value for name, value in values.items() if name != "loss" or self.in_loss})

    def _check_used(self) -> None:
        """Refuse to go on from a micro batch that was not used, or used otherwise."""
        if self.loop.micro is not None and self._own_backward:
            raise ScriptError(OWN_BACKWARD)
        self._own_backward = False
        if self.in_loss:
            place = self._place
            self.loop.close()
            raise ScriptError(
                f"session.batches: optimizer.update(loss) was not called for the batch of {place}; call it once for every "
                "batch"
            )


def raise_difference(places: Sequence[Place], *, own: Place) -> NoReturn:
    """Say how the script's ranks differ that are at different places.

    Raises:
        ScriptError: always.
    """
    update = own.update
    if len({place.order for place in places}) > 1:
        raise ScriptError(
            "session.batches: the ranks read their samples in different orders; give every rank the whole data set, and an "
            "`order` that depends on the epoch alone. mtrain divides the samples among the ranks"
        )
    if len({(place.update, place.leaves) for place in places}) > 1:
        raise ScriptError(
            f"session.batches: some ranks leave the loop after update {update}, and others go on; leave it on all ranks at "
            "the same update, by a decision on values that are equal on all ranks, such as those of session.evaluate"
        )
    raise ScriptError(
        f"session.log: the ranks report different names in update {update} (this rank: {', '.join(own.names) or 'none'}); "
        "log the same names on every rank"
    )


def check_loss(loss: Any, place: str) -> None:
    """Refuse a loss without a gradient, or with several numbers.

    Raises:
        ScriptError: the loss cannot be used; the message says what to do.
    """
    call = f"optimizer.update ({place})"
    if isinstance(loss, Mapping):
        raise ScriptError(f"{call}: the loss is a dict with {', '.join(map(str, loss))}; give one of its values")
    if problem := problem_of(loss):
        raise ScriptError(f"{call}: the loss {problem}")
