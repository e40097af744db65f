"""PP-YOLOE (Xu et al. 2022, arXiv 2203.16250)."""
