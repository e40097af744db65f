"""The DCGAN on Accelerate: `torchrun --nproc-per-node 2 peer_accelerate.py`."""

import common
import torch
from accelerate import Accelerator, DataLoaderConfiguration
from torch.nn.functional import binary_cross_entropy_with_logits as entropy
from torch.utils.data import DataLoader


def main() -> None:
    """Train both networks, and save their weights."""
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(split_batches=True))
    torch.manual_seed(common.SEED)
    dataset = common.Digits()
    loader = DataLoader(dataset, batch_size=common.GLOBAL_BATCH)
    generator = common.Generator()
    of_generator = torch.optim.Adam(generator.parameters(), lr=2e-4, betas=(0.5, 0.999), fused=True)
    discriminator = common.Discriminator()
    of_discriminator = torch.optim.Adam(discriminator.parameters(), lr=2e-4, betas=(0.5, 0.999), fused=True)
    generator, of_generator, discriminator, of_discriminator, loader = accelerator.prepare(
        generator, of_generator, discriminator, of_discriminator, loader
    )
    for epoch in range(common.EPOCHS):
        dataset.set_epoch(epoch)
        for images, noise in loader:
            real, fake = torch.ones_like(noise[:, 0, 0, 0]), torch.zeros_like(noise[:, 0, 0, 0])
            of_discriminator.zero_grad()
            accelerator.backward(entropy(discriminator(images), real))
            made = generator(noise)
            accelerator.backward(entropy(discriminator(made.detach()), fake))
            of_discriminator.step()
            of_generator.zero_grad()
            accelerator.backward(entropy(discriminator(made), real))
            of_generator.step()
    accelerator.save(accelerator.unwrap_model(generator).state_dict(), "G.pt")
    accelerator.save(accelerator.unwrap_model(discriminator).state_dict(), "D.pt")


if __name__ == "__main__":
    main()
