"""The framework-independent part of training: the interfaces, the training loop, and the modules that the loop uses.

Nothing here imports a framework, a backend or a task.
"""
