"""The driver of the training loop for a script: ``session.batches`` yields micro batches, ``optimizer.update`` uses each of them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NoReturn

import numpy as np

from mtrain.core.interfaces import Progress
from mtrain.core.ranks.agreement import RankPlace, RanksDisagree
from mtrain.core.update.loop import Loop, Weights
from mtrain.core.update.losses import problem_of
from mtrain.core.update.stepping import MADE, MicroBatch, Stepper, Use
from mtrain.errors import ScriptError
from mtrain.rank.script.gradients import OWN_BACKWARD
from mtrain.rank.script.loss_weights import LossKind, LossWeights
from mtrain.rank.script.states import TRANSITIONS, describe_refusal


class ScriptLoop(Iterator[Any]):
    """The batches of this rank, each of which the script must use once."""

    def __init__(
        self, loop: Loop, *, differs: str, undisturbed: Callable[[], AbstractContextManager[None]] = nullcontext
    ) -> None:
        """Drive ``loop``; ``differs``: what is said where the ranks have trained on different samples."""
        self.loop = loop
        self.has_ended = False
        """Whether the last update was made, or the loop was left."""
        self._differs = differs
        self._undisturbed = undisturbed
        self._is_using = False
        """Whether a backward pass is mtrain's."""
        self._own_backward = False
        """Whether the script has computed gradients of the model itself, for the micro batch in hands."""
        self._searches: dict[Stepper, list[list[float]]] = {}
        """The losses of each call of a closure so far, by the model whose step has called it."""
        self._weights: dict[Stepper, LossWeights] = {}
        """Weights of the losses of each optimizer."""

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
        """Tell whether a micro batch is in hands no loss of which has been used yet."""
        return self.loop.micro is not None and not any(stepper.used for stepper in self.loop.job.steppers)

    @property
    def in_middle(self) -> bool:
        """Tell whether a micro batch is in hands that is not the last one of its update."""
        return self.loop.micro is not None and not self.loop.micro.last

    def __next__(self) -> Any:
        """Finish the micro batch before, and return the next one.

        Raises:
            StopIteration: the last update of the job was made.
            ScriptError: the micro batch before was not used.
            Interrupted: some rank was asked to end; the state is saved.
        """
        with self._finishing():
            try:
                return next(self.loop).batch
            except StopIteration:
                self.has_ended = True
                raise

    def settle(self) -> None:
        """Finish the micro batch before without a next one, see ``Loop.settle``; raises what ``__next__`` does."""
        with self._finishing():
            self.loop.settle()
        self.has_ended = self.loop.is_complete

    @contextmanager
    def _finishing(self) -> Iterator[None]:
        # First of all: a micro batch that was not used would leave the ranks at different updates.
        self.check_used()
        try:
            with self._undisturbed():
                yield
        except RanksDisagree as error:
            raise_difference(error.places, own=error.places[self.loop.job.shares.rank], differs=self._differs)

    def leave(self) -> None:
        """End the loop before its last update, after ``break``; every rank must call, after the same update.

        Raises:
            ScriptError: the loop was left in the middle of an update, or other ranks go on.
        """
        # Before the ranks agree, so that an optimizer that is called afterwards says that the loop is over.
        self.has_ended = True
        in_middle = self.loop.micro is not None and not self.loop.has_updated
        place = self._place
        try:
            self.loop.leave()
        except RanksDisagree as error:
            raise_difference(error.places, own=error.places[self.loop.job.shares.rank], differs=self._differs)
        if in_middle:
            raise ScriptError(
                f"session.batches: the loop was left in the middle of {place}; leave it after the optimizer.update(loss) that "
                "completes an update, on all ranks at the same one"
            )

    @property
    def _place(self) -> str:
        number = 0 if self.loop.micro is None else self.loop.micro.number
        return f"update {self.progress.update}, micro batch {number} of {self.loop.job.shares.passes}"

    def backward(self, stepper: Stepper, loss: Any, *, retain_graph: bool, call: str, kind: LossKind) -> None:
        """Take a loss of the micro batch in hands, see ``Updater.backward``."""
        self._check_loss(stepper, loss, call)
        weights = self._weigh(stepper, kind)
        # A closure is called again and again, and the update is reported by the losses of its first call.
        evaluations = self._searches.get(stepper, [])
        # A mean over nothing may be no number, and is no part of the mean over all.
        reported = loss if weights[0] or kind.weight is None else 0.0
        with self._using():
            metrics = {} if len(evaluations) > 1 else {self._loss_name(stepper): reported}
            self.loop.backward(stepper, loss, metrics, retain_graph=retain_graph, weights=weights)
        if evaluations:
            evaluations[-1].append(float(loss.detach() if hasattr(loss, "detach") else loss) * weights[0])

    def _weigh(self, stepper: Stepper, kind: LossKind) -> Weights:
        """Return what a loss of the micro batch in hands counts, see ``LossWeights.take``."""
        job, micro = self.loop.job, self.loop.micro
        assert micro is not None
        if stepper not in self._weights:
            self._weights[stepper] = LossWeights(job.shares, job.session.collective)
        return self._weights[stepper].take(kind, micro, is_further=stepper.used, place=lambda: self._place)

    def gradients_of(self, stepper: Stepper, loss: Any, *, retain_graph: bool, kind: LossKind) -> Mapping[str, Any]:
        """Take a loss of the micro batch in hands, and return its own gradients, see ``Updater.gradients``."""
        self._check_loss(stepper, loss, "gradients(loss)")
        self._check_whole(stepper, "gradients(loss)")
        metrics = {self._loss_name(stepper): loss}
        weight, _ = self._weigh(stepper, kind)
        with self._using():
            return self.loop.gradients_of(stepper, loss, metrics, retain_graph=retain_graph, weight=weight)

    def _check(self, stepper: Stepper, call: str) -> MicroBatch:
        """Refuse a call that cannot be made now; return the micro batch in hands."""
        micro = self.loop.micro
        if micro is None:
            raise ScriptError(f"{self._optimizer(stepper)}.{call}: called before the first batch of the loop")
        if self._own_backward:
            raise ScriptError(OWN_BACKWARD)
        if stepper.use not in TRANSITIONS[call]:
            self._refuse(stepper, call, describe_refusal(call, stepper.use, optimizer=self._optimizer(stepper)))
        return micro

    def _refuse(self, stepper: Stepper, call: str, words: str) -> NoReturn:
        raise ScriptError(f"{self._optimizer(stepper)}.{call} ({self._place}): {words}")

    def _check_loss(self, stepper: Stepper, loss: Any, call: str) -> None:
        """Refuse a loss that cannot be taken now."""
        micro = self._check(stepper, call)
        # A model that exchanges its gradients while they are computed has sent them by now.
        if stepper.use is Use.TAKEN and not stepper.own_order:
            self._refuse(stepper, call, describe_refusal("update", stepper.use, optimizer=self._optimizer(stepper)))
        if stepper.taken < micro.number:
            self._refuse(
                stepper, call, "called for some micro batches of an update and not for all; call it for each or none"
            )
        # With a single pass every rank steps at the same place, so a loss after it goes through the same weights on all.
        if self.loop.job.shares.passes > 1 and any(other.use in MADE for other in self.loop.job.steppers):
            self._refuse(
                stepper,
                call,
                "called after the step of another model, but a model steps after the last micro batch of "
                "an update only, so this loss would go through weights that other ranks have changed already; call "
                "`backward` of all models first, and then `step` of all, or train with accumulate=1 and a rank for each shard",
            )
        if isinstance(loss, Mapping):
            self._refuse(stepper, call, f"the loss is a dict with {', '.join(map(str, loss))}; give one of its values")
        if problem := problem_of(loss):
            self._refuse(stepper, call, f"the loss {problem}")

    def _check_whole(self, stepper: Stepper, call: str) -> None:
        """Refuse a call that needs the gradients of a whole update from one backward pass."""
        if not stepper.own_order:
            self._refuse(
                stepper,
                call,
                "needs a model whose gradients are exchanged afterwards; write session.prepare(..., overlap=False)",
            )
        if (passes := self.loop.job.shares.passes) > 1:
            self._refuse(
                stepper,
                call,
                f"needs the whole update in one micro batch, and this rank has {passes} of an update; train with accumulate=1 "
                "and a rank for each shard",
            )

    def step(self, stepper: Stepper, *, skips: bool = False) -> None:
        """Change the weights of a model, or drop its gradient, if the micro batch in hands is the last of its update."""
        call = "skip" if skips else "step"
        micro = self._check(stepper, call)
        if stepper.asked not in ("", call):
            self._refuse(
                stepper,
                call,
                f"called after {stepper.asked}() for an earlier micro batch of the update, of which all are used or none; decide "
                "once per update, after its last micro batch",
            )
        stepper.asked = call
        if not micro.last:
            stepper.use = Use.ASKED
            return
        with self._using():  # an exchange may run backward passes of its own
            stepper.skip() if skips else stepper.step()

    def step_by(self, stepper: Stepper, closure: Callable[[], Any]) -> Any:
        """Change the weights of a model by a closure, see ``Updater.step``."""
        self._check(stepper, "step(closure)")
        shares = self.loop.job.shares
        self._check_whole(stepper, "step(closure)")
        results: list[Any] = []

        def evaluate() -> float:
            stepper.use = Use.SEARCHING
            losses.append([])
            results.append(closure())
            if stepper.use is not Use.SEARCHED:
                name = self._optimizer(stepper)
                raise ScriptError(
                    f"{name}.step(closure): the closure did not call {name}.backward(loss); call it once in each call"
                )
            own = sum(losses[-1])
            # The mean over all ranks: an optimizer that searches along a line must take the same steps on each.
            return float(self.loop.job.session.collective.all_reduce(np.array([own]), "sum")[0]) / shares.size

        losses = self._searches[stepper] = []
        try:
            stepper.step_by(evaluate)
        finally:
            del self._searches[stepper]
        return results[0]

    def gradients(self, stepper: Stepper) -> Mapping[str, Any]:
        """Return the gradients of a model, see ``Updater.gradients``."""
        if not self._check(stepper, "gradients").last:
            self._refuse(stepper, "gradients", "they are there after the last micro batch of an update")
        with self._using():
            return stepper.gradients()

    @contextmanager
    def _using(self) -> Iterator[None]:
        """Return a context in which backward passes are not the script's own."""
        self._is_using = True
        try:
            yield
        finally:
            self._is_using = False

    def _optimizer(self, stepper: Stepper) -> str:
        """Return how messages name an optimizer."""
        return f"{stepper.name}'s optimizer" if stepper.name else "optimizer"

    def _loss_name(self, stepper: Stepper) -> str:
        """Return the name of the losses of a model in records."""
        return f"loss_{stepper.name}" if stepper.name else "loss"

    def log(self, values: Mapping[str, Any]) -> None:
        """Add values to the record of the current update."""
        if self.loop.micro is None:
            raise ScriptError("session.log: called before the first batch of the loop")
        # ``update`` reports the losses themselves.
        reported = {self._loss_name(stepper) for stepper in self.loop.job.steppers if stepper.used}
        self.loop.log({name: value for name, value in values.items() if name not in reported})

    def check_used(self) -> None:
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
        if self.loop.micro is None:
            return
        for stepper in self.loop.job.steppers:
            partly = 0 < stepper.taken <= self.loop.micro.number
            if partly or (self.loop.micro.last and stepper.pending):
                place, name = self._place, self._optimizer(stepper)
                self.loop.close()
                raise ScriptError(
                    f"session.batches: {name}.{'backward(loss)' if partly else 'step()'} was not called for the batch of "
                    f"{place}, but its gradient was computed; call it, or {name}.skip() after the last micro batch; for one step per "
                    "several batches, session.prepare(..., accumulate=)"
                )


