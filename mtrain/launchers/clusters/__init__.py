"""Clusters bring a job to several hosts, one file each. They are plugins of the group ``mtrain.clusters``."""
