"""Segmentation: predict a class for each pixel of a picture."""
