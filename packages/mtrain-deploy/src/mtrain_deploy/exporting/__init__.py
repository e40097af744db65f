"""``mtrain export``: a trained model as a file that other programs can run."""
