"""Specs, the description of a job by its user: read, merge and validate them, and find the plugins that they name."""
