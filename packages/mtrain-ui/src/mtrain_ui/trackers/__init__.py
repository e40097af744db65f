"""Trackers: reporters that write to programs of others."""
