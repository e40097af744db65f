"""Loops with several models, or with an order of their own; with `--plain FILE` the same as a plain script of torch, on one rank.

The noise of a sample is part of it, so that training is the same on any number of ranks.
"""

import argparse
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

import mtrain

SAMPLES, BATCH, SEED = 48, 12, 3
DROPOUT = float(os.environ.get("DROPOUT", 0))
SCHEDULE = mtrain.Cosine() if "SCHEDULE" in os.environ else None


class Noisy(torch.utils.data.Dataset):
    """Points of two kinds, each with its kind and noise."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        numbers = np.random.default_rng(index).normal(size=14).astype(np.float32)
        return torch.from_numpy(numbers[:6] + index % 2), torch.from_numpy(numbers[6:])


class Generator(nn.Module):
    """Makes a point of noise."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Tanh(), nn.Linear(16, 6))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, z: Tensor) -> Tensor:
        self.calls += 1
        return self.layers(z)


class Discriminator(nn.Module):
    """Tells points of the data from those of the generator."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(DROPOUT), nn.Linear(16, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).squeeze(1)


def adam(module: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer of the plain script and of the session."""
    return torch.optim.Adam(module.parameters(), lr=5e-3, betas=(0.5, 0.999))


def real(logits: Tensor) -> Tensor:
    """Return the loss of a discriminator that should say 1."""
    return functional.binary_cross_entropy_with_logits(logits, torch.ones_like(logits))


def fake(logits: Tensor) -> Tensor:
    """Return the loss of a discriminator that should say 0."""
    return functional.binary_cross_entropy_with_logits(logits, torch.zeros_like(logits))


