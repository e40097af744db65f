"""Load data: worker processes prepare micro batches in shared memory."""
