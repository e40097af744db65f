"""Neutral layers and functions on Paddle, and the engine that all backends on Paddle share."""

import signal
import threading
import warnings

# Paddle 2.6 exports the symbols of its own zlib. Python's zlib module, loaded afterwards, would bind to those and fail,
# so it is loaded first.
import zlib  # noqa: F401

from mtrain.system import vectors

vectors.allow()

with warnings.catch_warnings():
    # The warnings at import concern people who compile extensions for Paddle.
    warnings.simplefilter("ignore")
    import paddle  # noqa: F401

if threading.current_thread() is threading.main_thread():
    # Importing Paddle replaces the handler of SIGTERM by its own, which ends the process: a rank could not save its
    # state. Python still has its handler on record, so setting it again restores it.
    signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))
