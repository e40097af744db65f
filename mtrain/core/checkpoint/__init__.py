"""Checkpoints: their format on disk, the checkpoints of a run, and sending one to the ranks of other hosts."""
