"""Augmentation of training images with boxes."""
