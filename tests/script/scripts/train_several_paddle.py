"""A GAN of Paddle; with `--plain FILE` the same as a plain script on one rank."""

import argparse

import numpy as np
import paddle
from paddle import nn

import mtrain

SAMPLES, BATCH, SEED = 48, 12, 3
paddle.set_default_dtype("float64")


class Noisy:
    """Points of two kinds with noise."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        numbers = np.random.default_rng(index).normal(size=14)
        return numbers[:6] + index % 2, numbers[6:]


def generator() -> nn.Layer:
    """Build the model that makes points of noise."""
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 6))


def discriminator() -> nn.Layer:
    """Build the model that tells points of the data from made ones."""
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))


def adam(model: nn.Layer) -> paddle.optimizer.Optimizer:
    """Return the optimizer of the plain script and of the port."""
    return paddle.optimizer.Adam(learning_rate=5e-3, beta1=0.5, parameters=model.parameters())


def plateau(learning_rate: float) -> paddle.optimizer.lr.LRScheduler:
    """Return the scheduler of the generator."""
    return paddle.optimizer.lr.ReduceOnPlateau(learning_rate, factor=0.5, patience=1)


def losses(judge: nn.Layer, x: paddle.Tensor, made: paddle.Tensor) -> paddle.Tensor:
    """Return the loss of the discriminator."""
    entropy = nn.functional.binary_cross_entropy_with_logits
    of_data, of_made = judge(x), judge(made.detach())
    return entropy(of_data, paddle.ones_like(of_data)) + entropy(of_made, paddle.zeros_like(of_made))


def fooled(judge: nn.Layer, made: paddle.Tensor) -> paddle.Tensor:
    """Return the loss of the generator."""
    logits = judge(made)
    return nn.functional.binary_cross_entropy_with_logits(logits, paddle.ones_like(logits))


def plain(updates: int, file: str) -> None:
    """Train without mtrain."""
    paddle.seed(SEED)
    maker = generator()
    judge = discriminator()
    of_judge, scheduler = adam(judge), plateau(5e-3)
    of_maker = paddle.optimizer.Adam(learning_rate=scheduler, beta1=0.5, parameters=maker.parameters())
    for update in range(updates):
        first = update * BATCH % SAMPLES
        x, z = (
            paddle.to_tensor(np.stack(part))
            for part in zip(*map(Noisy().__getitem__, range(first, first + BATCH)), strict=True)
        )
        made = maker(z)
        losses(judge, x, made).backward()
        of_judge.step()
        of_judge.clear_grad()
        fooled(judge, made).backward()
        of_maker.step()
        of_maker.clear_grad()
        of_judge.clear_grad()
        scheduler.step(1.0)
    arrays = {
        f"{name}/{key}": x.numpy()
        for name, model in (("G", maker), ("D", judge))
        for key, x in model.state_dict().items()
    }
    np.savez(file, **arrays)


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--updates", type=int, default=10)
    parser.add_argument("--plain", metavar="FILE")
    chosen = parser.parse_args()
    if chosen.plain:
        plain(chosen.updates, chosen.plain)
        return
    with mtrain.session() as session:
        maker, of_maker = session.prepare(generator, optimizer=adam, name="G", seed=SEED, scheduler=plateau)
        judge, of_judge = session.prepare(discriminator, optimizer=adam, name="D")
        for x, z in session.batches(
            Noisy(), global_batch=BATCH, updates=chosen.updates, order=lambda epoch: range(SAMPLES)
        ):
            made = maker(z)
            of_judge.update(losses(judge, x, made))
            of_maker.update(fooled(judge, made))
            of_maker.scheduler.step(1.0)


if __name__ == "__main__":
    main()
