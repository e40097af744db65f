"""The DCGAN on mtrain: `mtrain run --nproc-per-node 2 --seed 999 port.py`."""

import common
import torch
from torch.nn.functional import binary_cross_entropy_with_logits as entropy
from torch.utils.data import DataLoader

import mtrain


def main() -> None:
    """Train both networks; the weights are in the run folder."""
    with mtrain.session() as session:
        dataset = common.Digits()
        loader = DataLoader(dataset, batch_size=common.GLOBAL_BATCH)
        adam = mtrain.Adam(learning_rate=2e-4, betas=(0.5, 0.999))
        generator, of_generator = session.prepare(common.Generator, optimizer=adam, sync_batchnorm=True, name="G")
        discriminator, of_discriminator = session.prepare(
            common.Discriminator, optimizer=adam, sync_batchnorm=True, name="D"
        )
        for images, noise in session.batches(loader, epochs=common.EPOCHS):
            real, fake = torch.ones_like(noise[:, 0, 0, 0]), torch.zeros_like(noise[:, 0, 0, 0])
            of_discriminator.backward(entropy(discriminator(images), real))
            made = generator(noise)
            of_discriminator.backward(entropy(discriminator(made.detach()), fake))
            of_discriminator.step()
            of_generator.update(entropy(discriminator(made), real))


if __name__ == "__main__":
    main()
