"""The mean teacher on mtrain: `mtrain run --nproc-per-node 2 --seed 11 port.py`."""

import common
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import mtrain


def main() -> None:
    """Train the student; its weights and the teacher's are in the run folder."""
    with mtrain.session() as session:
        labelled, unlabelled = common.Digits(labelled=True), common.Digits(labelled=False)
        labelled_loader = DataLoader(labelled, batch_size=common.LABELLED_BATCH)
        unlabelled_loader = DataLoader(unlabelled, batch_size=common.UNLABELLED_BATCH)
        student, optimizer = session.prepare(
            common.network, optimizer=mtrain.SGD(learning_rate=0.1, momentum=0.9, nesterov=True), name="student"
        )
        teacher, _ = session.prepare(common.network, name="teacher")
        session.follow(teacher, student)
        for (images, _, classes), (first, second, _) in session.batches(
            (labelled_loader, unlabelled_loader), epochs=common.EPOCHS
        ):
            with torch.no_grad():
                taught = teacher(second)
            loss = cross_entropy(student(images), classes) + 5 * common.disagreement(student(first), taught)
            optimizer.update(loss)
            session.follow(teacher, student, 0.05)


if __name__ == "__main__":
    main()
