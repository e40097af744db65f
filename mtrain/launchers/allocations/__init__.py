"""Plugins that recognise the allocation of a scheduler, or a starter of processes, by its environment variables.

One file per environment. Each reads the variables that its program documents, and calls no command.
"""
