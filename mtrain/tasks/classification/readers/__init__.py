"""Readers of data sets with one class per image."""
