"""Parts of the cluster ``ray``."""
