"""A user's own model on a user's own data: what a spec names by ``PATH.py:Name`` in place of plugins."""
