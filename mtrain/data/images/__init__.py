"""Decode, transform, colour and draw images, independently of the task."""
