"""What only users' scripts need of torch: their own optimizers, process groups, Keras models."""
