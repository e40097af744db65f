"""Ratios against named peers, measured in the same run."""
