"""Residual networks (He et al. 2015, arXiv 1512.03385)."""
