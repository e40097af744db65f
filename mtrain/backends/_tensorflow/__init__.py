"""What mtrain adds to scripts that train with TensorFlow and Keras: ``mtrain.keras``."""
