"""The script of train_torch.py on Paddle, as far as the frameworks have the same layers."""

import argparse

import paddle
from paddle import nn
from points import Plain, Points, accuracy

import mtrain


class Net(nn.Layer):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(dropout), nn.Linear(32, 2))

    def forward(self, inputs):
        return self.body(inputs)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--accumulate", type=int, default=2)
    parser.add_argument("--precision", default=None)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--native", help="an optimizer of paddle.optimizer")
    flags = parser.parse_args()
    rule = mtrain.AdamW(learning_rate=1e-2, weight_decay=0.05, groups=[mtrain.Group(match="bias", weight_decay=0.0)])
    if flags.native:
        rule = lambda model: getattr(paddle.optimizer, flags.native)(0.01, parameters=model.parameters())  # noqa: E731
    with mtrain.session() as session:
        model, optimizer = session.prepare(
            lambda: Net(flags.dropout),
            optimizer=rule,
            schedule=mtrain.Cosine(warmup=5),
            clip_norm=1.0,
            accumulate=flags.accumulate,
            ema=0.9,
            precision=flags.precision,
        )
        for inputs, targets in session.batches(Points(240, 0), global_batch=24, epochs=3):
            loss = nn.functional.cross_entropy(model(inputs), targets)
            optimizer.update(loss)
        session.evaluate(model, Plain(101, 1), metric=accuracy, score="accuracy")


if __name__ == "__main__":
    paddle.set_default_dtype("float32")
    main()
