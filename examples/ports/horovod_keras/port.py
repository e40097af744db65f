"""Horovod's Keras example with mtrain's callback: `mtrain run --backend horovod --nproc-per-node 2 port.py`.

In the form of https://github.com/horovod/horovod/blob/master/examples/tensorflow2/tensorflow2_keras_mnist.py, with the batch of
a rank, and not the learning rate, depending on the number of ranks.
"""

import common
import horovod.tensorflow.keras as hvd
import tensorflow as tf

import mtrain_tensorflow.keras


def main() -> None:
    """Train, and save the weights."""
    hvd.init()
    data = common.training_data(hvd.rank(), hvd.size())
    model = common.network()
    optimizer = hvd.DistributedOptimizer(tf.keras.optimizers.Adam(0.001), average_aggregated_gradients=True)
    model.compile(
        loss=tf.keras.losses.SparseCategoricalCrossentropy(),
        optimizer=optimizer,
        metrics=["accuracy"],
        experimental_run_tf_function=False,
    )
    callbacks = [
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.MetricAverageCallback(),
    ]
    callbacks.append(mtrain_tensorflow.keras.Callback())
    model.fit(
        data,
        steps_per_epoch=common.STEPS,
        callbacks=callbacks,
        epochs=common.EPOCHS,
        validation_data=common.digits(train=False),
        verbose=2 if hvd.rank() == 0 else 0,
    )
    if hvd.rank() == 0:
        common.save(model, "weights.npz")


if __name__ == "__main__":
    main()
