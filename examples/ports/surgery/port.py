"""The gradient surgery on mtrain: `mtrain run --nproc-per-node 2 --seed 13 port.py`."""

import common
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader

import mtrain


def main() -> None:
    """Train both tasks, and leave out updates with a large gradient; the weights are in the run folder."""
    with mtrain.session() as session:
        loader = DataLoader(common.Digits(train=True), batch_size=common.GLOBAL_BATCH)
        test_set = common.Digits(train=False)
        test_loader = DataLoader(test_set, batch_size=len(test_set))
        model, optimizer = session.prepare(
            common.TwoTasks,
            optimizer=mtrain.Adam(learning_rate=2e-2),
            scheduler=lambda optimizer: ReduceLROnPlateau(optimizer, factor=0.3, patience=0, threshold=0.3),
            overlap=False,
        )
        for _ in session.epochs(common.EPOCHS):
            for images, classes, ink in session.batches(loader):
                one, other = common.losses(model(images), classes, ink)
                of_one = optimizer.gradients(one, retain_graph=True).values()
                of_other = optimizer.gradients(other).values()
                gradients = common.surgery(of_one, of_other)
                if common.norm(gradients) > common.LARGEST_NORM:
                    optimizer.skip()
                    continue
                for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                    parameter.grad = gradient
                optimizer.step()
            error = common.error_of(model, test_loader)
            optimizer.scheduler.step(error)
            session.print(f"error {error:.4f}, learning rate {optimizer.scheduler.get_last_lr()[0]:.4f}")


if __name__ == "__main__":
    main()
