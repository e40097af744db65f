"""Paddle's fleet example on mtrain: `mtrain run --backend fleet --nproc-per-node 2 --seed 42 port.py`.

The original is the guide "cluster_quick_start_collective" of https://github.com/PaddlePaddle/docs.
"""

import common
from paddle.nn.functional import cross_entropy

import mtrain


def main() -> None:
    """Train and evaluate; the weights are in the run folder."""
    with mtrain.session() as session:
        train_set, test_set = common.Digits(train=True), common.Digits(train=False)
        rule = common.optimizer_of if common.ORDER else mtrain.Adam(learning_rate=common.RATE)
        model, optimizer = session.prepare(common.network, optimizer=rule)
        for data, target in session.batches(
            train_set, global_batch=common.GLOBAL_BATCH, epochs=common.EPOCHS, order=common.ORDER
        ):
            loss = cross_entropy(model(data), target)
            optimizer.update(loss)
        metrics = session.evaluate(model, test_set, metric=common.accuracy)
        session.print(f"accuracy {metrics['accuracy']:.3f}")


if __name__ == "__main__":
    main()
