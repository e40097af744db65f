"""The queue of Slurm: the batch script of a job, and Slurm's commands."""
