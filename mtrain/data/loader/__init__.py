"""The loader: worker processes that prepare micro batches in shared memory."""
