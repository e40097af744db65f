"""``mtrain.keras``: scripts that train with TensorFlow and Keras, alone or with Horovod."""
