"""Data and model of Horovod's Keras example, shared by peer.py and port.py.

Data: the handwritten digits of scikit-learn (8 x 8 pixels) in place of MNIST. The global batch is 96 samples for every number
of ranks, and rank r takes every size-th sample of the same order, so training is the same whatever the ranks are. Dropout is 0, because
its random numbers depend on the number of ranks. With `--fp64` everything is computed in float64.
"""

import sys

import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

GLOBAL_BATCH, EPOCHS, SEED = 96, 3, 42
TRAINING_SAMPLES = 1440
STEPS = TRAINING_SAMPLES // GLOBAL_BATCH

if "--fp64" in sys.argv:
    tf.keras.backend.set_floatx("float64")
DTYPE = tf.keras.backend.floatx()


def digits(*, train: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return images (8, 8, 1) and their classes."""
    loaded = load_digits()
    part = slice(0, TRAINING_SAMPLES) if train else slice(TRAINING_SAMPLES, None)
    return (loaded.images[part, ..., None] / 16).astype(DTYPE), loaded.target[part].astype(np.int64)


def training_data(rank: int, size: int) -> tf.data.Dataset:
    """Return the batches of one rank, epoch after epoch; each epoch has an order of its own, by the seed alone."""
    data = tf.data.Dataset.from_tensor_slices(digits(train=True))
    data = data.shuffle(TRAINING_SAMPLES, seed=SEED, reshuffle_each_iteration=True).repeat()
    return data.shard(size, rank).batch(GLOBAL_BATCH // size)


def network() -> tf.keras.Model:
    """Build the model with the weights of the seed."""
    tf.keras.utils.set_random_seed(SEED)
    return tf.keras.Sequential(
        [
            tf.keras.layers.Input(shape=(8, 8, 1)),
            tf.keras.layers.Conv2D(16, [3, 3], activation="relu"),
            tf.keras.layers.Conv2D(32, [3, 3], activation="relu"),
            tf.keras.layers.MaxPooling2D(pool_size=(2, 2)),
            tf.keras.layers.Dropout(0.0),
            tf.keras.layers.Flatten(),
            tf.keras.layers.Dense(64, activation="relu"),
            tf.keras.layers.Dense(10, activation="softmax"),
        ]
    )


def save(model: tf.keras.Model, name: str) -> None:
    """Write the weights under their names."""
    np.savez(name, **{weight.name: weight.numpy() for weight in model.weights})
