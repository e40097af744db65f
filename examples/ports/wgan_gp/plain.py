"""A Wasserstein GAN with a gradient penalty, in one process: `python plain.py`."""

import common
import torch
from torch.utils.data import DataLoader


def main() -> None:
    """Train both networks, and save their weights."""
    torch.manual_seed(common.SEED)
    dataset = common.Points()
    loader = DataLoader(dataset, batch_size=common.GLOBAL_BATCH)
    generator = common.generator()
    of_generator = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.0, 0.9), fused=True)
    critic = common.critic()
    of_critic = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.0, 0.9), fused=True)
    update = 0
    for epoch in range(common.EPOCHS):
        dataset.set_epoch(epoch)
        for points, noise, places in loader:
            made = generator(noise).detach()
            penalty = common.penalty(critic, points, made, places)
            loss = critic(made).mean() - critic(points).mean() + 10 * penalty
            of_critic.zero_grad()
            loss.backward()
            of_critic.step()
            update += 1
            if update % common.CRITIC_UPDATES == 0:
                of_generator.zero_grad()
                loss = -critic(generator(noise)).mean()
                loss.backward()
                of_generator.step()
    torch.save(generator.state_dict(), "G.pt")
    torch.save(critic.state_dict(), "D.pt")


if __name__ == "__main__":
    main()
