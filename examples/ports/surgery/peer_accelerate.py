"""The gradient surgery on Accelerate: `torchrun --nproc-per-node 2 peer_accelerate.py`."""

import common
import torch
from accelerate import Accelerator, DataLoaderConfiguration
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader


def main() -> None:
    """Train both tasks, leave out updates with a large gradient, and save the weights."""
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(split_batches=True))
    torch.manual_seed(common.SEED)
    loader = DataLoader(common.Digits(train=True), batch_size=common.GLOBAL_BATCH)
    test_set = common.Digits(train=False)
    test_loader = DataLoader(test_set, batch_size=len(test_set))
    model = common.TwoTasks()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-2, fused=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    scheduler = ReduceLROnPlateau(optimizer, factor=0.3, patience=0, threshold=0.3)
    for _ in range(common.EPOCHS):
        for images, classes, ink in loader:
            one, other = common.losses(model(images), classes, ink)
            of_one = torch.autograd.grad(one, model.parameters(), retain_graph=True, materialize_grads=True)
            of_other = torch.autograd.grad(other, model.parameters(), materialize_grads=True)
            of_one = accelerator.reduce(of_one, reduction="mean")
            of_other = accelerator.reduce(of_other, reduction="mean")
            gradients = common.surgery(of_one, of_other)
            if common.norm(gradients) > common.LARGEST_NORM:
                continue
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter.grad = gradient
            optimizer.step()
        error = common.error_of(model, test_loader)
        scheduler.step(error)
        accelerator.print(f"error {error:.4f}, learning rate {scheduler.get_last_lr()[0]:.4f}")
    accelerator.save(accelerator.unwrap_model(model).state_dict(), "weights.pt")


if __name__ == "__main__":
    main()
