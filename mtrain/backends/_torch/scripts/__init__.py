"""What only users' scripts need of torch: their own optimizers and process groups."""
