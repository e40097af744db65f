"""Horovod's example with a GradientTape, joined to mtrain: `mtrain run --backend horovod --nproc-per-node 2 port.py`.

In the form of https://github.com/horovod/horovod/blob/master/examples/tensorflow2/tensorflow2_mnist.py, with the batch of a rank,
and not the learning rate, depending on the number of ranks.
"""

import common
import horovod.tensorflow as hvd
import tensorflow as tf

import mtrain_tensorflow.keras


def main() -> None:
    """Train, and save the weights."""
    hvd.init()
    data = common.training_data(hvd.rank(), hvd.size())
    model = common.network()
    loss_of = tf.losses.SparseCategoricalCrossentropy()
    optimizer = tf.optimizers.Adam(0.001)

    @tf.function
    def training_step(images: tf.Tensor, labels: tf.Tensor, *, first_batch: bool) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = loss_of(labels, model(images, training=True))
        tape = hvd.DistributedGradientTape(tape)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        if first_batch:
            hvd.broadcast_variables(model.variables, root_rank=0)
            hvd.broadcast_variables(optimizer.variables, root_rank=0)
        return loss

    updates = common.EPOCHS * common.STEPS
    training = mtrain_tensorflow.keras.attach(model, optimizer, updates=updates, updates_per_epoch=common.STEPS)
    for images, labels in training.batches(data):
        loss = training_step(images, labels, first_batch=training.update == 0)
        training.step(loss=loss)
    if hvd.rank() == 0:
        common.save(model, "weights.npz")


if __name__ == "__main__":
    main()
