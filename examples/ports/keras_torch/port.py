"""A model of Keras 3 on mtrain: `mtrain run --backend deepspeed -o backend.options.stage=3 --nproc-per-node 2 --seed 42 port.py`.

In the form of the guide https://keras.io/guides/writing_a_custom_training_loop_in_torch/.
"""

import common
from torch.nn.functional import cross_entropy

import mtrain


def main() -> None:
    """Train and evaluate; the weights are in the run folder."""
    with mtrain.session() as session:
        train_set, test_set = common.Digits(train=True), common.Digits(train=False)
        model, optimizer = session.prepare(lambda: common.network(), optimizer=mtrain.Adam(learning_rate=common.RATE))
        for images, classes in session.batches(
            train_set, global_batch=common.GLOBAL_BATCH, epochs=common.EPOCHS, order=common.order
        ):
            loss = cross_entropy(model(images), classes)
            optimizer.update(loss)
        metrics = session.evaluate(model, test_set, metric=common.accuracy)
        session.print(f"accuracy {metrics['accuracy']:.3f}")


if __name__ == "__main__":
    main()
