"""A small training with Keras and dropout, with mtrain's callback; words say how it ends, and of which kind its random numbers are."""

import os
import sys
import time
from pathlib import Path

import numpy as np
import tensorflow as tf

import mtrain_tensorflow.keras

if "saved_numbers" in sys.argv:
    tf.keras.backend.experimental.enable_tf_random_generator()
tf.keras.backend.set_floatx("float64")
tf.keras.utils.set_random_seed(3)


class Noise(tf.keras.layers.Layer):
    """Adds noise from a generator of its own while training."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = tf.random.Generator.from_seed(5)

    def call(self, inputs: tf.Tensor, training: bool | None = None) -> tf.Tensor:
        if not training:
            return inputs
        return inputs + 0.1 * self.generator.normal(tf.shape(inputs), dtype=inputs.dtype)


class Slow(tf.keras.callbacks.Callback):
    """Says how many updates this process has made, waits after each, and fails as asked."""

    made = 0

    def on_train_batch_end(self, batch: int, logs: object = None) -> None:
        self.made += 1
        Path("made").write_text(str(self.made))
        time.sleep(0.4)
        if "raises" in sys.argv and batch == 2:
            raise ValueError("a bad number")


model = tf.keras.Sequential(
    [
        tf.keras.layers.Input(shape=(6,)),
        tf.keras.layers.Dense(8),
        tf.keras.layers.Dropout(0.5),
        Noise(),
        tf.keras.layers.Dense(1),
    ]
)
model.compile(optimizer="adam", loss="mse")
generator = np.random.default_rng(1)
inputs, targets = generator.normal(size=(80, 6)), generator.normal(size=(80, 1))
data = tf.data.Dataset.from_tensor_slices((inputs, targets)).repeat().batch(8)
epochs = 1 if {"exits", "gone", "raises"} & set(sys.argv) else 3
model.fit(data, steps_per_epoch=10, epochs=epochs, verbose=0, callbacks=[mtrain_tensorflow.keras.Callback(), Slow()])
np.savez(Path("weights.npz"), **{weight.name: weight.numpy() for weight in model.weights})
if "exits" in sys.argv:
    sys.exit(3)
if "gone" in sys.argv:
    os._exit(3)
