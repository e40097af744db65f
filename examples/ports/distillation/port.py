"""The distillation on mtrain: `mtrain run --nproc-per-node 2 --seed 5 port.py`."""

import common
import torch
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader

import mtrain


def main() -> None:
    """Train the student, and evaluate it; the weights are in the run folder."""
    with mtrain.session() as session:
        train_loader = DataLoader(common.Digits(train=True), batch_size=common.GLOBAL_BATCH)
        test_set = common.Digits(train=False)
        test_loader = DataLoader(test_set, batch_size=common.GLOBAL_BATCH)
        student, optimizer = session.prepare(
            common.student,
            optimizer=mtrain.SGD(learning_rate=0.2, momentum=0.9),
            scheduler=lambda optimizer: CosineAnnealingLR(optimizer, T_max=common.EPOCHS),
            name="student",
        )
        teacher, _ = session.prepare(common.teacher, name="teacher")
        teacher.eval()
        for _ in session.epochs(common.EPOCHS):
            for images, classes in session.batches(train_loader):
                with torch.no_grad():
                    taught = teacher(images)
                logits = student(images)
                loss = 0.3 * cross_entropy(logits, classes) + 0.7 * common.distance(logits, taught)
                optimizer.update(loss)
            optimizer.scheduler.step()
        metrics = session.evaluate(student, test_loader, metric=common.accuracy)
        session.print(f"accuracy {metrics['accuracy']:.3f}")


if __name__ == "__main__":
    main()
