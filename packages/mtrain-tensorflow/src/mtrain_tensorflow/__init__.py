"""What mtrain adds to scripts that train with TensorFlow and Keras: ``mtrain_tensorflow.keras``."""

__version__ = "0.1.0"
