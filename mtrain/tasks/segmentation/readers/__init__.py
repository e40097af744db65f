"""Readers of data sets with masks."""
