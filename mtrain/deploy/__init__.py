"""Other forms of a trained model: exported, quantised, pruned and served."""
