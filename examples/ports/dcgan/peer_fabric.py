"""The DCGAN on Lightning Fabric: `fabric run --accelerator cpu --devices 2 --strategy ddp peer_fabric.py`."""

import common
import torch
from lightning_fabric import Fabric
from torch.nn.functional import binary_cross_entropy_with_logits as entropy
from torch.utils.data import DataLoader


def main() -> None:
    """Train both networks, and save their weights."""
    fabric = Fabric()
    torch.manual_seed(common.SEED)
    dataset = common.Digits()
    loader = DataLoader(dataset, batch_size=common.GLOBAL_BATCH // fabric.world_size)
    loader = fabric.setup_dataloaders(loader)
    generator = common.Generator()
    of_generator = torch.optim.Adam(generator.parameters(), lr=2e-4, betas=(0.5, 0.999), fused=True)
    generator, of_generator = fabric.setup(generator, of_generator)
    discriminator = common.Discriminator()
    of_discriminator = torch.optim.Adam(discriminator.parameters(), lr=2e-4, betas=(0.5, 0.999), fused=True)
    discriminator, of_discriminator = fabric.setup(discriminator, of_discriminator)
    for epoch in range(common.EPOCHS):
        dataset.set_epoch(epoch)
        for images, noise in loader:
            real, fake = torch.ones_like(noise[:, 0, 0, 0]), torch.zeros_like(noise[:, 0, 0, 0])
            of_discriminator.zero_grad()
            fabric.backward(entropy(discriminator(images), real))
            made = generator(noise)
            fabric.backward(entropy(discriminator(made.detach()), fake))
            of_discriminator.step()
            of_generator.zero_grad()
            fabric.backward(entropy(discriminator(made), real))
            of_generator.step()
    fabric.save("G.pt", generator.state_dict())
    fabric.save("D.pt", discriminator.state_dict())


if __name__ == "__main__":
    main()
