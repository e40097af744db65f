"""A training script on torch with what models of users bring: dropout, tied weights, weights that are used never or now
and then, integer and non-persistent buffers, and a transform that draws random numbers."""

import argparse
import time

import torch
from points import Plain, Points, accuracy
from torch import nn

import mtrain


class Net(nn.Module):
    def __init__(self, dropout: float, *, branches: bool) -> None:
        super().__init__()
        self.branches = branches
        self.body = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(dropout), nn.Linear(32, 2))
        self.seldom = nn.Linear(8, 2)
        self.never = nn.Linear(8, 2)
        self.tied = nn.Linear(8, 2, bias=False)
        self.tied.weight = self.seldom.weight
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def forward(self, inputs):
        if self.training:
            self.calls += 1
        outputs = self.body(inputs)
        if self.branches and self.training and self.calls % 2:
            return outputs + self.seldom(inputs) + self.tied(inputs)
        return outputs


class Total:
    def __init__(self) -> None:
        self.batches, self.sum = 0, torch.zeros(())

    def state_dict(self):
        return {"batches": self.batches, "sum": self.sum}

    def load_state_dict(self, state):
        self.batches, self.sum = state["batches"], state["sum"]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--accumulate", type=int, default=2)
    parser.add_argument("--precision", default=None)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--delay", type=float, default=0.0)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--no-branches", action="store_true", help="every call of the model takes the same way")
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--native", help="an optimizer of torch.optim")
    flags = parser.parse_args()
    rule = mtrain.AdamW(learning_rate=1e-2, weight_decay=0.05, groups=[mtrain.Group(match="bias", weight_decay=0.0)])
    if flags.native:
        rule = lambda model: getattr(torch.optim, flags.native)(model.parameters(), lr=1e-2)  # noqa: E731
    with mtrain.session() as session:
        model, optimizer = session.prepare(
            lambda: Net(flags.dropout, branches=not flags.no_branches),
            optimizer=rule,
            schedule=mtrain.Cosine(warmup=5),
            clip_norm=1.0,
            accumulate=flags.accumulate,
            ema=0.9,
            precision=flags.precision,
        )
        total = Total()
        session.keep("total", total)
        for inputs, targets in session.batches(
            Points(240, 0), global_batch=24, epochs=flags.epochs, workers=flags.workers
        ):
            time.sleep(flags.delay)
            loss = nn.functional.cross_entropy(model(inputs), targets)
            optimizer.update(loss)
            total.batches += 1
            # Equal on all ranks, as what is kept has to be; the sum shows whether a resumed run goes on with its bits.
            total.sum = total.sum + 1 / total.batches
            session.log(double=2 * loss)
        metrics = session.evaluate(model, Plain(101, 1), metric=accuracy, score="accuracy")
        session.print(f"accuracy {metrics['accuracy']:.3f} after {total.batches} batches, sum {float(total.sum):.9f}")


if __name__ == "__main__":
    main()
