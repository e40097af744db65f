"""Segmentation: predict a class for each pixel of an image."""
