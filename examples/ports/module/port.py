"""A module in the form of Lightning's on mtrain: `mtrain run --nproc-per-node 2 --seed 29 port.py`."""

import common
from torch.utils.data import DataLoader

import mtrain


def main() -> None:
    """Train as the module says, and evaluate; the weights are in the run folder."""
    with mtrain.session() as session:
        train_loader = DataLoader(common.Digits(train=True), batch_size=common.GLOBAL_BATCH)
        test_set = common.Digits(train=False)
        test_loader = DataLoader(test_set, batch_size=common.GLOBAL_BATCH)
        module, optimizer = session.prepare(
            common.Classifier, optimizer=lambda module: tuple(module.configure_optimizers().values()), overlap=False
        )
        for _ in session.epochs(common.EPOCHS):
            for index, batch in enumerate(session.batches(train_loader)):
                optimizer.update(module.training_step(batch, index))
            optimizer.scheduler.step()
            metrics = session.evaluate(
                module,
                test_loader,
                step=lambda module, batch: module.validation_step(batch, 0),
                metric=lambda predicted, true: {"accuracy": (predicted == true).mean()},
            )
            session.print(f"accuracy {metrics['accuracy']:.3f}")


if __name__ == "__main__":
    main()
