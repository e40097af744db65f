"""Copies of checkpoints at an address such as ``s3://bucket/prefix``: written while a job runs, and restored from there."""
