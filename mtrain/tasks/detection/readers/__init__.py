"""Readers of detection data sets, one module per format."""
