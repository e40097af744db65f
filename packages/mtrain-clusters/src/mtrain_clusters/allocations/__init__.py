"""Allocations of schedulers, recognised by their variables."""
