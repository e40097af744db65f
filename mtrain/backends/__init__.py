"""Backends: ways of training on many ranks.

Each public backend module is the target of one `mtrain.backends` entry point.
"""
