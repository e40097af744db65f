"""A job's state as named arrays: digests, checks, streams, and the trace of every update."""
