"""Readers of texts for language modelling."""
