"""A job that goes on: find its run and checkpoint, load what was chosen for the run, and check that both fit.

``find``: the run folder and its newest intact checkpoint, on this host. ``fetch``: the same from copies at an address.
``choices``: the file of a run folder that says what was chosen. ``load``: the spec of the job that goes on. ``compare``:
what differs from the spec of the run, in words. ``check``: whether a checkpoint fits the job.

Ranks compare the samples themselves (``core/samples/resumed_samples``), and copy checkpoints (``weights/backup``): they import
nothing of this folder.
"""
