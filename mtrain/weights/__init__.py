"""Weights in and out: files of other programs read and written with numpy alone. No framework is imported, nothing is executed.

``reading.read`` (any known file, checkpoint or run) -> ``matching.match`` (to a model's names and shapes) -> ``writing.write``.
"""
