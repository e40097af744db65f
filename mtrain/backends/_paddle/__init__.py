"""Paddle: neutral layers and functions, and the engine that all backends on it share."""

import signal
import threading
import warnings

# Paddle 2.6 exports its own zlib; a Python module that first asks for zlib after it gets that one, and fails. So it is loaded before.
import zlib  # noqa: F401

with warnings.catch_warnings():
    # What importing says concerns those who compile extensions for Paddle.
    warnings.simplefilter("ignore")
    import paddle  # noqa: F401

if threading.current_thread() is threading.main_thread():
    # Importing Paddle puts a handler of its own in the place of Python's, which ends the process: a rank could not save its state.
    signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))
