"""Train a small classifier on the handwritten digits of scikit-learn: `mtrain run --nproc-per-node 2 train.py`."""

from sklearn.datasets import load_digits
from torch import nn

import mtrain


class Digits:
    """Images (1, 8, 8) of digits and their classes."""

    def __init__(self, *, training: bool) -> None:
        digits = load_digits()
        part = slice(0, 1440) if training else slice(1440, None)
        self.images = (digits.images[part, None] / 16).astype("float32")
        self.classes = digits.target[part].astype("int64")

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int):
        return self.images[index], self.classes[index]


def network() -> nn.Module:
    """Build the network."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.1),
        nn.Linear(16 * 16, 10),
    )


def accuracy(predictions, targets) -> float:
    """Return the share of samples whose largest output is that of their class."""
    return float((predictions.argmax(1) == targets).mean())


def main() -> None:
    """Train, evaluate, and say how well."""
    with mtrain.session() as session:
        model, optimizer = session.prepare(
            network,
            optimizer=mtrain.AdamW(learning_rate=3e-3),
            schedule=mtrain.Cosine(warmup=10),
            clip_norm=1.0,
            ema=0.95,
        )
        for images, classes in session.batches(Digits(training=True), global_batch=48, epochs=10):
            loss = nn.functional.cross_entropy(model(images), classes)
            optimizer.update(loss)
        metrics = session.evaluate(model, Digits(training=False), metric=accuracy, score="accuracy")
        session.print(f"accuracy {metrics['accuracy']:.3f}")


if __name__ == "__main__":
    main()
