"""Augmentation of training pictures with boxes."""
