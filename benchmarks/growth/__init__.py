"""Measurements of how the cost of mtrain's own parts grows with hosts, samples, parameters and runs."""
