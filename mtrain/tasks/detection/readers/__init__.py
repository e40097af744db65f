"""Readers of annotation formats, one plugin each."""