def penalty(critic: nn.Module, x: Tensor, made: Tensor) -> Tensor:
    """Return the gradient penalty of WGAN-GP between a point and a made one."""
    between = (0.3 * x + 0.7 * made).requires_grad_()
    (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
    return ((slope.norm(dim=1) - 1) ** 2).mean()


# ------------------------------------------------------------------------------------------------------- plain loops
class Plain:
    """An optimizer of torch behind the calls of mtrain's, as a plain script of one rank would write them."""

    def __init__(self, module: nn.Module) -> None:
        self.module, self.optimizer = module, adam(module)
        self.scheduler: Any = None

    def update(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        self.optimizer.zero_grad()
        self.backward(loss, retain_graph=retain_graph)
        self.optimizer.step()

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        parameters = list(self.module.parameters())
        for parameter, gradient in zip(
            parameters, torch.autograd.grad(loss, parameters, retain_graph=retain_graph), strict=True
        ):
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient

    def gradients(self) -> dict[str, Tensor]:
        return {name: parameter.grad for name, parameter in self.module.named_parameters()}  # type: ignore[misc]

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def skip(self) -> None:
        self.optimizer.zero_grad()


class Untrained:
    """A model without an optimizer."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        for parameter in module.parameters():
            parameter.requires_grad = False


class PlainSession:
    """The calls of ``mtrain.session`` that the loops below make, as a plain script of one rank would write them."""

    update = 0

    def __init__(self) -> None:
        self.optimizers: dict[str, Plain] = {}

    @property
    def progress(self) -> "PlainSession":
        return self

    def prepare(
        self, build: Callable[[], nn.Module], *, optimizer: Any = None, name: str = "", scheduler: Any = None, **_: Any
    ) -> tuple[nn.Module, Plain]:
        if not self.optimizers:
            torch.manual_seed(SEED)
        module = build().double()
        self.optimizers[name] = Plain(module) if optimizer is not None else Untrained(module)
        if scheduler is not None:
            self.optimizers[name].scheduler = scheduler(self.optimizers[name].optimizer)
        return module, self.optimizers[name]

    def backward(self, loss: Tensor) -> None:
        for optimizer in self.optimizers.values():
            optimizer.backward(loss, retain_graph=True)

    def follow(self, target: nn.Module, source: nn.Module, tau: float = 1.0) -> None:
        with torch.no_grad():
            for own, other in zip(target.parameters(), source.parameters(), strict=True):
                own.lerp_(other, tau) if tau < 1 else own.copy_(other)
            for own, other in zip(target.buffers(), source.buffers(), strict=True):
                own.copy_(other)

    def batches(self, *_: Any, updates: int, **__: Any) -> Iterator[list[Tensor]]:
        data = Noisy()
        for self.update in range(updates):
            first = self.update * BATCH % SAMPLES
            batch = [data[index] for index in range(first, first + BATCH)]
            yield [torch.stack(part).double() for part in zip(*batch, strict=True)]

    def weights(self) -> dict[str, Any]:
        """Return the weights, under mtrain's names."""
        return {
            f"{name}/{key}" if name else key: x.numpy()
            for name, optimizer in self.optimizers.items()
            for key, x in optimizer.module.state_dict().items()
        }


# --------------------------------------------------------------------------------------------------------- the loops
def gan(session: Any, length: dict[str, Any]) -> None:
    """A GAN as in pytorch/examples' dcgan: the gradient of the generator goes through the discriminator."""
    generator, of_generator = session.prepare(Generator, optimizer=adam, name="G", seed=SEED)
    discriminator, of_discriminator = session.prepare(Discriminator, optimizer=adam, name="D")
    for x, z in session.batches(Noisy(), **length):
        made = generator(z)
        of_discriminator.update(real(discriminator(x)) + fake(discriminator(made.detach())))
        of_generator.update(real(discriminator(made)))
        killed_after(session)


def together(session: Any, length: dict[str, Any]) -> None:
    """A GAN whose losses are all computed before a step, so that a rank may compute shards one after the other."""
    generator, of_generator = session.prepare(Generator, optimizer=adam, name="G", seed=SEED)
    discriminator, of_discriminator = session.prepare(Discriminator, optimizer=adam, name="D")
    for x, z in session.batches(Noisy(), **length):
        made = generator(z)
        of_discriminator.backward(real(discriminator(x)) + fake(discriminator(made.detach())))
        of_generator.backward(real(discriminator(made)))
        of_discriminator.step()
        of_generator.step()


def critic(session: Any, length: dict[str, Any]) -> None:
    """WGAN-GP: second derivatives, and a generator that is trained after every third batch only."""
    generator, of_generator = session.prepare(Generator, optimizer=adam, name="G", seed=SEED, schedule=SCHEDULE)
    discriminator, of_critic = session.prepare(Discriminator, optimizer=adam, name="D")
    for x, z in session.batches(Noisy(), **length):
        made = generator(z).detach()
        of_critic.update(discriminator(made).mean() - discriminator(x).mean() + 10 * penalty(discriminator, x, made))
        if session.progress.update % 3 == 2:
            of_generator.update(-discriminator(generator(z)).mean())
        killed_after(session)


def joint(session: Any, length: dict[str, Any]) -> None:
    """One loss of two models with an optimizer each."""
    decoder, of_decoder = session.prepare(Generator, optimizer=adam, name="decoder", seed=SEED)
    encoder, of_encoder = session.prepare(lambda: nn.Linear(6, 8), optimizer=adam, name="encoder")
    for x, _ in session.batches(Noisy(), **length):
        session.backward(functional.mse_loss(decoder(encoder(x)), x))
        of_encoder.step()
        of_decoder.step()


def surgery(session: Any, length: dict[str, Any]) -> None:
    """One model, two losses, gradients clipped by value, and every fourth update left out."""
    model, optimizer = session.prepare(Discriminator, optimizer=adam, overlap=False, seed=SEED)
    for x, z in session.batches(Noisy(), **length):
        logits = model(x)
        optimizer.backward(real(logits), retain_graph=True)
        optimizer.backward((logits.square() * z[:, 0].abs()).mean())
        for gradient in optimizer.gradients().values():
            gradient.clamp_(-0.02, 0.02)
        if session.progress.update % 4 == 3:
            optimizer.skip()
        else:
            optimizer.step()


def steps(session: Any, length: dict[str, Any]) -> None:
    """One model in the three steps of a plain loop; gradients are exchanged while they are computed."""
    model, optimizer = session.prepare(Discriminator, optimizer=adam, seed=SEED)
    for x, _ in session.batches(Noisy(), **length):
        session.backward(real(model(x)))
        assert all(gradient.isfinite().all() for gradient in optimizer.gradients().values())
        optimizer.step()


def loader(session: Any, length: dict[str, Any]) -> None:
    """A plain script's DataLoader, whose sampler draws by weights from a generator of its own."""
    weights = torch.linspace(0.1, 1, SAMPLES)
    sampler = torch.utils.data.WeightedRandomSampler(weights, 36, generator=torch.Generator().manual_seed(1))
    batches = torch.utils.data.DataLoader(Noisy(), batch_size=BATCH, sampler=sampler, num_workers=1)
    model, optimizer = session.prepare(Discriminator, optimizer=adam, seed=SEED)
    for x, _ in session.batches(batches, updates=length["updates"]):
        optimizer.update(real(model(x)))
        killed_after(session)


def plateau(session: Any, length: dict[str, Any]) -> None:
    """A schedule that sees a metric, and one that is stepped in each epoch, for two models."""
    one, of_one = session.prepare(
        Discriminator,
        optimizer=adam,
        name="one",
        seed=SEED,
        scheduler=lambda optimizer: torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=1),
    )
    other, of_other = session.prepare(
        Discriminator,
        optimizer=adam,
        name="other",
        scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.7),
    )
    for x, _ in session.batches(Noisy(), **length):
        of_one.update(real(one(x)))
        of_other.update(fake(other(x)))
        of_one.scheduler.step(1.0 if "SEES_ITS_RANK" not in os.environ else -session.rank * session.progress.update)
        if session.progress.update % 4 == 3:
            of_other.scheduler.step()
        killed_after(session)


