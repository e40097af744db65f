"""Read and write files of weights of other programs with numpy alone: no framework is imported, nothing is executed.

``reading.read`` (any known file, checkpoint or run) -> ``matching.match`` (to a model's names and shapes) ->
``writing.write``.
"""
