"""Searches for good values of a spec: trials that are ordinary jobs, proposed and judged through Optuna."""