def target(session: Any, length: dict[str, Any]) -> None:
    """A network that learns from a slow copy of itself, which no update trains."""
    online, optimizer = session.prepare(Generator, optimizer=adam, name="online", seed=SEED)
    slow, _ = session.prepare(Generator, name="slow")
    for x, z in session.batches(Noisy(), **length):
        optimizer.update(functional.mse_loss(online(z), x + 0.9 * slow(z)))
        session.follow(slow, online, 0.1)
        killed_after(session)


def dqn(session: Any, length: dict[str, Any]) -> None:
    """A network whose targets are computed by a copy of itself, which is made at the start and now and then."""
    copy, _ = session.prepare(Generator, name="copy", seed=SEED)
    online, optimizer = session.prepare(Generator, optimizer=adam, name="online")
    session.follow(copy, online)
    for x, z in session.batches(Noisy(), **length):
        optimizer.update(functional.mse_loss(online(z), x + 0.9 * copy(z)))
        if session.progress.update % 4 == 3:
            session.follow(copy, online)
        killed_after(session)


def sac(session: Any, length: dict[str, Any]) -> None:
    """An actor and two critics with three optimizers, and slow copies of the critics."""
    actor, of_actor = session.prepare(Generator, optimizer=adam, name="actor", seed=SEED)
    critics, slow = [], []
    for number in range(2):
        critics.append(session.prepare(Discriminator, optimizer=adam, name=f"critic{number}"))
        slow.append(session.prepare(Discriminator, name=f"slow{number}")[0])
        session.follow(slow[-1], critics[-1][0])
    for x, z in session.batches(Noisy(), **length):
        with torch.no_grad():
            aim = x[:, 0] + 0.9 * torch.minimum(slow[0](actor(z)), slow[1](actor(z)))
        for critic_of, of_critic in critics:
            of_critic.update(functional.mse_loss(critic_of(x), aim))
        made = actor(z)
        of_actor.update(-torch.minimum(critics[0][0](made), critics[1][0](made)).mean())
        for own, (critic_of, _) in zip(slow, critics, strict=True):
            session.follow(own, critic_of, 0.05)
        killed_after(session)


def apart(session: Any, length: dict[str, Any]) -> None:
    """A mistake: each rank leaves out the updates of another model."""
    one, of_one = session.prepare(Discriminator, optimizer=adam, name="one", seed=SEED)
    other, of_other = session.prepare(Discriminator, optimizer=adam, name="other")
    for x, _ in session.batches(Noisy(), **length):
        if session.rank == 0:
            of_one.update(real(one(x)))
        else:
            of_other.update(real(other(x)))


LOOPS = {
    "gan": gan,
    "together": together,
    "critic": critic,
    "joint": joint,
    "surgery": surgery,
    "steps": steps,
    "loader": loader,
    "plateau": plateau,
    "target": target,
    "dqn": dqn,
    "sac": sac,
    "apart": apart,
}


def killed_after(session: Any) -> None:
    """Kill this rank in the update that the environment names."""
    if session.progress.update == int(os.environ.get("KILLED_IN", -1)):
        os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("loop", choices=LOOPS)
    parser.add_argument("--updates", type=int, default=10)
    parser.add_argument("--plain", metavar="FILE")
    chosen = parser.parse_args()
    length = {"global_batch": BATCH, "updates": chosen.updates, "order": lambda epoch: range(SAMPLES)}
    if chosen.plain:
        session = PlainSession()
        LOOPS[chosen.loop](session, length)
        np.savez(chosen.plain, **session.weights())
        return
    with mtrain.session() as session:
        LOOPS[chosen.loop](session, length)


if __name__ == "__main__":
    main()
