"""A small network, its batches and what ranks are asked to do with them: studies that the tests of several backends
share.

Each study gets the session of a backend and returns, on every rank, what it found. Arrays go into it as digests: equality is
asked for bit by bit.
"""

import hashlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from mtrain.backends._torch.nn import BatchNorm2d
from mtrain.core.interfaces import Rates, Recipe, State

MICRO_BATCH, SIDE = 4, 8


class Net(nn.Module):
    """Two convolutions, the second 1x1, BatchNorm, a linear head; one more head that only ``extra`` calls ask for."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 3, bias=False)
        self.bn = BatchNorm2d(16, momentum=0.03)
        self.conv2 = nn.Conv2d(16, 8, 1)
        self.head = nn.Linear(8, 4)
        self.extra = nn.Conv2d(3, 4, 3)
        self.never = nn.Parameter(torch.ones(3))

    def forward(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        images = batch["images"].to(self.never.dtype)
        x = torch.nn.functional.silu(self.bn(self.conv1(images)))
        scores = self.head(self.conv2(x).mean((2, 3)))
        if not self.training:
            return {"scores": scores}
        total = torch.nn.functional.cross_entropy(scores, batch["labels"])
        if bool(batch["extra"].any()):
            total = total + self.extra(images).square().mean()
        return {"total": total, "part": total.detach()}


class Whole(Net):
    """Every parameter takes part in every update."""

    def forward(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        losses = super().forward({**batch, "extra": torch.ones(1)})
        return losses if not self.training else {"total": losses["total"] + 0.1 * self.never.square().sum()}


def recipe(**fields: Any) -> Recipe:
    options = {"momentum": 0.9, "nesterov": 1.0, "weight_decay": 1e-3}
    values: dict[str, Any] = {
        "rule": "sgd",
        "groups": (("bias$", {**options, "weight_decay": 0.0}), ("", options)),
        "micro_batch": MICRO_BATCH,
        "accumulate": 2,
        "clip_norm": 1.0,
        "ema_decay": 0.99,
        "ema_ramp": 5.0,
        "seed": 3,
        **fields,
    }
    return Recipe(**values)


def batches(session: Any, *, updates: int, accumulate: int, extra: str = "") -> Iterator[dict[str, np.ndarray]]:
    """Micro batches of this rank; ``extra``: ranks whose second head takes part, in every other update."""
    rank, size = session.collective.rank, session.collective.size
    for update in range(updates):
        for part in range(accumulate):
            generator = np.random.default_rng([update, part, rank, size])
            yield {
                "images": generator.normal(size=(MICRO_BATCH, 3, SIDE, SIDE)).astype(np.float32)
                * (3 if update % 2 else 1),
                "labels": generator.integers(0, 4, MICRO_BATCH),
                "extra": np.array([str(rank) in extra and update % 2 == 0]),
            }


def train(
    session: Any, *, updates: int, net: type[Net] = Whole, extra: str = "", poison: int = -1, **fields: Any
) -> Any:
    """State after ``updates`` and the norms before clipping; in update ``poison`` the last rank's loss is no number."""
    chosen = recipe(**fields)
    model, optimizer = session.prepare(net, chosen)
    loader = session.batches(batches(session, updates=updates, accumulate=chosen.accumulate, extra=extra))
    norms = []
    for update in range(updates):
        for part in range(chosen.accumulate):
            with optimizer.micro_batch(last=part == chosen.accumulate - 1):
                loss = model(next(loader))["total"]
                bad = update == poison and session.collective.rank == session.collective.size - 1
                optimizer.backward(loss * float("nan") if bad else loss)
        norms.append(optimizer.step(Rates(learning_rates=(0.1, 0.05), momentum=0.8 if update < 3 else None)))
    return session.state(model, optimizer), norms


def told(state: State, norms: list[float]) -> dict[str, Any]:
    """Digests of what was learnt."""
    parts = {"weights": state.weights, "ema": state.ema, "moments": state.moments}
    digests = {name: digest(arrays) for name, arrays in parts.items()}
    return {**digests, "norms": [float(norm).hex() for norm in norms], "counters": state.counters}


def digest(arrays: dict[str, np.ndarray]) -> str:
    actual = hashlib.sha256()
    for name, array in sorted(arrays.items()):
        actual.update(name.encode() + array.tobytes())
    return actual.hexdigest()


# ------------------------------------------------------------------------------------------------------------ studies
def fifty_updates(session: Any) -> Any:
    return told(*train(session, updates=50))


def adam(session: Any) -> Any:
    return told(*train(session, updates=6, rule="adam", groups=(("bias$", {}), ("", {"weight_decay": 1e-3}))))


def synced_batchnorm(session: Any) -> Any:
    return told(*train(session, updates=6, sync_batchnorm=True))


def frozen(session: Any) -> Any:
    return told(*train(session, updates=6, frozen=(r"^conv1", r"^bn")))


def channels_last(session: Any) -> Any:
    return told(*train(session, updates=6, channels_last=True))


def channels_last_and_missing(session: Any) -> Any:
    return told(*train(session, updates=6, channels_last=True, net=Net, extra="1", accumulate=1))


def bf16(session: Any) -> Any:
    return told(*train(session, updates=6, precision="bf16"))


def fp16(session: Any) -> Any:
    return told(*train(session, updates=6, precision="fp16"))


def not_finite(session: Any) -> Any:
    return told(*train(session, updates=4, poison=2))


def missing_on_one_rank(session: Any) -> Any:
    return told(*train(session, updates=6, net=Net, extra="1", accumulate=1))


def missing_in_one_micro_batch(session: Any) -> Any:
    """The parameters of the extra head take part in every other update only; ``never`` in none."""
    state, norms = train(session, updates=6, net=Net, extra="012")
    return {"never": state.weights["never"].tolist(), **told(state, norms)}


def evaluation(session: Any) -> Any:
    """Return this rank's outputs for its batch while the averages are in the model."""
    model, optimizer = session.prepare(Whole, recipe())
    batch, *others = session.batches(batches(session, updates=2, accumulate=2))
    for other in others[:2]:  # BatchNorm's statistics differ between ranks afterwards
        with optimizer.micro_batch(last=other is others[1]):
            optimizer.backward(model(other)["total"])
    optimizer.step(Rates(learning_rates=(0.1, 0.05)))
    with optimizer.averaged():
        model.eval()
        scores = session.infer(model, batch)["scores"]
        model.train()
    return {"scores": digest({"scores": scores}), "shape": list(scores.shape)}


def resumed(session: Any) -> Any:
    """Eight updates at once; and four, a new model from the state, four more."""
    whole, _ = train(session, updates=8)
    chosen = recipe()
    model, optimizer = session.prepare(Whole, chosen)
    loader = session.batches(batches(session, updates=8, accumulate=2))
    for update in range(8):
        if update == 4:
            state = session.state(model, optimizer)
            model, optimizer = session.prepare(Whole, chosen)
            session.restore(model, optimizer, state)
        for part in range(2):
            with optimizer.micro_batch(last=part == 1):
                optimizer.backward(model(next(loader))["total"])
        optimizer.step(Rates(learning_rates=(0.1, 0.05), momentum=0.8 if update < 3 else None))
    parts = session.state(model, optimizer)
    return {"whole": told(whole, []), "in two parts": told(parts, [])}