def raise_difference(places: Sequence[RankPlace], *, own: RankPlace, differs: str) -> NoReturn:
    """Say how the script's ranks differ that are at different places; ``differs``: where their samples are different.

    Raises:
        ScriptError: always.
    """
    update = own.update
    # From the cause to its effects: ranks that read other samples differ in everything that follows.
    if len({place.order for place in places}) > 1:
        raise ScriptError(differs)
    if len({place.models for place in places}) > 1:
        raise ScriptError(
            f"session.batches: the ranks have trained different models in update {update} (this rank: "
            f"{', '.join(own.models) or 'none'}); decide by values that are equal on all ranks which model is trained"
        )
    if len({place.skips for place in places}) > 1:
        left_out = ", ".join(str(number) for number, place in enumerate(places) if place.skips)
        raise ScriptError(
            f"optimizer.skip: ranks {left_out} of {len(places)} have left out update {update}, which the others have made; decide by "
            "values that are equal on all ranks, such as those of optimizer.gradients()"
        )
    if len({(place.learning_rates, place.momenta) for place in places}) > 1:
        raise ScriptError(
            f"session.batches: the ranks have different learning rates or momenta in update {update} (this rank: "
            f"{', '.join(f'{rate:g}' for rate in own.learning_rates)}); step the scheduler by a value that is equal on all ranks, such as "
            "those of session.evaluate"
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
