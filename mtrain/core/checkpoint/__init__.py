"""Checkpoints on disk: their format, the store of a run, and sending them to other hosts."""
