"""A GAN with a slow copy of its generator for `mtrain compare`, that trains wrongly in some runs: `--faults FAULT=RUN FOLDER ...`."""

import argparse

from points import Plain
from torch import Tensor, autograd, nn
from torch.nn.functional import softplus
from torch.optim.lr_scheduler import ReduceLROnPlateau

import mtrain


def network() -> nn.Module:
    """Build a network; generator, critic and copy have one form."""
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))


def score(critic: nn.Module, x: Tensor) -> Tensor:
    """Return the score of points."""
    return critic(x).mean(1)


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--faults", nargs="*", default=[])
    flags = parser.parse_args()
    faults = {folder: fault for fault, _, folder in (pair.partition("=") for pair in flags.faults)}
    with mtrain.session() as session:
        fault = faults.get(session.run_dir.name, "none")
        sgd = mtrain.SGD(learning_rate=0.1, momentum=0.9)
        generator, of_generator = session.prepare(network, optimizer=sgd, name="G", precision="fp64")
        critic, of_critic = session.prepare(
            network,
            optimizer=sgd,
            name="D",
            scheduler=lambda optimizer: ReduceLROnPlateau(optimizer, factor=0.5, patience=0),
        )
        first = of_critic.scheduler.state_dict()
        trains_copy = fault == "target"
        slow, of_slow = session.prepare(network, optimizer=sgd if trains_copy else None, name="slow")
        if not trains_copy:
            session.follow(slow, generator)
        for x, _ in session.batches(Plain(48, 0), global_batch=12, epochs=2):
            update = session.progress.update
            made = generator(x)
            of_critic.backward(softplus(-score(critic, x)).mean() + softplus(score(critic, made.detach())).mean())
            fooled = softplus(-score(critic, made)).mean()
            if fault == "given" and update == 2:
                of_critic.backward(fooled, retain_graph=True)
            if fault == "left" and update == 2:
                further = autograd.grad(fooled, critic.parameters(), retain_graph=True)
                for gradient, other in zip(of_critic.gradients().values(), further, strict=True):
                    gradient.add_(other)
            of_generator.backward(fooled)
            of_generator.step()
            if fault == "skip" and update == 3 and session.rank == session.size - 1:
                of_critic.skip()
            else:
                of_critic.step()
            if trains_copy:
                of_slow.update((slow(x) - x).square().mean())
            else:
                session.follow(slow, critic if fault == "average" and update == 2 else generator, 0.1)
            of_critic.scheduler.step(1.0)
            if fault == "plateau" and update == 3:  # as a job that goes on without the scheduler's state
                of_critic.scheduler.load_state_dict(first)
                of_critic.scheduler.optimizer.param_groups[0]["lr"] = 0.1


if __name__ == "__main__":
    main()
