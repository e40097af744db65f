"""A DCGAN on small digits, in one process: `python plain.py`."""

import common
import torch
from torch.nn.functional import binary_cross_entropy_with_logits as entropy
from torch.utils.data import DataLoader


def main() -> None:
    """Train both networks, and save their weights."""
    torch.manual_seed(common.SEED)
    dataset = common.Digits()
    loader = DataLoader(dataset, batch_size=common.GLOBAL_BATCH)
    generator = common.Generator()
    of_generator = torch.optim.Adam(generator.parameters(), lr=2e-4, betas=(0.5, 0.999), fused=True)
    discriminator = common.Discriminator()
    of_discriminator = torch.optim.Adam(discriminator.parameters(), lr=2e-4, betas=(0.5, 0.999), fused=True)
    for epoch in range(common.EPOCHS):
        dataset.set_epoch(epoch)
        for images, noise in loader:
            real, fake = torch.ones_like(noise[:, 0, 0, 0]), torch.zeros_like(noise[:, 0, 0, 0])
            of_discriminator.zero_grad()
            entropy(discriminator(images), real).backward()
            made = generator(noise)
            entropy(discriminator(made.detach()), fake).backward()
            of_discriminator.step()
            of_generator.zero_grad()
            entropy(discriminator(made), real).backward()
            of_generator.step()
    torch.save(generator.state_dict(), "G.pt")
    torch.save(discriminator.state_dict(), "D.pt")


if __name__ == "__main__":
    main()
