"""A linear regression on Horovod in the form of TensorFlow 1: `horovodrun -np 2 --gloo python peer.py`.

In the form of https://github.com/horovod/horovod/blob/master/examples/tensorflow/tensorflow_mnist.py: a graph, a broadcast hook and a
MonitoredTrainingSession, whose checkpoints of rank 0 let a job that was ended go on. `--fp64` computes in float64.
"""

import os
import sys

import horovod.tensorflow as hvd
import numpy as np
import tensorflow.compat.v1 as tf

GLOBAL_BATCH, UPDATES, SAMPLES, SEED = 24, 40, 240, 7
DTYPE = np.float64 if "--fp64" in sys.argv else np.float32
FOLDER = os.environ.get("CHECKPOINTS", "checkpoints-of-session")


def samples() -> tuple[np.ndarray, np.ndarray]:
    """Return inputs of five numbers, and targets that are a linear function of them with noise."""
    generator = np.random.default_rng(SEED)
    inputs = generator.normal(size=(SAMPLES, 5))
    targets = inputs @ np.array([1.0, -2.0, 0.5, 3.0, 0.0]) + 0.7 + 0.1 * generator.normal(size=SAMPLES)
    return inputs.astype(DTYPE), targets.astype(DTYPE)[:, None]


def main() -> None:
    """Train, and save the weights."""
    hvd.init()
    tf.disable_eager_execution()
    tf.set_random_seed(SEED)
    inputs, targets = samples()
    x, y = tf.placeholder(DTYPE, [None, 5]), tf.placeholder(DTYPE, [None, 1])
    weight = tf.get_variable("weight", [5, 1], DTYPE, tf.zeros_initializer())
    bias = tf.get_variable("bias", [1], DTYPE, tf.zeros_initializer())
    loss = tf.reduce_mean(tf.square(x @ weight + bias - y))
    step = tf.train.get_or_create_global_step()
    optimizer = hvd.DistributedOptimizer(tf.train.MomentumOptimizer(0.05, 0.9))
    train = optimizer.minimize(loss, global_step=step)
    with tf.control_dependencies([train]):
        after = {"weight": weight.read_value(), "bias": bias.read_value(), "step": step.read_value()}
    hooks = [hvd.BroadcastGlobalVariablesHook(0), tf.train.StopAtStepHook(last_step=UPDATES)]
    folder = FOLDER if hvd.rank() == 0 else None
    final = {}
    with tf.train.MonitoredTrainingSession(
        checkpoint_dir=folder, hooks=hooks, save_checkpoint_steps=10, log_step_count_steps=None
    ) as session:
        # The broadcast hook has given all ranks the step of rank 0, from which the job goes on.
        done = session.run_step_fn(lambda step_context: step_context.session.run(step))
        while not session.should_stop():
            rows = np.arange(done * GLOBAL_BATCH, (done + 1) * GLOBAL_BATCH)[hvd.rank() :: hvd.size()] % SAMPLES
            final = session.run(after, {x: inputs[rows], y: targets[rows]})
            done = final.pop("step")
    if hvd.rank() == 0 and final:
        np.savez("weights.npz", **final)


if __name__ == "__main__":
    main()
