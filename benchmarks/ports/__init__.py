"""Measure the ports of examples/ports against their originals: `python -m benchmarks.ports`."""
