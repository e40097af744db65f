"""Benchmarks that measure mtrain against named peers in the same run, and report ratios."""
