"""The WGAN-GP on mtrain: `mtrain run --nproc-per-node 2 --seed 7 port.py`."""

import common
from torch.utils.data import DataLoader

import mtrain


def main() -> None:
    """Train both networks; the weights are in the run folder."""
    with mtrain.session() as session:
        dataset = common.Points()
        loader = DataLoader(dataset, batch_size=common.GLOBAL_BATCH)
        adam = mtrain.Adam(learning_rate=1e-3, betas=(0.0, 0.9))
        generator, of_generator = session.prepare(common.generator, optimizer=adam, name="G")
        critic, of_critic = session.prepare(common.critic, optimizer=adam, name="D")
        for points, noise, places in session.batches(loader, epochs=common.EPOCHS):
            made = generator(noise).detach()
            penalty = common.penalty(critic, points, made, places)
            loss = critic(made).mean() - critic(points).mean() + 10 * penalty
            of_critic.update(loss)
            if (session.progress.update + 1) % common.CRITIC_UPDATES == 0:
                loss = -critic(generator(noise)).mean()
                of_generator.update(loss)


if __name__ == "__main__":
    main()
