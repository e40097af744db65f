"""The ports with Keras and with a GradientTape in one script, in which the first argument plants a fault."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[4] / "examples/ports/horovod_keras"))
sys.argv.append("--fp64")

import common  # noqa: E402
import horovod.tensorflow.keras as hvd  # noqa: E402
import tensorflow as tf  # noqa: E402

FAULT = sys.argv[1]
hvd.init()
RANK, SIZE = hvd.rank(), hvd.size()


def model():
    """Return the model; its start weights are those of the seed, and its random numbers the rank's own."""
    made = common.network()
    if FAULT == "no_broadcast":
        tf.keras.utils.set_random_seed(common.SEED + RANK)
        made = tf.keras.models.clone_model(made)
    if FAULT.endswith("dropout"):
        tf.keras.utils.set_random_seed(common.SEED + (RANK if FAULT == "own_dropout" else 0))
        layers = [tf.keras.layers.Dropout(0.2) if "dropout" in layer.name else layer for layer in made.layers]
        made = tf.keras.Sequential([tf.keras.layers.Input(shape=(8, 8, 1)), *layers])
    return made


def fit():
    """Train with model.fit."""
    data = common.training_data(RANK, SIZE)
    steps = common.STEPS
    if FAULT == "steps_not_divided":
        steps *= SIZE
    if FAULT in ("rate_not_scaled", "rate_scaled"):
        data, steps = data.unbatch().batch(common.GLOBAL_BATCH), steps // SIZE
    rate = 0.001 * (SIZE if FAULT == "rate_scaled" else 1)
    network = model()
    network.compile(
        loss="sparse_categorical_crossentropy",
        optimizer=hvd.DistributedOptimizer(tf.keras.optimizers.Adam(rate)),
        metrics=["accuracy"],
    )
    callbacks = []
    if FAULT != "no_broadcast":
        callbacks.append(hvd.callbacks.BroadcastGlobalVariablesCallback(0))
    if FAULT != "metric_not_averaged":
        callbacks.append(hvd.callbacks.MetricAverageCallback())
    if RANK == 0 or FAULT == "saved_on_all":
        callbacks.append(tf.keras.callbacks.ModelCheckpoint("saved-{epoch}", save_weights_only=True))
    network.fit(data, steps_per_epoch=steps, epochs=1, callbacks=callbacks, verbose=0)


def tape():
    """Train with a GradientTape."""
    network, optimizer = model(), tf.optimizers.SGD(0.1)

    @tf.function
    def step(images, labels):
        with tf.GradientTape() as tape:
            loss = tf.losses.SparseCategoricalCrossentropy()(labels, network(images, training=True))
        if FAULT != "tape_not_wrapped":
            tape = __import__("horovod.tensorflow").tensorflow.DistributedGradientTape(tape)
        gradients = tape.gradient(loss, network.trainable_variables)
        if FAULT == "averaged_twice":
            gradients = [gradient / SIZE for gradient in gradients]
        optimizer.apply_gradients(zip(gradients, network.trainable_variables, strict=True))

    for images, labels in common.training_data(RANK, SIZE).take(common.STEPS):
        step(images, labels)


tape() if FAULT in ("tape", "tape_not_wrapped", "averaged_twice") else fit()
