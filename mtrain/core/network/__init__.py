"""What is done to a network: quantised, pruned and recomputed blocks, its random bits."""
