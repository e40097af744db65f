"""Two tasks whose gradients are kept from working against each other, in one process: `python plain.py`."""

import common
import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader


def main() -> None:
    """Train both tasks, leave out updates with a large gradient, and save the weights."""
    torch.manual_seed(common.SEED)
    loader = DataLoader(common.Digits(train=True), batch_size=common.GLOBAL_BATCH)
    test_set = common.Digits(train=False)
    test_loader = DataLoader(test_set, batch_size=len(test_set))
    model = common.TwoTasks()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-2, fused=True)
    scheduler = ReduceLROnPlateau(optimizer, factor=0.3, patience=0, threshold=0.3)
    for _ in range(common.EPOCHS):
        for images, classes, ink in loader:
            one, other = common.losses(model(images), classes, ink)
            of_one = torch.autograd.grad(one, model.parameters(), retain_graph=True, materialize_grads=True)
            of_other = torch.autograd.grad(other, model.parameters(), materialize_grads=True)
            gradients = common.surgery(of_one, of_other)
            if common.norm(gradients) > common.LARGEST_NORM:
                continue
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter.grad = gradient
            optimizer.step()
        error = common.error_of(model, test_loader)
        scheduler.step(error)
        print(f"error {error:.4f}, learning rate {scheduler.get_last_lr()[0]:.4f}")
    torch.save(model.state_dict(), "weights.pt")


if __name__ == "__main__":
    main()
