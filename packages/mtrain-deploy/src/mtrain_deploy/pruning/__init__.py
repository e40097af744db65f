"""Pruning: find the channels of a network that depend on one another, remove the least important, write the rest."""
