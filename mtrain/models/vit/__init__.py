"""A small vision transformer (Dosovitskiy et al. 2021, arXiv 2010.11929)."""
