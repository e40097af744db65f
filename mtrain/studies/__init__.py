"""Many jobs and one answer: comparisons and sweeps."""
