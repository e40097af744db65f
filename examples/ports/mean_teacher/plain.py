"""A mean teacher, in one process: `python plain.py`. The student agrees with a slow average of itself on images without classes."""

import copy

import common
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader


def main() -> None:
    """Train the student, and save its weights and the teacher's."""
    torch.manual_seed(common.SEED)
    labelled, unlabelled = common.Digits(labelled=True), common.Digits(labelled=False)
    labelled_loader = DataLoader(labelled, batch_size=common.LABELLED_BATCH)
    unlabelled_loader = DataLoader(unlabelled, batch_size=common.UNLABELLED_BATCH)
    student = common.network()
    optimizer = torch.optim.SGD(student.parameters(), lr=0.1, momentum=0.9, nesterov=True, fused=True)
    teacher = copy.deepcopy(student)
    for epoch in range(common.EPOCHS):
        labelled.set_epoch(epoch)
        unlabelled.set_epoch(epoch)
        for (images, _, classes), (first, second, _) in zip(labelled_loader, unlabelled_loader, strict=True):
            with torch.no_grad():
                taught = teacher(second)
            loss = cross_entropy(student(images), classes) + 5 * common.disagreement(student(first), taught)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                for slow, fast in zip(teacher.parameters(), student.parameters(), strict=True):
                    slow.lerp_(fast, 0.05)
    torch.save(student.state_dict(), "student.pt")
    torch.save(teacher.state_dict(), "teacher.pt")


if __name__ == "__main__":
    main()
