"""What brings a job to several hosts: one file per cluster. They are plugins of the group ``mtrain.clusters``."""
