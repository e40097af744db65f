"""ConvNeXt classifiers for mtrain (Liu et al. 2022, arXiv 2201.03545)."""
